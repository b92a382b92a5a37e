"""The directory: which actors there are, where, and what is kept and reserved. A state machine that knows no Dask.

Rules
- Of two who start an actor under one name, both get the one that was there first. An actor has a name until it was
  killed, or ended and is not started again; its key is its own for ever.
- A life is one process of an actor. When it ends, what it owns ends with it: actors that do not outlive their starter,
  and reservations. An actor that restarts has its next life at once, and later and later if lives are short.
- A constructor's error ends an actor in its first life. In a later one it is a crash like others, as what the actor
  needs may be away for a while.
- Whoever is not in the books does not run: an agent that comes back with a life that was given up has to kill it. Only
  who nothing is known of is believed: then the directory is younger than the actor.
- What a killed actor takes and owns is free when its process has ended.
- A node that leaves takes nothing new. It ends when it has no actors, or when there is no node to go to.
- Methods change the state, and leave orders for agents in `orders` and the keys of actors that changed in `changed`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...engine import Node
from ..records import Agent, Copy, End, Kill, Order, Plan, Reach, Report, Standing, Start, State, life_of
from .facts import Facts
from .placing import Load, choose
from .reservations import Reservations

SETTLED_S = 60.0
"""A life that was longer is no short one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Between a short life and the next, from the second short one on."""
REMEMBERED = 1000
"""Ended actors of which it is known why."""


@dataclass(slots=True)
class _Actor:
    """An actor that has a name."""

    report: Report
    node: str | None
    """Where its life is; None: there is no room for it."""

    @property
    def owner(self) -> str:
        return life_of(self.report.plan.key, self.report.life)


class Directory:
    """The directory of one cluster.

    >>> directory = Directory()
    >>> directory.join(Agent("node", "host", "machine", memory=100, cpus=2.0))
    >>> plan = directory.spawn(Plan("k", "actor", b"", owner="client"))
    >>> [type(order).__name__ for _, order in directory.orders], directory.where(plan.key).state
    (['Start'], <State.STARTING: 1>)
    """

    def __init__(self) -> None:
        self.orders: list[tuple[str, Order]] = []
        """Agent -> what it is to do; who carries them takes them out."""
        self.changed: set[str] = set()
        """Actors that changed; who tells of it takes them out."""
        self._agents: dict[str, Agent] = {}
        self._leaving: set[str] = set()
        self._actors: dict[str, _Actor] = {}
        """By key."""
        self._names: dict[str, str] = {}
        self._dying: dict[tuple[str, int], _Actor] = {}
        """Lives that were to be killed, until they have ended."""
        self._ended: OrderedDict[str, Standing] = OrderedDict()
        self._facts = Facts()
        self._reservations = Reservations()

    @property
    def id(self) -> str:
        """Its own, among the directories of all schedulers."""
        return self._facts.copy.origin

    # ---- what callers ask -----------------------------------------------------------------------------

    def spawn(self, plan: Plan) -> Plan:
        """Start an actor, or find the one of that name; see `find`."""
        if plan.name not in self._names:
            self._names[plan.name] = plan.key
            self._actors[plan.key] = _Actor(Report(plan, 0), None)
            self._place(plan.key)
        return self.find(plan.name)

    def find(self, name: str) -> Plan:
        """Return the plan of the actor of a name, without what only its process needs.

        Raises:
            LookupError: there is none.
        """
        if name not in self._names:
            raise LookupError(f"no actor named {name!r} in this Dask cluster")
        return replace(self._actors[self._names[name]].report.plan, start=b"")

    def actors(self) -> dict[str, str | None]:
        """Return the names of all actors -> the node; None: it is being started."""
        found = {name: self.where(key) for name, key in self._names.items()}
        return {name: there.node if there.state is State.RUNNING else None for name, there in found.items()}

    def where(self, key: str) -> Standing:
        """Tell where an actor is."""
        actor = self._actors.get(key)
        if actor is None:
            return self._ended.get(key, Standing(State.ENDED, why="it is unknown: it has ended, or never existed"))
        life, reach = actor.report.life, actor.report.reach
        state = State.RUNNING if reach is not None else State.RESTARTING if life else State.STARTING
        return Standing(state, life, actor.node, reach)

    def kill(self, name: str) -> str | None:
        """End an actor for good; gives its key."""
        key = self._names.get(name)
        if key is not None:
            self._end(key, "it was killed")
        return key

    def is_over(self, key: str) -> bool:
        """Whether an actor and its processes have ended."""
        return key not in self._actors and not any(of == key for of, _ in self._dying)

    def nodes(self) -> list[tuple[Node, Agent]]:
        """List the nodes."""
        return [(a.node(self._reservations.on(a.id), a.id in self._leaving), a) for a in self._agents.values()]

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep some bytes; None lets go of them."""
        change = self._facts.keep(name, value)
        self.orders += [(agent, change) for agent in self._agents]

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept under names that begin so."""
        return self._facts.kept(prefix)

    def reserve(self, name: str, node: str, nbytes: int, owner: str) -> bool:
        """Set memory of a node aside; False: it has not so much. For errors see `Reservations.take`."""
        memory = self._agents[node].memory if node in self._agents else -1
        return self._reservations.take(name, node, nbytes, owner, memory)

    def unreserve(self, name: str) -> None:
        """Let go of what was reserved under a name."""
        self._reservations.drop(name)

    def reserved(self, prefix: str) -> dict[str, str | None]:
        """Return what is reserved -> the node; None: it is no more."""
        found = self._reservations.nodes(prefix)
        return {name: node if node in self._agents else None for name, node in found.items()}

    # ---- what agents tell -----------------------------------------------------------------------------

    def join(self, agent: Agent, reports: Sequence[Report] = (), copy: Copy | None = None) -> None:
        """Take a node in, with the lives that are on it; one that is known takes the place of itself.

        Args:
            agent: the node.
            reports: its lives.
            copy: what it has of what is kept; None: as it was told.
        """
        self._agents[agent.id] = agent
        self._leaving.discard(agent.id)
        if copy is not None and self._facts.learn(copy):
            self.orders += [(known, self._facts.copy) for known in self._agents]
        elif copy is not None and (copy.origin, copy.number) != (self._facts.copy.origin, self._facts.copy.number):
            self.orders.append((agent.id, self._facts.copy))
        for report in reports:
            self._hear(agent.id, report)
        self._place_all()

    def left(self, agent: str) -> None:
        """Count a node as ended, with all lives on it."""
        self._agents.pop(agent, None)
        self._leaving.discard(agent)
        for key, life in [lived for lived, actor in self._dying.items() if actor.node == agent]:
            self._over(key, life)
        there = [(key, actor.report) for key, actor in self._actors.items() if actor.node == agent]
        for key, report in there:
            if key in self._actors:  # else it ended with its owner
                self._next_life(key, report, report.failures, "its node has ended", after_s=0.0)
        self._place_all()

    def leaves(self, agent: str) -> None:
        """Note that a node is about to leave."""
        if agent in self._agents:
            self._leaving.add(agent)
        self._end_idle()

    def ready(self, key: str, life: int, reach: Reach) -> None:
        """Note that a life has started."""
        actor = self._actors.get(key)
        if actor is not None and actor.report.life == life:
            actor.report = replace(actor.report, reach=reach)
            self.changed.add(key)

    def failed(self, key: str, life: int, error: bytes, why: str) -> None:
        """Note what a constructor raised; the end of its process is told as well."""
        actor = self._actors.get(key)
        if actor is not None and actor.report.life == life == 0:
            self._end(key, why, error)

    def died(self, key: str, life: int, why: str, lived_s: float) -> None:
        """Note that a life has ended."""
        actor = self._actors.get(key)
        if (key, life) in self._dying:
            self._over(key, life)
        elif actor is not None and actor.report.life == life:
            failures = 0 if lived_s >= SETTLED_S else actor.report.failures
            pause = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S) if failures else 0.0
            self._next_life(key, actor.report, failures + 1, why, pause)
        self._place_all()

    # ---- owners ---------------------------------------------------------------------------------------

    def owner_ended(self, owner: str) -> None:
        """End what does not outlive a client, or a life of an actor."""
        for key, actor in list(self._actors.items()):
            plan = actor.report.plan
            if plan.owner == owner and not plan.lifetime.outlives and key in self._actors:
                self._end(key, "its starter has ended")
        self._reservations.drop_of(owner)

    def check_owners(self, clients: Iterable[str]) -> None:
        """End what belongs to none of these clients and to no life of an actor."""
        living = {*clients, *(actor.owner for actor in self._actors.values())}
        owners = {actor.report.plan.owner for actor in self._actors.values()}
        for owner in owners - living:
            self.owner_ended(owner)

    def __len__(self) -> int:
        """Return how many actors have a name."""
        return len(self._names)

    # ---- within ---------------------------------------------------------------------------------------

    def _hear(self, agent: str, report: Report) -> None:
        """Take in a life that an agent tells of, or have it killed."""
        key, known = report.plan.key, self._actors.get(report.plan.key)
        if known is not None and (known.node, known.report.life) == (agent, report.life):
            known.report = report
        elif known is None and report.plan.name not in self._names and key not in self._ended:
            self._names[report.plan.name] = key
            self._actors[key] = _Actor(report, agent)
        else:
            self._dying[key, report.life] = _Actor(report, agent)
            self.orders.append((agent, Kill(key, report.life)))
        self.changed.add(key)

    def _next_life(self, key: str, report: Report, failures: int, why: str, after_s: float) -> None:
        former = self._actors[key].owner
        if not report.plan.lifetime.restarts:
            self._end(key, why)
            self._dying.pop((key, report.life), None)
        else:
            last = self._actors[key].node
            self._actors[key] = _Actor(Report(report.plan, report.life + 1, failures=failures), None)
            self._place(key, after_s, last)
        self.owner_ended(former)

    def _end(self, key: str, why: str, error: bytes | None = None) -> None:
        """Take an actor out of the books, and have its process killed if it has one."""
        actor = self._actors.pop(key)
        del self._names[actor.report.plan.name]
        self._ended[key] = Standing(State.ENDED, actor.report.life, why=why, error=error)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self.changed.add(key)
        if actor.node not in self._agents:  # nor has it a process
            self.owner_ended(actor.owner)
            return
        self._dying[key, actor.report.life] = actor
        self.orders.append((actor.node, Kill(key, actor.report.life)))

    def _over(self, key: str, life: int) -> None:
        """Note that a process that was to end has ended."""
        actor = self._dying.pop((key, life))
        self.changed.add(key)
        self.owner_ended(actor.owner)

    def _place_all(self) -> None:
        for key in [key for key, actor in self._actors.items() if actor.node is None]:
            self._place(key)
        self._end_idle()

    def _place(self, key: str, after_s: float = 0.0, last: str | None = None) -> None:
        actor = self._actors[key]
        plan = actor.report.plan
        agents = [agent for agent in self._agents.values() if agent.id not in self._leaving]
        chosen = choose(agents, self._loads(), plan.lifetime, plan.node or last)
        if chosen is not None:
            actor.node, gpus = chosen
            actor.report = replace(actor.report, gpus=gpus)
            self.orders.append((actor.node, Start(actor.report, after_s)))
        self.changed.add(key)

    def _loads(self) -> defaultdict[str, Load]:
        loads: defaultdict[str, Load] = defaultdict(Load)
        for actor in (*self._actors.values(), *self._dying.values()):
            if actor.node is not None:
                loads[actor.node].add(actor.report.plan.lifetime, actor.report.gpus)
        return loads

    def _end_idle(self) -> None:
        """Let nodes go that leave, and have nothing left to do."""
        stuck = len(self._leaving) == len(self._agents)
        busy = {actor.node for actor in (*self._actors.values(), *self._dying.values())}
        self.orders += [(agent, End()) for agent in self._leaving if stuck or agent not in busy]
