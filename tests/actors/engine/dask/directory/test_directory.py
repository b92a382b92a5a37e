"""The directory on Dask: worlds in which what may happen happens in any order, and what it decides case by case."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest
from tensorvine.actors.engine.dask.directory.directory import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    REMEMBERED,
    SETTLED_S,
    Directory,
)
from tensorvine.actors.engine.dask.records import (
    Agent,
    Copy,
    End,
    Keep,
    Kill,
    Plan,
    Reach,
    Report,
    Start,
    State,
    life_of,
)
from tensorvine.actors.engine.engine import Lifetime
from tensorvine.store.errors import OptionError

REACH = Reach({}, {})
NAMES, NODES, CLIENTS = ("a", "b", "c", "d"), ("n1", "n2", "n3"), ("client:1", "client:2")
MEMORY, CPUS, GPUS = 100, 2.0, ("0", "1")
STEPS = 150


def agent(name: str) -> Agent:
    return Agent(name, "host", "machine", MEMORY, CPUS, GPUS)


class World:
    """A directory, agents that do what it orders, each in the order in which it does, and whoever asks."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)  # noqa: S311  a game
        self.directory = Directory()
        self.agents: dict[str, dict[tuple[str, int], Report]] = {}
        """Those that are connected -> the processes on them."""
        self.away: dict[str, dict[tuple[str, int], Report]] = {}
        """Those that have lost their connection."""
        self.orders: defaultdict[str, list[Any]] = defaultdict(list)
        self.leaving: set[str] = set()
        self.clients: set[str] = set(CLIENTS)
        """Those that are there."""
        self.owners: dict[str, str] = {}
        """Reservation -> who made it."""
        self.keys = 0
        self.killed: set[str] = set()
        self.dying: list[tuple[str, str, int]] = []
        """Processes that were killed and have not ended yet, with their agents."""
        self.facts: dict[str, bytes] = {}
        """What is kept, as far as an agent that is connected has heard of it."""
        self.copies: defaultdict[str, Copy] = defaultdict(Copy)
        """Agent -> what it has of that."""

    def run(self) -> None:
        happens = {
            self.joins: 2, self.spawns: 6, self.an_actor_spawns: 3, self.kills: 2, self.reserves: 2,
            self.does_as_ordered: 14, self.a_killed_one_ends: 4, self.a_process_ends: 4, self.a_constructor_fails: 1,
            self.keeps: 3, self.client_ends: 1, self.connection_ends: 1, self.leaves: 1, self.is_started_anew: 1,
            self.all_is_done: 2,
        }  # fmt: skip
        self.joins()
        for _ in range(STEPS):
            (happening,) = self.dice.choices(list(happens), list(happens.values()))
            happening()
            self.nothing_is_promised_twice()
        self.all_is_done()

    # ---- what happens ---------------------------------------------------------------------------------

    def joins(self) -> None:
        name = self.dice.choice(NODES)
        if name not in self.agents:
            self.agents[name] = self.away.pop(name, {})
            self.orders[name].clear()
            self.directory.join(agent(name), list(self.agents[name].values()), self.copies[name])
            self.directory.check_owners(self.clients)
            self.collect()

    def spawns(self) -> None:
        self.clients.add(owner := self.dice.choice(CLIENTS))
        gpus, cpus = self.dice.choice((0.0, 0.0, 0.5, 1.0, 2.0)), self.dice.choice((0.0, 0.0, 1.0, 2.0))
        outlives, restarts = self.dice.random() < 0.5, self.dice.random() < 0.7
        self.spawn(owner, Lifetime(outlives, restarts, gpus, cpus), self.dice.choice((None, *NODES)))

    def an_actor_spawns(self) -> None:
        if there := [lived for lives in self.agents.values() for lived in lives]:
            key, life = self.dice.choice(sorted(there))
            standing = self.directory.where(key)
            if (standing.state, standing.life) == (State.RUNNING, life):
                self.spawn(life_of(key, life), Lifetime(outlives=False), None)

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
        name, node = self.dice.choice(("r1", "r2", "r3")), self.dice.choice(NODES)
        owner = self.dice.choice(sorted(self.clients) or ["client:3"])
        if name in self.directory.reserved(""):
            with pytest.raises(OptionError, match=name):
                self.directory.reserve(name, node, 1, owner)
        elif self.directory.reserve(name, node, self.dice.randrange(MEMORY + 20), owner):
            self.owners[name] = owner

    def keeps(self) -> None:
        name, value = self.dice.choice(("f1", "f2", "f3")), self.dice.choice((b"1", b"2", None))
        self.directory.keep(name, value)
        self.facts = {**self.facts, **({name: value} if value else {})}
        if value is None:
            self.facts.pop(name, None)
        assert self.directory.kept("") == self.facts
        self.collect()

    def client_ends(self) -> None:
        self.clients.discard(client := self.dice.choice(CLIENTS))
        self.directory.owner_ended(client)
        self.collect()

    def a_process_ends(self) -> None:
        if running := sorted((name, *lived) for name, lives in self.agents.items() for lived in lives):
            name, key, life = self.dice.choice(running)
            del self.agents[name][key, life]
            self.directory.died(key, life, "it crashed", self.dice.choice((0.1, 2 * SETTLED_S)))
            self.collect()

    def a_constructor_fails(self) -> None:
        orders = [order for name in self.agents for order in self.orders[name] if isinstance(order, Start)]
        if orders:
            report = self.dice.choice(orders).report
            self.directory.failed(report.plan.key, report.life, b"error", "its constructor failed")
            self.collect()

    def connection_ends(self) -> None:
        name = self.dice.choice(NODES)
        if name in self.agents:
            lives = self.agents.pop(name)
            self.leaving.discard(name)
            if self.dice.random() < 0.6:
                self.away[name] = lives
            self.directory.left(name)
            self.collect()

    def leaves(self) -> None:
        name = self.dice.choice(NODES)
        if name in self.agents:
            self.leaving.add(name)
            self.directory.leaves(name)
            self.collect()

    def is_started_anew(self) -> None:
        """Have another scheduler, which agents find one after the other."""
        self.directory = Directory()
        self.leaving.clear()
        self.owners.clear()
        self.killed.clear()
        for name in self.dice.sample(sorted(self.agents), len(self.agents)):
            self.orders[name].clear()
            self.directory.join(agent(name), list(self.agents[name].values()), self.copies[name])
        self.directory.check_owners(self.clients)
        self.collect()
        if not self.agents:  # who is away may have an older copy, which is all that there will be
            self.facts = {}
            self.copies.clear()
        assert self.directory.kept("") == self.facts, "an agent had heard of it"

    # ---- agents ---------------------------------------------------------------------------------------

    def collect(self) -> None:
        for name, order in self.directory.orders:
            if isinstance(order, Start):
                assert name in self.agents
                assert name not in self.leaving, "a node that leaves takes nothing new"
            if isinstance(order, Keep):
                self.copies[name] = self.copies[name].after(order)  # who keeps something waits until they are told
            elif isinstance(order, Copy):
                self.copies[name] = order
            else:
                self.orders[name].append(order)
        self.directory.orders.clear()

    def does_as_ordered(self) -> None:
        if waiting := sorted(name for name in self.agents if self.orders[name]):
            self.obey(self.dice.choice(waiting))

    def a_killed_one_ends(self) -> None:
        if self.dying:
            name, key, life = self.dying.pop(0)
            if name in self.agents:
                self.agents[name].pop((key, life), None)
                self.directory.died(key, life, "it was killed", 0.0)
                self.collect()
            elif name in self.away:
                self.away[name].pop((key, life), None)

    def obey(self, name: str) -> None:
        order, lives = self.orders[name].pop(0), self.agents[name]
        if isinstance(order, Start):
            plan, life = order.report.plan, order.report.life
            lives[plan.key, life] = Report(plan, life, order.report.gpus, REACH, order.report.failures)
            self.directory.ready(plan.key, life, REACH)
        elif isinstance(order, Kill):
            self.dying.append((name, order.key, order.life))
        elif name in self.leaving:
            del self.agents[name]
            self.leaving.discard(name)
            self.directory.left(name)
        self.collect()

    # ---- what holds -----------------------------------------------------------------------------------

    def nothing_is_promised_twice(self) -> None:
        assert all(node.memory_free >= 0 for node, _ in self.directory.nodes())
        for lives in self.agents.values():
            assert sum(report.plan.lifetime.cpus for report in lives.values()) <= CPUS
            shares: defaultdict[str, float] = defaultdict(float)
            for report in lives.values():
                for gpu in report.gpus:
                    shares[gpu] += min(report.plan.lifetime.gpus, 1.0)
            assert all(share <= 1.0 for share in shares.values())

    def all_is_done(self) -> None:
        while self.dying or any(self.orders[name] for name in self.agents):
            self.does_as_ordered()
            self.a_killed_one_ends()
        lives = {lived: report for there in self.agents.values() for lived, report in there.items()}
        assert len(lives) == sum(map(len, self.agents.values()))
        assert len({key for key, _ in lives}) == len(lives), "an actor has one process"
        named = {key for name in NAMES if (key := self.key_of(name)) is not None}
        assert {key for key, _ in lives} <= named, "what runs has a name"
        assert not named & self.killed, "who was killed stays so"
        room = any(name not in self.leaving for name in self.agents)
        for key in named:
            standing = self.directory.where(key)
            assert (standing.state is State.RUNNING) == ((key, standing.life) in lives)
            assert standing.state is State.RUNNING or not room or self.is_large(key)
        living = self.clients | {life_of(*lived) for lived in lives}
        for report in lives.values():
            assert report.plan.lifetime.outlives or report.plan.owner in living, "it ends with its starter"
        assert {self.owners[name] for name in self.directory.reserved("")} <= {*living, "client:3"}

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
    made.join(agent("n1"))
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
            assert (node, order.report.life) == ("n1", life)
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
        assert (directory.where("k").state, directory.where("k").life) == (State.RESTARTING, 1)

    def test_a_killed_one_keeps_what_it_takes_until_its_process_has_ended(self, directory: Directory) -> None:
        directory.spawn(plan("k", cpus=2.0))
        directory.kill("name of k")
        directory.spawn(plan("next", cpus=2.0))
        assert [type(order) for _, order in ordered(directory)] == [Start, Kill]
        assert directory.where("next").state is State.STARTING
        directory.died("k", 0, "it was killed", 1.0)
        ((_, order),) = ordered(directory)
        assert order.report.plan.key == "next"

    def test_with_its_node_an_actor_restarts_on_another_one(self, directory: Directory) -> None:
        directory.spawn(plan("k", node="n1"))
        ordered(directory)
        directory.left("n1")
        assert directory.where("k").state is State.RESTARTING
        assert ordered(directory) == []
        directory.join(agent("n2"))
        ((node, order),) = ordered(directory)
        assert (node, order.report.life, order.after_s) == ("n2", 1, 0.0)


class TestNodes:
    def test_a_wanted_node_is_taken_while_it_stays_and_else_the_one_with_the_fewest_actors(
        self, directory: Directory
    ) -> None:
        directory.join(agent("n2"))
        for number, node in enumerate(("n1", "n1", None, None, None)):
            directory.spawn(plan(f"k{number}", node=node))
        assert [node for node, _ in ordered(directory)] == ["n1", "n1", "n2", "n2", "n1"]
        directory.leaves("n1")
        directory.spawn(plan("k5", node="n1"))
        assert [node for node, _ in ordered(directory)] == ["n2"]
        assert {node.id: node.leaving for node, _ in directory.nodes()} == {"n1": True, "n2": False}

    def test_one_that_leaves_ends_when_it_has_no_actors(self, directory: Directory) -> None:
        directory.join(agent("n2"))
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

    def test_one_that_stays_after_all_takes_actors_again(self, directory: Directory) -> None:
        directory.leaves("n1")
        directory.join(agent("n1"))
        ordered(directory)
        directory.spawn(plan("k"))
        assert [node for node, _ in ordered(directory)] == ["n1"]

    def test_a_life_that_was_given_up_is_killed_when_its_agent_comes_back(self, directory: Directory) -> None:
        directory.join(agent("n2"))
        directory.spawn(plan("k", node="n1"))
        directory.left("n1")
        ordered(directory)
        directory.join(agent("n1"), [Report(plan("k"), 0, reach=REACH)])
        assert ordered(directory) == [("n1", Kill("k", 0))]

    def test_what_was_kept_before_agents_came_back_stays_and_what_they_had_comes_to_it(self) -> None:
        former, directory = Directory(), Directory()
        former.join(agent("n1"), (), Copy())
        for name in ("a", "b"):
            former.keep(name, b"old")
        copy = former.orders[0][1]
        assert isinstance(copy, Copy)
        for _, change in former.orders[1:]:
            assert isinstance(change, Keep)
            copy = copy.after(change)
        directory.keep("a", b"new")
        directory.join(agent("n1"), (), copy)
        assert directory.kept("") == {"a": b"new", "b": b"old"}
        directory.keep("b", None)
        directory.join(agent("n2"), (), copy)
        assert directory.kept("") == {"a": b"new"}, "another that was away for long changes nothing"
        assert [node for node, order in directory.orders if order == directory._facts.copy][-1] == "n2"

    def test_a_directory_that_knows_nothing_believes_what_agents_tell(self) -> None:
        directory = Directory()
        directory.join(agent("n1"), [Report(plan("k"), 3, reach=REACH), Report(plan("own", "k/3", outlives=False), 0)])
        directory.join(agent("n2"), [Report(plan("lost", "client:9", outlives=False), 0)])
        assert (directory.where("k").state, directory.where("k").life) == (State.RUNNING, 3)
        assert len(directory) == 3
        directory.check_owners(["client:1"])
        assert [name for name in ("k", "own", "lost") if directory.where(name).state is not State.ENDED] == ["k", "own"]


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
        directory.reserve("r", "n1", 1, life_of("k", 0))
        directory.died("k", 0, "it crashed", 1.0)
        assert directory.reserved("") == {}
