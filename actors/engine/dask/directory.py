"""The directory: which actors there are, where, and what is kept and reserved. A state machine that knows no Dask.

Rules
- Of two who start an actor under one name, both get the one that was there first. An actor has a name until it was
  killed, or ended and is not started again; its key is its own for ever.
- A life is one process of an actor. When it ends, what it owns ends with it: actors that do not outlive their starter,
  and reservations. An actor that restarts has its next life at once, and later and later if lives are short.
- A constructor's error ends an actor in its first life. In a later one it is a crash like others, as what the actor
  needs may be away for a while.
- What a killed actor takes and owns is free when its process has ended.
- Of the hosts on a machine the first is its node. When that leaves or ends, the next one becomes a node.
- A node offers the memory that was available, less what Dask's workers may take, but no less than half: by default they
  may take all, and mostly do not.
- A node that leaves takes nothing new. It ends when it has no actors, when there is no node to go to, or when it is
  late (`late`) and no memory is reserved on it: a shard that still moves its data has its reservation.
- Methods change the state, and leave orders for hosts in `orders` and the names of what changed in `changed`: keys of
  actors, and addresses of hosts that leave or have ended.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace

from ....store.errors import OptionError
from ..engine import Node
from .placing import Load, choose
from .records import End, Host, Kill, Life, Order, Plan, Reach, Standing, Start, State

SETTLED_S = 60.0
"""A life that was longer is no short one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between a short life and the next, from the second short one on."""
REMEMBERED = 1000
"""Ended actors of which it is known why."""
LEAST_SHARE = 0.5
"""Of the available memory, which a node offers."""


@dataclass(slots=True)
class _Actor:
    """An actor that has a name."""

    life: Life
    node: str | None
    """Where its life is; None: there is no room for it."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    node: str
    nbytes: int
    owner: str


class Directory:
    """The directory of one cluster.

    >>> directory = Directory()
    >>> directory.join(Host("node", "tcp://host:1", "host", "machine", memory=100, cpus=2.0))
    >>> plan = directory.spawn(Plan("k", "actor", b"", owner="client"))
    >>> [type(order).__name__ for _, order in directory.orders], directory.where(plan.key).state
    (['Start'], <State.STARTING: 1>)
    """

    def __init__(self) -> None:
        self.orders: list[tuple[str, Order]] = []
        """Host -> what it is to do; who carries them takes them out."""
        self.changed: set[str] = set()
        """Who tells of it takes them out."""
        self._hosts: dict[str, Host] = {}
        self._nodes: set[str] = set()
        self._leaving: dict[str, bool] = {}
        """Host -> whether it is late."""
        self._actors: dict[str, _Actor] = {}
        """By key."""
        self._names: dict[str, str] = {}
        self._dying: dict[tuple[str, int], _Actor] = {}
        """Lives that were to be killed, until they have ended."""
        self._ended: OrderedDict[str, Standing] = OrderedDict()
        self._kept: dict[str, bytes] = {}
        self._reserved: dict[str, _Reservation] = {}

    # ---- what callers ask -----------------------------------------------------------------------------

    def spawn(self, plan: Plan) -> Plan:
        """Start an actor, or find the one of that name; see `find`."""
        if plan.name not in self._names:
            self._names[plan.name] = plan.key
            self._actors[plan.key] = _Actor(Life(plan, 0), None)
            self._place(plan.key)
        return self.find(plan.name)

    def find(self, name: str) -> Plan:
        """Return the plan of the actor of a name, without what only its process needs.

        Raises:
            LookupError: there is none.
        """
        if name not in self._names:
            raise LookupError(f"no actor named {name!r} in this Dask cluster")
        return replace(self._actors[self._names[name]].life.plan, start=b"")

    def actors(self) -> dict[str, str | None]:
        """Return the names of all actors -> the node; None: it is being started."""
        found = {name: self.where(key) for name, key in self._names.items()}
        return {name: there.node if there.state is State.RUNNING else None for name, there in found.items()}

    def where(self, key: str) -> Standing:
        """Tell where an actor is."""
        actor = self._actors.get(key)
        if actor is None:
            return self._ended.get(key, Standing(State.ENDED, why="it is unknown: it has ended, or never existed"))
        reach = actor.life.reach
        state = State.RUNNING if reach is not None else State.RESTARTING if actor.life.number else State.STARTING
        return Standing(state, actor.node, reach)

    def kill(self, name: str) -> str | None:
        """End an actor for good; gives its key."""
        key = self._names.get(name)
        if key is not None:
            self._end(key, "it was killed")
        return key

    def is_over(self, key: str) -> bool:
        """Whether an actor and its processes have ended."""
        return key not in self._actors and not any(of == key for of, _ in self._dying)

    def nodes(self) -> list[tuple[Node, str]]:
        """List the nodes, and the machine of each."""
        return [(self._as_node(host), host.machine) for host in self._hosts.values() if host.id in self._nodes]

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep some bytes; None lets go of them."""
        if value is None:
            self._kept.pop(name, None)
        else:
            self._kept[name] = value

    def keep_absent(self, name: str, value: bytes) -> bool:
        """Keep some bytes unless the name is kept; return whether they are kept now."""
        is_new = name not in self._kept
        if is_new:
            self._kept[name] = value
        return is_new

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept under names that begin so."""
        return {name: value for name, value in self._kept.items() if name.startswith(prefix)}

    def reserve(self, name: str, node: str, nbytes: int, owner: str) -> bool:
        """Set memory of a node aside; False: it has not so much.

        Raises:
            OptionError: the name is taken.
        """
        if name in self._reserved:
            raise OptionError(f"reserve {name!r}: expected an unused name; memory is already reserved under it")
        if node not in self._nodes or nbytes > self._as_node(self._hosts[node]).memory_free:
            return False
        self._reserved[name] = _Reservation(node, nbytes, owner)
        return True

    def unreserve(self, name: str) -> None:
        """Let go of what was reserved under a name; nothing is no error."""
        self._reserved.pop(name, None)
        self._end_idle()

    def reserved(self, prefix: str) -> dict[str, str | None]:
        """Return what is reserved -> the node; None: it is no more."""
        found = {name: taken.node for name, taken in self._reserved.items() if name.startswith(prefix)}
        return {name: node if node in self._nodes else None for name, node in found.items()}

    # ---- what hosts and actors tell -------------------------------------------------------------------

    def join(self, host: Host) -> None:
        """Take a host in."""
        self._hosts[host.id] = host
        self._elect(host.machine)
        self._place_all()

    def left(self, id_: str) -> None:
        """Count a host as ended, with all lives on it."""
        host = self._hosts.pop(id_)
        self._nodes.discard(id_)
        self._leaving.pop(id_, None)
        self.changed.add(host.process)
        self._elect(host.machine)
        for key, number in [lived for lived, actor in self._dying.items() if actor.node == id_]:
            self._over(key, number)
        there = [(key, actor.life) for key, actor in self._actors.items() if actor.node == id_]
        for key, life in there:
            if key in self._actors:  # else it ended with its owner
                self._next_life(key, life, life.failures, "its node has ended", after_s=0.0)
        self._place_all()

    def leaves(self, id_: str) -> None:
        """Note that a host is about to leave."""
        self._leaving[id_] = False
        self.changed.add(self._hosts[id_].process)
        self._elect(self._hosts[id_].machine)
        self._place_all()

    def late(self, id_: str) -> None:
        """Note that a host has been leaving for so long that it waits for nothing but its reservations."""
        if id_ in self._leaving:
            self._leaving[id_] = True
            self._end_idle()

    def ready(self, key: str, number: int, reach: Reach) -> None:
        """Note that a life has started."""
        actor = self._actors.get(key)
        if actor is not None and actor.life.number == number:
            actor.life = replace(actor.life, reach=reach)
            self.changed.add(key)

    def failed(self, key: str, number: int, error: bytes, why: str) -> None:
        """Note what a constructor raised; the end of its process is told as well."""
        actor = self._actors.get(key)
        if actor is not None and actor.life.number == number == 0:
            self._end(key, why, error)

    def died(self, key: str, number: int, why: str, lived_s: float) -> None:
        """Note that a life has ended."""
        actor = self._actors.get(key)
        if (key, number) in self._dying:
            self._over(key, number)
        elif actor is not None and actor.life.number == number:
            failures = 0 if lived_s >= SETTLED_S else actor.life.failures
            pause = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S) if failures else 0.0
            self._next_life(key, actor.life, failures + 1, why, pause)
        self._place_all()

    def owner_ended(self, owner: str) -> None:
        """End what does not outlive a client, or a life of an actor."""
        for key, actor in list(self._actors.items()):
            plan = actor.life.plan
            if plan.owner == owner and not plan.lifetime.outlives and key in self._actors:
                self._end(key, "its starter has ended")
        self._reserved = {name: taken for name, taken in self._reserved.items() if taken.owner != owner}
        self._end_idle()

    # ---- what Dask asks -------------------------------------------------------------------------------

    def stays(self, process: str) -> bool | None:
        """Whether a nanny or worker, by its address, is a host that does not leave; None: it is no host."""
        found = [host.id not in self._leaving for host in self._hosts.values() if host.process == process]
        return found[0] if found else None

    def needed(self) -> set[str]:
        """Return the nannies and workers that are to close after the others of their machines."""
        machines = [host.machine for host in self._staying()]
        nodes = [host for host in self._staying() if host.id in self._nodes]
        return {host.process for host in nodes if machines.count(host.machine) > 1}

    # ---- within ---------------------------------------------------------------------------------------

    def _staying(self) -> list[Host]:
        return [host for host in self._hosts.values() if host.id not in self._leaving]

    def _elect(self, machine: str) -> None:
        """Have the first host of a machine that does not leave be its node."""
        self._nodes.update([host.id for host in self._staying() if host.machine == machine][:1])

    def _as_node(self, host: Host) -> Node:
        limits = sum(other.limit for other in self._hosts.values() if other.machine == host.machine)
        memory = max(host.memory - limits, int(LEAST_SHARE * host.memory))
        free = memory - sum(taken.nbytes for taken in self._reserved.values() if taken.node == host.id)
        resources: defaultdict[str, float] = defaultdict(float)
        for other in self._hosts.values():
            for name, amount in other.resources.items() if other.machine == host.machine else ():
                resources[name] += amount
        told = {**resources, "CPU": host.cpus, "GPU": float(len(host.gpus)), "memory": float(memory)}
        has = {name: amount for name, amount in told.items() if amount}
        return Node(host.id, free, has, host.labels, host.id in self._leaving, host.address)

    def _next_life(self, key: str, life: Life, failures: int, why: str, after_s: float) -> None:
        if not life.plan.lifetime.restarts:
            self._end(key, why)
            self._dying.pop((key, life.number), None)
        else:
            last = self._actors[key].node
            self._actors[key] = _Actor(Life(life.plan, life.number + 1, failures=failures), None)
            self._place(key, after_s, last)
        self.owner_ended(life.owner)

    def _end(self, key: str, why: str, error: bytes | None = None) -> None:
        """Take an actor out of the books, and have its process killed if it has one."""
        actor = self._actors.pop(key)
        del self._names[actor.life.plan.name]
        self._ended[key] = Standing(State.ENDED, why=why, error=error)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self.changed.add(key)
        if actor.node not in self._hosts:  # nor has it a process
            self.owner_ended(actor.life.owner)
            return
        self._dying[key, actor.life.number] = actor
        self.orders.append((actor.node, Kill(key, actor.life.number)))

    def _over(self, key: str, number: int) -> None:
        """Note that a process that was to end has ended."""
        actor = self._dying.pop((key, number))
        self.changed.add(key)
        self.owner_ended(actor.life.owner)

    def _place_all(self) -> None:
        for key in [key for key, actor in self._actors.items() if actor.node is None]:
            self._place(key)
        self._end_idle()

    def _place(self, key: str, after_s: float = 0.0, last: str | None = None) -> None:
        actor = self._actors[key]
        plan = actor.life.plan
        nodes = [host for host in self._staying() if host.id in self._nodes]
        chosen = choose(nodes, self._loads(), plan.lifetime, plan.node or last)
        if chosen is not None:
            actor.node, gpus = chosen
            actor.life = replace(actor.life, gpus=gpus)
            self.orders.append((actor.node, Start(actor.life, after_s)))
        self.changed.add(key)

    def _loads(self) -> defaultdict[str, Load]:
        loads: defaultdict[str, Load] = defaultdict(Load)
        for actor in (*self._actors.values(), *self._dying.values()):
            if actor.node is not None:
                loads[actor.node].add(actor.life.plan.lifetime, actor.life.gpus)
        return loads

    def _end_idle(self) -> None:
        """Let hosts go that leave, and have nothing left to do."""
        stuck = not self._staying()
        busy = {actor.node for actor in (*self._actors.values(), *self._dying.values())}
        holding = {taken.node for taken in self._reserved.values()}
        for host, late in self._leaving.items():
            may_end = stuck or host not in busy or (late and host not in holding)
            if may_end and (host, End()) not in self.orders:
                self.orders.append((host, End()))
