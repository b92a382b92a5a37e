"""Names and segments that move between shards' states: together these answer as one shard that never scaled.

Two repositories are told the same: one of one shard, and one whose shards join and drain in between. After every step
all that can be asked is asked of both.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import TensorVineError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.holders import Drain, Lease, Query, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import TensorEntry, encode_body
from tensorvine.store.versions.version import Draft

NAMES = [f"m{i}" for i in range(12)]
CLIENT = "client"
ASKED = count(1)
GRAPHS = [ModelGraph([Layer("in", {"class": "In"}), Layer("d", {"units": i}, ["in"], ["w"])]) for i in range(4)]


class Repo:
    """A repository as plain states, with messages delivered at once."""

    def __init__(self, shards: int) -> None:
        self.topology = Topology("repo", tuple(range(shards)), "starter")
        self.states: dict[int, ShardState] = {}
        self.leases: dict[int, Lease] = {}
        self.clock = 0
        for shard in range(shards):
            self.join(shard)

    def join(self, shard: int) -> None:
        self.states[shard] = ShardState(shard, lambda name: self.topology.home(name))
        self.states[shard].where = lambda segment: self.topology.where(segment)
        self.states[shard].open(CLIENT, 0.0)
        for other in self.states.values():
            self.states[shard].ledger.merge(other.ledger.told())

    def home(self, name: str) -> ShardState:
        return self.states[self.topology.home(name)]

    def settle(self) -> None:
        for state in list(self.states.values()):
            messages, state.outbox = state.outbox, []
            for shard, holder in messages:
                self.states[shard].release(holder)

    def save(self, name: str, serial: int, graph: int, parent: ModelRef | None, inherits: bool) -> ModelRef:
        home, holder = self.home(name), Save(CLIENT, serial)
        near = sorted(self.states)[serial % len(self.states)]
        segment = (near, self.topology.serial(near, 1000 * serial))  # no two fall together
        self.states[near].adopt(holder, segment, b"12345678", [8])
        holds: dict[SegmentId, list[int]] = {segment: [0]}
        if parent is not None and inherits:
            segments = self.home(parent.name).record(parent.name, parent.version, "").segments
            holds |= {inherited: [0] for inherited in segments}
        entries = {f"w{i}": TensorEntry("int64", (1,), 8, None, s, 0) for i, s in enumerate(holds)}
        text = GRAPHS[graph].to_json()
        key = bytes([graph])
        quality = (None, 0.0, 0.5)[self.clock % 3]
        draft = Draft(
            name=name,
            save=holder,
            parent=parent,
            quality=quality,
            metadata="{}",
            graph_key=key,
            architecture=(text, None),
            body=encode_body(entries),
            holds=holds,
            bytes_owned=8,
            bytes_total=8,
        )
        ref = home.begin_commit(draft)
        for other, slots in holds.items():
            if (shard := self.topology.where(other)) != home.index:
                self.states[shard].hold(ref, {other: slots})
        self.clock += 1
        for state in self.states.values():
            if state is not home:
                state.ledger.note({ref: (parent, True)})
        home.publish(ref, draft, self.clock)
        self.states[near].release(holder)
        self.settle()
        return ref

    def pin(self, number: int, ref: ModelRef) -> None:
        home = self.home(ref.name)
        self.leases[number] = lease = Lease(Query(CLIENT, number), home.index)
        home.pin(ref.name, ref.version, lease, 0.0)

    def unpin(self, number: int) -> None:
        lease = self.leases.pop(number)
        for state in self.states.values():
            state.unpin([lease])
        self.settle()

    def retire(self, ref: ModelRef) -> None:
        for state in self.states.values():
            if state is not self.home(ref.name):
                state.ledger.note({ref: (None, False)})
        self.home(ref.name).retire(ref)
        self.settle()

    def lose(self, name: str) -> None:
        """Have a name's versions be known as lost, as after a shard's restart without its memory."""
        state = self.home(name)
        state.restore({ModelRef(name, 1000): (None, True)})

    def change(self, after: Topology) -> None:
        gone = [shard for shard in self.topology.shards if shard not in after.shards]
        for shard in after.shards:
            if shard not in self.states:
                self.join(shard)
        for shard in gone:
            self.hand_segments(shard, after)
        before, self.topology = self.topology, after
        for shard in before.shards:
            self.hand_names(shard)
        for shard in gone:
            state = self.states.pop(shard)
            assert (state.models(), state.version_facts(), state.outbox) == ([], {}, [])
        self.topology = after.settled()

    def hand_segments(self, shard: int, after: Topology) -> None:
        state, drain = self.states[shard], Drain(shard, after.version)
        moved = [state.moving(segment) for segment in state.segment_ids()]
        for segment in moved:
            successor = self.states[after.where(segment.id)]
            found = state.segment(segment.id)
            assert found is not None
            successor.receive(segment, found.handle, drain)
        for segment in moved:
            self.states[after.where(segment.id)].inherit(segment, drain)
        for successor in after.shards:
            self.states[successor].release(drain)

    def hand_names(self, shard: int) -> None:
        state = self.states[shard]
        for name in [name for name in state.names() if self.topology.home(name) != shard]:
            bundle = state.hand_over([name])
            self.home(name).take_over(bundle, 0.0)
            again = self.home(name).take_over(bundle, 0.0)  # a message that comes twice
            assert again == 0
            assert not state.knows(name)

    # ---- questions ------------------------------------------------------------------------------------

    def models(self) -> list[ModelRef]:
        return sorted(ref for state in self.states.values() for ref in state.models())

    def version_facts(self) -> dict[ModelRef, tuple[ModelRef | None, bool]]:
        return {
            ref: (p, True) for s in self.states.values() for ref, (p, exists) in s.version_facts().items() if exists
        }

    def qualities(self) -> dict[ModelRef, float]:
        refs = self.version_facts()
        return {ref: q for state in self.states.values() for ref, q in state.lineage.qualities(refs).items()}

    def answers(self, name: str) -> list[object]:
        home = self.home(name)
        chains = [home.lineage.chain(ref) for ref in home.models() if ref.name == name]
        found = [
            (r.header.ref, r.header.parent, r.header.graph_key) for r in home.records() if r.header.ref.name == name
        ]
        ends = [ref for chain in chains for ref in chain[:1]]
        return [_asked(lambda: home.resolve(name, None)), home.newer(name, 0), sorted(map(str, found)), ends]

    def best(self, graph: int) -> ModelRef | None:
        query = PrefixQuery.of(GRAPHS[graph])
        matches = [
            found
            for state in self.states.values()
            for found in state.match([query], Query("asker", next(ASKED)), 0.0)
            if found
        ]
        for state in self.states.values():
            state.end("asker")
        self.settle()
        return max(matches, key=lambda match: match.rank).ref if matches else None

    def found(self, graph: int) -> list[ModelRef]:
        return sorted(ref for state in self.states.values() for ref in state.graphs.find([{"units": graph}], False))

    def descendants(self, ref: ModelRef) -> set[ModelRef]:
        """Return the live ones, as `Repository.descendants` does, through all that any shard knows."""
        seen: set[ModelRef] = set()
        live: set[ModelRef] = set()
        frontier = [ref]
        while frontier:
            told = [found for state in self.states.values() for found in state.offspring(frontier)]
            frontier = sorted({r for r, _ in told} - seen)
            seen.update(frontier)
            live |= {r for r, lives in told if lives}
        return live

    def totals(self) -> tuple[int, int, int]:
        stats = [state.stats() for state in self.states.values()]
        return sum(s.models for s in stats), sum(s.tensors for s in stats), sum(s.pins for s in stats)


class Scaling(RuleBasedStateMachine):
    """The same saves, retirements and pins on one shard and on shards that come and go."""

    @initialize(shards=st.integers(1, 3))
    def start(self, shards: int) -> None:
        self.one, self.many = Repo(1), Repo(shards)
        self.serial = count(1)
        self.refs: list[ModelRef] = []
        self.pins: list[int] = []

    @property
    def repos(self) -> tuple[Repo, Repo]:
        return self.one, self.many

    @rule(name=st.sampled_from(NAMES), graph=st.integers(0, 3), inherits=st.booleans(), data=st.data())
    def save(self, name: str, graph: int, inherits: bool, data: st.DataObject) -> None:
        live = self.one.models()
        parent = data.draw(st.none() | st.sampled_from(live), "parent") if live else None
        serial = next(self.serial)
        refs = {repo.save(name, serial, graph, parent, inherits) for repo in self.repos}
        assert len(refs) == 1
        self.refs += refs

    @precondition(lambda self: self.one.models())
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.one.models()))
        for repo in self.repos:
            repo.retire(ref)

    @precondition(lambda self: self.one.models())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        ref, number = data.draw(st.sampled_from(self.one.models())), next(self.serial)
        for repo in self.repos:
            repo.pin(number, ref)
        self.pins.append(number)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        for repo in self.repos:
            repo.unpin(number)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        for repo in self.repos:
            repo.lose(name)

    @precondition(lambda self: len(self.many.topology.shards) < 6)
    @rule(shards=st.integers(1, 2))
    def join(self, shards: int) -> None:
        self.many.change(self.many.topology.grown([next(self.serial) for _ in range(shards)]))

    @precondition(lambda self: len(self.many.topology.shards) > 1)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(self.many.topology.shards))
        self.many.change(self.many.topology.shrunk([shard]))

    @invariant()
    def answers_alike(self) -> None:
        assert self.many.models() == self.one.models()
        assert self.many.version_facts() == self.one.version_facts()
        assert self.many.qualities() == self.one.qualities()
        assert self.many.totals() == self.one.totals()
        for name in NAMES:
            assert self.many.answers(name) == self.one.answers(name)
        for graph in range(len(GRAPHS)):
            assert self.many.found(graph) == self.one.found(graph)
            assert self.many.best(graph) == self.one.best(graph)
        for ref in self.refs[:3]:
            assert self.many.descendants(ref) == self.one.descendants(ref)
        for state in self.many.states.values():
            state.check()

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        for number in self.pins:
            for repo in self.repos:
                repo.unpin(number)
        for ref in self.one.models():
            for repo in self.repos:
                repo.retire(ref)
        for repo in self.repos:
            assert repo.totals() == (0, 0, 0)
            assert all(state.stats().bytes_metadata == 0 for state in repo.states.values())
            assert not any(state.segment_ids() for state in repo.states.values())


TestScaling = Scaling.TestCase
TestScaling.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_name_does_not_move_while_a_commit_of_it_is_on_its_way() -> None:
    state = ShardState(0, lambda name: 0)
    draft = Draft(
        name="m",
        save=Save("c", 1),
        parent=None,
        quality=None,
        metadata="{}",
        graph_key=b"k",
        architecture=(GRAPHS[0].to_json(), None),
        body=b"",
        holds={},
        bytes_owned=0,
        bytes_total=0,
    )
    ref = state.begin_commit(draft)
    with pytest.raises(ValueError, match="m@1"):
        state.hand_over(["m"])
    state.publish(ref, draft, 1)
    assert list(state.hand_over(["m"]).names) == ["m"]


def _asked(question: Callable[[], object]) -> object:
    try:
        return question()
    except TensorVineError as exc:
        return type(exc)
