"""The directory on Dask: worlds in which what may happen happens in any order, and what it decides case by case."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest
from tensorvine.actors.engine.dask.directory import FIRST_PAUSE_S, LONGEST_PAUSE_S, REMEMBERED, SETTLED_S, Directory
from tensorvine.actors.engine.dask.records import End, Host, Kill, Life, Plan, Reach, Start, State
from tensorvine.actors.engine.engine import Lifetime
from tensorvine.store.errors import OptionError

REACH = Reach({}, {})
NAMES, CLIENTS = ("a", "b", "c", "d"), ("client:1", "client:2")
MACHINES = ("m1", "m1", "m2")
"""Of the hosts that are there at most."""
MEMORY, CPUS, GPUS = 100, 2.0, ("0", "1")
STEPS = 150


def host(name: str, machine: str | None = None, **told: Any) -> Host:
    return Host(name, f"tcp://{name}", "host", machine or name, MEMORY, CPUS, gpus=GPUS, **told)


class World:
    """A directory, hosts that do what it orders, each in the order in which it does, and whoever asks."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)  # noqa: S311  a game
        self.directory = Directory()
        self.hosts: dict[str, dict[tuple[str, int], Life]] = {}
        """Those that are connected -> the processes on them."""
        self.machines: dict[str, str] = {}
        self.orders: defaultdict[str, list[Any]] = defaultdict(list)
        self.leaving: set[str] = set()
        self.clients: set[str] = set(CLIENTS)
        """Those that are there."""
        self.owners: dict[str, str] = {}
        """Reservation -> who made it."""
        self.keys = self.joined = 0
        self.killed: set[str] = set()
        self.dying: list[tuple[str, str, int]] = []
        """Processes that were killed and have not ended yet, with their hosts."""
        self.kept: dict[str, bytes] = {}

    def run(self) -> None:
        happens = {
            self.joins: 3, self.spawns: 6, self.an_actor_spawns: 3, self.kills: 2, self.reserves: 2,
            self.does_as_ordered: 14, self.a_killed_one_ends: 4, self.a_process_ends: 4, self.a_constructor_fails: 1,
            self.keeps: 3, self.client_ends: 1, self.connection_ends: 1, self.leaves: 1, self.is_late: 1,
            self.all_is_done: 2,
        }  # fmt: skip
        self.joins()
        for _ in range(STEPS):
            (happening,) = self.dice.choices(list(happens), list(happens.values()))
            happening()
            self.nothing_is_promised_twice()
            self.each_machine_is_one_node()
        self.all_is_done()

    # ---- what happens ---------------------------------------------------------------------------------

    def joins(self) -> None:
        free = [place for place in range(len(MACHINES)) if not any(one.endswith(f"n{place}") for one in self.hosts)]
        if free:
            place = self.dice.choice(free)
            self.joined += 1
            name = f"{self.joined}-n{place}"
            self.hosts[name], self.machines[name] = {}, MACHINES[place]
            self.directory.join(host(name, MACHINES[place]))
            self.collect()

    def spawns(self) -> None:
        self.clients.add(owner := self.dice.choice(CLIENTS))
        gpus, cpus = self.dice.choice((0.0, 0.0, 0.5, 1.0, 2.0)), self.dice.choice((0.0, 0.0, 1.0, 2.0))
        outlives, restarts = self.dice.random() < 0.5, self.dice.random() < 0.7
        self.spawn(owner, Lifetime(outlives, restarts, gpus, cpus), self.dice.choice((None, *self.hosts)))

    def an_actor_spawns(self) -> None:
        if there := [life for lives in self.hosts.values() for life in lives.values()]:
            life = self.dice.choice(sorted(there, key=lambda life: life.owner))
            if self.is_running(life):
                self.spawn(life.owner, Lifetime(outlives=False), None)

    def spawn(self, owner: str, lifetime: Lifetime, node: str | None) -> None:
        name = self.dice.choice(NAMES)
        self.keys += 1
        plan = Plan(f"k{self.keys}", name, b"start", owner, node, lifetime)
        there = self.key_of(name) or plan.key
        assert self.directory.spawn(plan).key == there, "whoever starts an actor gets the one that is there"
        self.collect()

    def kills(self) -> None:
        name = self.dice.choice(NAMES)
        key = self.directory.kill(name)
        assert self.key_of(name) is None
        assert key is None or self.directory.where(key).state is State.ENDED
        self.killed |= {key} if key is not None else set()
        self.collect()

    def reserves(self) -> None:
        name, node = self.dice.choice(("r1", "r2", "r3")), self.dice.choice((*self.hosts, "none"))
        owner = self.dice.choice(sorted(self.clients) or ["client:3"])
        if name in self.directory.reserved(""):
            with pytest.raises(OptionError, match=name):
                self.directory.reserve(name, node, 1, owner)
        elif self.directory.reserve(name, node, self.dice.randrange(MEMORY + 20), owner):
            self.owners[name] = owner

    def keeps(self) -> None:
        name, value = self.dice.choice(("f1", "f2", "f3")), self.dice.choice((b"1", b"2", None, b""))
        if value == b"":
            assert self.directory.keep_absent(name, b"") is (name not in self.kept)
            self.kept.setdefault(name, b"")
        else:
            self.directory.keep(name, value)
            self.kept.pop(name, None)
            self.kept.update({name: value} if value else {})
        assert self.directory.kept("") == self.kept

    def client_ends(self) -> None:
        self.clients.discard(client := self.dice.choice(CLIENTS))
        self.directory.owner_ended(client)
        self.collect()

    def a_process_ends(self) -> None:
        if running := sorted((name, *lived) for name, lives in self.hosts.items() for lived in lives):
            name, key, number = self.dice.choice(running)
            del self.hosts[name][key, number]
            self.directory.died(key, number, "it crashed", self.dice.choice((0.1, 2 * SETTLED_S)))
            self.collect()

    def a_constructor_fails(self) -> None:
        orders = [order for name in self.hosts for order in self.orders[name] if isinstance(order, Start)]
        if orders:
            life = self.dice.choice(orders).life
            self.directory.failed(life.plan.key, life.number, b"error", "its constructor failed")
            self.collect()

    def connection_ends(self) -> None:
        if self.hosts:
            self.ends(self.dice.choice(sorted(self.hosts)))

    def ends(self, name: str) -> None:
        del self.hosts[name]
        self.leaving.discard(name)
        self.directory.left(name)
        self.collect()

    def leaves(self) -> None:
        if self.hosts:
            name = self.dice.choice(sorted(self.hosts))
            self.leaving.add(name)
            self.directory.leaves(name)
            self.collect()

    def is_late(self) -> None:
        if self.hosts:
            self.directory.late(self.dice.choice(sorted(self.hosts)))
            self.collect()

    # ---- hosts ----------------------------------------------------------------------------------------

    def collect(self) -> None:
        for name, order in self.directory.orders:
            assert name in self.hosts
            assert not isinstance(order, Start) or name not in self.leaving, "a node that leaves takes nothing new"
            assert not isinstance(order, End) or name in self.leaving, "who stays does not end"
            self.orders[name].append(order)
        self.directory.orders.clear()

    def does_as_ordered(self) -> None:
        if waiting := sorted(name for name in self.hosts if self.orders[name]):
            self.obey(self.dice.choice(waiting))

    def a_killed_one_ends(self) -> None:
        if self.dying:
            name, key, number = self.dying.pop(0)
            if name in self.hosts and self.hosts[name].pop((key, number), None) is not None:
                self.directory.died(key, number, "it was killed", 0.0)
                self.collect()

    def obey(self, name: str) -> None:
        order, lives = self.orders[name].pop(0), self.hosts[name]
        if isinstance(order, Start):
            key, number = order.life.plan.key, order.life.number
            lives[key, number] = order.life
            self.directory.ready(key, number, REACH)
            self.collect()
        elif isinstance(order, Kill):
            self.dying.append((name, order.key, order.number))
        else:
            self.ends(name)

    # ---- what holds -----------------------------------------------------------------------------------

    def nothing_is_promised_twice(self) -> None:
        assert all(node.memory_free >= 0 for node, _ in self.directory.nodes())
        for lives in self.hosts.values():
            assert sum(life.plan.lifetime.cpus for life in lives.values()) <= CPUS
            shares: defaultdict[str, float] = defaultdict(float)
            for life in lives.values():
                for gpu in life.gpus:
                    shares[gpu] += min(life.plan.lifetime.gpus, 1.0)
            assert all(share <= 1.0 for share in shares.values())

    def each_machine_is_one_node(self) -> None:
        stay = [machine for node, machine in self.directory.nodes() if not node.leaving]
        assert sorted(stay) == sorted({self.machines[name] for name in self.hosts if name not in self.leaving})
        assert {node.id for node, _ in self.directory.nodes() if node.leaving} <= self.leaving
        needed = self.directory.needed()
        for machine in set(MACHINES):
            others = [name for name in self.hosts if self.machines[name] == machine and name not in self.leaving]
            assert sum(f"tcp://{name}" in needed for name in others) == (len(others) > 1)

    def all_is_done(self) -> None:
        while self.dying or any(self.orders[name] for name in self.hosts):
            self.does_as_ordered()
            self.a_killed_one_ends()
        lives = {lived: life for there in self.hosts.values() for lived, life in there.items()}
        assert len(lives) == sum(map(len, self.hosts.values()))
        assert len({key for key, _ in lives}) == len(lives), "an actor has one process"
        named = {key for name in NAMES if (key := self.key_of(name)) is not None}
        assert {key for key, _ in lives} <= named, "what runs has a name"
        assert not named & self.killed, "who was killed stays so"
        room = any(name not in self.leaving for name in self.hosts)
        running = {life.plan.key for life in lives.values() if self.is_running(life)}
        for key in named:
            assert (self.directory.where(key).state is State.RUNNING) == (key in running)
            assert key in running or not room or self.is_large(key)
        living = self.clients | {life.owner for life in lives.values()}
        for life in lives.values():
            assert life.plan.lifetime.outlives or life.plan.owner in living, "it ends with its starter"
        assert {self.owners[name] for name in self.directory.reserved("")} <= {*living, "client:3"}

    def is_running(self, life: Life) -> bool:
        actor = self.directory._actors.get(life.plan.key)
        return actor is not None and (actor.life.number, actor.life.reach) == (life.number, REACH)

    def is_large(self, key: str) -> bool:
        lifetimes = [self.directory.find(name).lifetime for name in NAMES if self.key_of(name) == key]
        return lifetimes[0].cpus > 0 or lifetimes[0].gpus > 0

    def key_of(self, name: str) -> str | None:
        try:
            return self.directory.find(name).key
        except LookupError:
            return None


@pytest.mark.parametrize("block", range(20))
def test_in_worlds_of_any_order_what_runs_is_what_has_a_name_once_and_fits(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        World(seed).run()


# ---- case by case -------------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Directory:
    made = Directory()
    made.join(host("n1"))
    return made


def plan(key: str, owner: str = "client:1", node: str | None = None, **lifetime: Any) -> Plan:
    return Plan(key, f"name of {key}", b"start", owner, node, Lifetime(**lifetime))


def ordered(directory: Directory) -> list[Any]:
    orders, directory.orders[:] = list(directory.orders), []
    return orders


class TestLives:
    def test_an_actor_that_crashes_has_its_next_life_at_once_and_later_and_later_if_lives_are_short(
        self, directory: Directory
    ) -> None:
        directory.spawn(plan("k"))
        pauses = []
        for life in range(8):
            ((node, order),) = ordered(directory)
            assert (node, order.life.number) == ("n1", life)
            pauses.append(order.after_s)
            directory.ready("k", life, REACH)
            directory.died("k", life, "it crashed", 0.1)
        assert pauses[:4] == [0.0, 0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
        assert pauses[-1] == LONGEST_PAUSE_S
        ordered(directory)
        directory.died("k", 8, "it crashed", 2 * SETTLED_S)
        assert ordered(directory)[0][1].after_s == 0.0

    def test_one_that_does_not_restart_has_ended_and_it_is_known_why(self, directory: Directory) -> None:
        directory.spawn(plan("k", restarts=False))
        directory.died("k", 0, "its process ended with SIGSEGV", 1.0)
        assert directory.where("k").state is State.ENDED
        assert directory.where("k").why == "its process ended with SIGSEGV"
        assert directory.is_over("k")
        for number in range(REMEMBERED):
            directory.spawn(plan(f"k{number}"))
            directory.kill(f"name of k{number}")
        assert "unknown" in directory.where("k").why

    def test_a_constructors_error_ends_it_in_its_first_life_only(self, directory: Directory) -> None:
        directory.spawn(plan("k"))
        directory.failed("k", 0, b"the error", "its constructor failed")
        assert (directory.where("k").state, directory.where("k").error) == (State.ENDED, b"the error")
        assert not directory.is_over("k")
        directory.died("k", 0, "its process ended with 1", 0.1)
        assert directory.is_over("k")
        directory.spawn(plan("other"))
        directory.died("other", 0, "it crashed", 1.0)
        directory.failed("other", 1, b"the error", "its constructor failed")
        assert directory.where("other").state is State.RESTARTING

    def test_actors_are_listed_with_the_node_where_they_run_as_long_as_they_have_a_name(
        self, directory: Directory
    ) -> None:
        directory.spawn(plan("k"))
        assert directory.actors() == {"name of k": None}
        directory.ready("k", 0, REACH)
        assert directory.actors() == {"name of k": "n1"}
        directory.died("k", 0, "it crashed", 1.0)
        assert directory.actors() == {"name of k": None}
        directory.kill("name of k")
        assert directory.actors() == {}

    def test_what_is_told_of_an_earlier_life_changes_nothing(self, directory: Directory) -> None:
        directory.spawn(plan("k"))
        directory.died("k", 0, "it crashed", 1.0)
        directory.ready("k", 0, REACH)
        directory.died("k", 0, "it crashed", 1.0)
        assert (directory.where("k").state, directory._actors["k"].life.number) == (State.RESTARTING, 1)

    def test_a_killed_one_keeps_what_it_takes_until_its_process_has_ended(self, directory: Directory) -> None:
        directory.spawn(plan("k", cpus=2.0))
        directory.kill("name of k")
        directory.spawn(plan("next", cpus=2.0))
        assert [type(order) for _, order in ordered(directory)] == [Start, Kill]
        assert directory.where("next").state is State.STARTING
        directory.died("k", 0, "it was killed", 1.0)
        ((_, order),) = ordered(directory)
        assert order.life.plan.key == "next"

    def test_with_its_node_an_actor_restarts_on_another_one(self, directory: Directory) -> None:
        directory.spawn(plan("k", node="n1"))
        ordered(directory)
        directory.left("n1")
        assert directory.where("k").state is State.RESTARTING
        assert ordered(directory) == []
        directory.join(host("n2"))
        ((node, order),) = ordered(directory)
        assert (node, order.life.number, order.after_s) == ("n2", 1, 0.0)


class TestNodes:
    def test_a_wanted_node_is_taken_while_it_stays_and_else_the_one_with_the_fewest_actors(
        self, directory: Directory
    ) -> None:
        directory.join(host("n2"))
        for number, node in enumerate(("n1", "n1", None, None, None)):
            directory.spawn(plan(f"k{number}", node=node))
        assert [node for node, _ in ordered(directory)] == ["n1", "n1", "n2", "n2", "n1"]
        directory.leaves("n1")
        directory.spawn(plan("k5", node="n1"))
        assert [node for node, _ in ordered(directory)] == ["n2"]
        assert {node.id: node.leaving for node, _ in directory.nodes()} == {"n1": True, "n2": False}

    def test_one_that_leaves_ends_when_it_has_no_actors(self, directory: Directory) -> None:
        directory.join(host("n2"))
        directory.spawn(plan("k", node="n1"))
        directory.leaves("n1")
        assert [type(order) for _, order in ordered(directory)] == [Start]
        directory.kill("name of k")
        directory.died("k", 0, "it was killed", 1.0)
        assert [type(order) for _, order in ordered(directory)] == [Kill, End]

    def test_the_last_one_ends_at_once_with_its_actors(self, directory: Directory) -> None:
        directory.spawn(plan("k"))
        directory.leaves("n1")
        assert [type(order) for _, order in ordered(directory)] == [Start, End]

    def test_one_that_moves_its_data_is_not_ended_when_it_is_late(self, directory: Directory) -> None:
        directory.join(host("n2"))
        directory.spawn(plan("k", node="n1"))
        assert directory.reserve("r", "n1", 1, "client:1")
        directory.leaves("n1")
        directory.late("n1")
        assert [type(order) for _, order in ordered(directory)] == [Start]
        directory.unreserve("r")
        assert ordered(directory) == [("n1", End())]

    def test_of_the_hosts_on_a_machine_one_is_the_node_and_the_next_one_follows_it(self, directory: Directory) -> None:
        directory.join(host("s1", "n1", limit=30, resources={"disk": 1.0}))
        directory.join(host("s2", "n1", limit=30, resources={"disk": 2.0}))
        ((node, machine),) = directory.nodes()
        assert (node.id, machine, node.memory_free, node.resources["disk"]) == ("n1", "n1", 50, 3.0)
        assert directory.needed() == {"tcp://n1"}
        directory.spawn(plan("k"))
        directory.leaves("n1")
        assert [(node.id, node.leaving) for node, _ in directory.nodes()] == [("n1", True), ("s1", False)]
        ordered(directory)
        directory.left("n1")
        ((name, order),) = ordered(directory)
        assert (name, order.life.number) == ("s1", 1)
        assert directory.needed() == {"tcp://s1"}
        assert directory.changed >= {"tcp://n1"}
        directory.left("s2")
        assert directory.needed() == set()


class TestKept:
    def test_bytes_are_kept_and_let_go_of(self, directory: Directory) -> None:
        directory.keep("r:a", b"1")
        directory.keep("r:b", b"")
        directory.keep("r:a", None)
        directory.keep("s:a", b"2")
        assert directory.kept("r:") == {"r:b": b""}

    def test_memory_is_reserved_once_and_goes_with_its_owner_or_its_node(self, directory: Directory) -> None:
        assert not directory.reserve("r1", "n1", MEMORY + 1, "client:1")
        assert not directory.reserve("r1", "n2", 1, "client:1")
        assert directory.reserve("r1", "n1", 60, "client:1")
        assert not directory.reserve("r2", "n1", 60, "client:2")
        assert directory.reserve("r2", "n1", 40, "client:2")
        assert [node.memory_free for node, _ in directory.nodes()] == [0]
        directory.owner_ended("client:1")
        assert directory.reserved("r") == {"r2": "n1"}
        directory.left("n1")
        assert directory.reserved("r") == {"r2": None}
        directory.unreserve("r2")
        directory.unreserve("r2")
        assert directory.reserved("r") == {}

    def test_what_an_actor_reserved_goes_when_it_is_started_again(self, directory: Directory) -> None:
        directory.spawn(plan("k"))
        directory.reserve("r", "n1", 1, "k/0")
        directory.died("k", 0, "it crashed", 1.0)
        assert directory.reserved("") == {}
