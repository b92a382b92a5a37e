"""Shards beside plain dictionaries: a state machine that takes both through the same random steps.

Rules
- What always holds, and how many shards there are, is said by the machines of tests/store/test_shard_state.py.
- The plain model knows who named which tensor on which shard (`held`), and nothing of counts, blocks or indices.
- The machine plays the shell: it carries messages between shards, in any order and twice, and compacts late.
- Every block holds the bytes that were staged, so that a tensor read back at a wrong offset shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensorvine.store.errors import (
    CorruptDataError,
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    TensorVineError,
)
from tensorvine.store.graphs.graph import common_prefix
from tensorvine.store.graphs.index import PrefixQuery, rank_of
from tensorvine.store.holders import Holder, Lease, Query, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import GONE, Offset, SegmentId, layout
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import Ledger
from tensorvine.store.versions.version import Draft, Match

from tests.support.strategies import build

Slot = tuple[SegmentId, int]

SESSION_S = 10.0
CLIENTS = ("c0", "c1")
NAMES = ("m", "n", "c0/m")  # the last one starts like the holders of a client
SIZES = (0, 1, 64, 100, 1000)
STEM = ((0, ()), (1, (0,)))
GRAPHS = [build(STEM), build((*STEM, (2, (1,)))), build((*STEM, (2, (1,)), (1, (2,)))), build(((0, ()), (2, (0,))))]
QUERIES = [PrefixQuery.of(graph) for graph in GRAPHS]
PREFIX = [[len(common_prefix(query, graph)) for graph in GRAPHS] for query in GRAPHS]

sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=4)
graphs = st.integers(0, len(GRAPHS) - 1)
qualities = st.sampled_from([None, math.nan, 0.1, 0.5])


@dataclass
class Version:
    """What the plain model knows of a version."""

    graph: int
    rank: tuple[float, int, ModelRef]
    slots: frozenset[Slot]
    pins: dict[Lease, str] = field(default_factory=dict[Lease, str])
    """Lease -> client."""


@dataclass
class Commit:
    """A commit on its way: which shards were not asked yet."""

    draft: Draft
    client: str
    version: Version
    created_ns: int
    asked: list[int]
    unasked: list[int]


def grouped(slots: frozenset[Slot]) -> dict[SegmentId, list[int]]:
    holds: dict[SegmentId, list[int]] = {}
    for segment, slot in sorted(slots):
        holds.setdefault(segment, []).append(slot)
    return holds


def outcome(call: Callable[[], object]) -> object:
    """Return what a call answers, or the kind of its error."""
    try:
        return call()
    except TensorVineError as exc:
        return type(exc)


class ShardMachine(RuleBasedStateMachine):
    """The steps that shards and the plain model take."""

    shards: int

    @initialize()
    def start(self) -> None:
        self.states = [self.new_state(index) for index in range(self.shards)]
        self.now = 0.0
        self.serial = 0
        self.sessions: dict[tuple[int, str], float] = {}
        self.content: dict[Slot, bytes] = {}
        self.held: dict[tuple[int, Holder], set[Slot]] = {}
        self.live: dict[ModelRef, Version] = {}
        self.retired_pinned: dict[ModelRef, Version] = {}
        self.lost: set[ModelRef] = set()
        self.version_facts: list[dict[ModelRef, tuple[ModelRef | None, bool]]] = [{} for _ in self.states]
        self.planner = Ledger()
        self.onto_retired_pinned: set[ModelRef] = set()
        """Versions whose parent was retired when they came: a shard that dies may know less of where they come from."""
        self.leases: list[tuple[int, Lease]] = []
        self.queries = count(1)
        self.commits: dict[ModelRef, Commit] = {}
        self.messages: list[tuple[int, str]] = []
        self.compactions: list[tuple[SegmentId, int, bytearray, tuple[Offset, ...], int]] = []
        self.handles: list[dict[int, bytearray]] = [{} for _ in self.states]
        """Blocks in the care of each shard, by identity."""
        self.seen: list[tuple[int, object]] = [(-1, None) for _ in self.states]
        for shard in range(self.shards):
            for client in CLIENTS:
                self.hello(shard, client)

    def new_state(self, index: int) -> ShardState:
        return ShardState(index, self.home, SESSION_S)

    def home(self, name: str) -> int:
        return NAMES.index(name) % self.shards

    # ---- saving ---------------------------------------------------------------------------------------

    def hello(self, shard: int, client: str) -> None:
        self.states[shard].open(client, self.now)
        self.sessions[shard, client] = self.now + SESSION_S

    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def greet(self, data: st.DataObject, client: str) -> None:
        shard = self.any_shard(data)
        if data.draw(st.booleans(), "renew"):
            known = self.states[shard].renew(client, [], self.now) is not None
            assert known is ((shard, client) in self.sessions)
            if (shard, client) not in self.sessions:
                return
        self.hello(shard, client)

    @rule(
        data=st.data(),
        client=st.sampled_from(CLIENTS),
        save=st.integers(0, 1),
        sizes=sizes,
    )
    def adopt(self, data: st.DataObject, client: str, save: int, sizes: list[int]) -> None:
        shard, holder = self.any_shard(data), Save(client, save)
        self.serial += 1
        segment = (shard, self.serial)
        offsets, length = layout(sizes)
        block = bytearray(length)
        content = {(segment, i): bytes([self.serial % 251 + i]) * size for i, size in enumerate(sizes)}
        for (_, i), text in content.items():
            block[offsets[i] : offsets[i] + len(text)] = text
        if (shard, client) not in self.sessions:
            with pytest.raises(OperationTimeoutError, match=str(holder)):
                self.states[shard].adopt(holder, segment, block, sizes)
            return
        self.states[shard].adopt(holder, segment, block, sizes)
        with pytest.raises(CorruptDataError, match="in use"):
            self.states[shard].adopt(holder, segment, b"", [])
        self.handles[shard][id(block)] = block
        self.content |= content
        self.held.setdefault((shard, holder), set()).update(content)

    @rule(client=st.sampled_from(CLIENTS), save=st.integers(0, 1))
    def abort(self, client: str, save: int) -> None:
        for shard in range(self.shards):
            self.release(shard, Save(client, save))

    @rule(
        data=st.data(),
        client=st.sampled_from(CLIENTS),
        save=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        graph=graphs,
        quality=qualities,
        bring=st.booleans(),
    )
    def begin(
        self, data: st.DataObject, client: str, save: int, name: str, graph: int, quality: float | None, bring: bool
    ) -> None:
        home, holder = self.home(name), Save(client, save)
        mine = {slot for shard in range(self.shards) for slot in self.held.get((shard, holder), ())}
        slots = set(data.draw(st.sets(st.sampled_from(sorted(mine))), "written")) if mine else set[Slot]()
        parents = [ref for ref, known in {**self.live, **self.retired_pinned}.items() if known.slots]
        parent = data.draw(st.none() | st.sampled_from(sorted(parents)), "parent") if parents else None
        if parent is not None:
            theirs = sorted((self.live.get(parent) or self.retired_pinned[parent]).slots)
            slots |= data.draw(st.sets(st.sampled_from(theirs)), "inherited")
        self.serial += 1
        key = bytes([graph])
        text = (GRAPHS[graph].to_json(), None) if bring else None
        body = b"table" * data.draw(st.integers(0, 3))
        wanted = frozenset(slots)
        created_ns = self.serial // 2
        draft = Draft(
            name=name,
            save=holder,
            parent=parent,
            quality=quality,
            metadata="{}",
            graph_key=key,
            architecture=text,
            body=body,
            holds=grouped(wanted),
            bytes_owned=1,
            bytes_total=2,
        )
        if not bring and not self.keeps(home, graph):
            with pytest.raises(GraphError, match="no such key"):
                self.states[home].begin_commit(draft)
            return
        here = {slot for slot in wanted if slot[0][0] == home}
        try:
            ref = self.states[home].begin_commit(draft)
        except (ModelLostError, CorruptDataError) as exc:
            self.check_refusal(home, here, exc)
            return
        assert ref.name == name
        assert ref not in self.version_facts[home]
        assert ref not in self.commits
        if here:
            self.held[home, ref] = here
        others = sorted({shard for (shard, _), _ in wanted} - {home})
        version = Version(graph, rank_of(quality, created_ns, ref), wanted)
        self.commits[ref] = Commit(draft, client, version, created_ns, [], others)

    def keeps(self, home: int, graph: int) -> bool:
        known = [*self.live.items(), *self.retired_pinned.items(), *((r, c.version) for r, c in self.commits.items())]
        return any(self.home(ref.name) == home and version.graph == graph for ref, version in known)

    def check_refusal(self, shard: int, wanted: set[Slot], exc: TensorVineError) -> None:
        """A hold may only be refused when a tensor that it names is held by nobody any more."""
        kept = self.kept(shard)
        assert not wanted <= kept
        gone = {segment for segment, _ in wanted} - {segment for segment, _ in kept}
        assert isinstance(exc, ModelLostError) is bool(gone)

    @rule(data=st.data(), client=st.sampled_from(CLIENTS), name=st.sampled_from(NAMES), sizes=sizes)
    def save(self, data: st.DataObject, client: str, name: str, sizes: list[int]) -> None:
        """Save in one go; so that histories are rich in live versions."""
        self.adopt(data, client, 0, sizes)
        before = set(self.commits)
        self.begin(data, client, 0, name, data.draw(graphs, "graph"), data.draw(qualities, "quality"), True)
        for ref in set(self.commits) - before:
            while ref in self.commits:
                self.step(ref)

    @precondition(lambda self: self.commits)
    @rule(data=st.data(), give_up=st.integers(0, 9))
    def advance(self, data: st.DataObject, give_up: int) -> None:
        ref = data.draw(st.sampled_from(sorted(self.commits)), "commit")
        if give_up == 0:
            self.abandon(ref)
        else:
            self.step(ref)

    def step(self, ref: ModelRef) -> None:
        """Ask one more shard to hold its part; publish when all do."""
        commit = self.commits[ref]
        if commit.unasked:
            shard = commit.unasked.pop(0)
            commit.asked.append(shard)
            wanted = {slot for slot in commit.version.slots if slot[0][0] == shard}
            try:
                self.states[shard].hold(ref, grouped(frozenset(wanted)))
            except (ModelLostError, CorruptDataError) as exc:
                self.check_refusal(shard, wanted, exc)
                self.abandon(ref)
                return
            self.held[shard, ref] = wanted
            self.states[shard].hold(ref, grouped(frozenset(wanted)))  # the message came twice
        else:
            self.publish(ref, commit)

    def abandon(self, ref: ModelRef) -> None:
        commit = self.commits.pop(ref)
        home = self.home(ref.name)
        self.states[home].abandon(ref)
        self.note(ref, None, False)
        self.held.pop((home, ref), None)
        for shard in commit.asked:
            self.release(shard, ref)

    def publish(self, ref: ModelRef, commit: Commit) -> None:
        home = self.home(ref.name)
        self.note(ref, commit.draft.parent, True)
        assert self.states[home].publish(ref, commit.draft, commit.created_ns) == ref
        del self.commits[ref]
        self.live[ref] = commit.version
        self.version_facts[home][ref] = (commit.draft.parent, True)
        if commit.draft.parent is not None and commit.draft.parent not in self.live:
            self.onto_retired_pinned.add(ref)
        self.held.pop((home, commit.draft.save), None)
        self.messages += [(shard, commit.draft.save) for shard in range(self.shards) if shard != home]

    # ---- retiring and leases --------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retire_one(data.draw(st.sampled_from(sorted(self.live))))

    def retire_one(self, ref: ModelRef) -> None:
        home = self.home(ref.name)
        self.states[home].retire(ref)
        self.note(ref, None, False)
        version = self.live.pop(ref)
        self.version_facts[home][ref] = (self.version_facts[home][ref][0], False)
        if version.pins:
            self.retired_pinned[ref] = version
        else:
            self.drop(ref)
        with pytest.raises(ModelNotFoundError, match=f"{ref} was retired"):
            self.states[home].retire(ref)

    def drop(self, ref: ModelRef) -> None:
        self.held.pop((self.home(ref.name), ref), None)

    @precondition(lambda self: self.live or self.retired_pinned)
    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def pin(self, data: st.DataObject, client: str) -> None:
        ref = data.draw(st.sampled_from(sorted({**self.live, **self.retired_pinned})))
        home, version = self.home(ref.name), self.live.get(ref) or self.retired_pinned[ref]
        if ref in self.live or client in version.pins.values():
            lease = Lease(self.query(client), home)
            assert self.states[home].pin(ref.name, ref.version, lease, self.now).header.ref == ref
            self.pinned(home, version, client, lease)
        else:
            with pytest.raises(ModelNotFoundError, match=str(ref)):
                self.states[home].pin(ref.name, ref.version, Lease(self.query(client), home), self.now)

    def query(self, client: str) -> Query:
        return Query(client, next(self.queries))

    def pinned(self, home: int, version: Version, client: str, lease: Lease) -> None:
        assert (home, lease) not in self.leases
        self.sessions[home, client] = self.now + SESSION_S
        self.leases.append((home, lease))
        version.pins[lease] = client

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Let a lease go that perhaps went long ago, with its session or with the life of its shard."""
        shard, lease = data.draw(st.sampled_from(self.leases))
        self.states[shard].unpin([lease])
        self.unpinned({lease})

    def unpinned(self, leases: set[Lease]) -> None:
        for version in [*self.live.values(), *self.retired_pinned.values()]:
            for lease in leases:
                version.pins.pop(lease, None)
        for ref in [ref for ref, retired in self.retired_pinned.items() if not retired.pins]:
            del self.retired_pinned[ref]
            self.drop(ref)

    @rule(client=st.sampled_from(CLIENTS), query=graphs)
    def match(self, client: str, query: int) -> None:
        answers: list[Match] = []
        number = self.query(client)
        for shard, state in enumerate(self.states):
            here = {ref: v for ref, v in self.live.items() if self.home(ref.name) == shard}
            best = self.best(query, here)
            (answer,) = state.match([QUERIES[query]], number, self.now)
            assert (answer.ref if answer else None) == best
            if answer is not None:
                assert answer.size == PREFIX[query][self.live[answer.ref].graph]
                answers.append(answer)
                self.pinned(shard, self.live[answer.ref], client, answer.lease)
        first = max(answers, key=lambda answer: answer.rank).ref if answers else None
        assert first == self.best(query, self.live)

    @staticmethod
    def best(query: int, versions: dict[ModelRef, Version]) -> ModelRef | None:
        scores = [(PREFIX[query][version.graph], version.rank) for version in versions.values()]
        size, rank = max(scores, default=(0, None))
        return rank[2] if size and rank else None

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def sweep(self, seconds: float) -> None:
        self.now += seconds
        for shard, state in enumerate(self.states):
            ended = [c for (s, c), expires in self.sessions.items() if s == shard and expires <= self.now]
            assert sorted(state.sweep(self.now)) == sorted(ended)
            for client in ended:
                self.ended(shard, client)

    @rule(data=st.data(), client=st.sampled_from(CLIENTS))
    def end(self, data: st.DataObject, client: str) -> None:
        shard = self.any_shard(data)
        self.states[shard].end(client)
        self.ended(shard, client)

    def ended(self, shard: int, client: str) -> None:
        self.sessions.pop((shard, client), None)
        self.unpinned({lease for s, lease in self.leases if s == shard and lease.client == client})
        for save in range(2):
            self.held.pop((shard, Save(client, save)), None)

    # ---- the shell ------------------------------------------------------------------------------------

    def any_shard(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, self.shards - 1), "shard")

    def release(self, shard: int, holder: Holder) -> None:
        self.states[shard].release(holder)
        self.held.pop((shard, holder), None)

    @precondition(lambda self: any(state.residents.compactable for state in self.states))
    @rule()
    def begin_compactions(self) -> None:
        """Copy what is live now; the copies are taken later, if they still fit."""
        for state in self.states:
            wanted, state.residents.compactable = state.residents.compactable, set()
            for segment_id in sorted(wanted):
                segment = state.segment(segment_id)
                if segment is None or not segment.wants_compaction:
                    continue
                offsets, length = segment.compacted()
                block = bytearray(length)
                for slot, (old, new, size) in enumerate(zip(segment.offsets, offsets, segment.sizes, strict=True)):
                    assert (new == GONE) is (slot not in segment.live_slots)
                    if isinstance(new, int) and isinstance(old, int):
                        block[new : new + size] = segment.handle[old : old + size]
                self.compactions.append((segment_id, segment.generation, block, offsets, length))

    @precondition(lambda self: self.compactions)
    @rule(data=st.data())
    def end_compaction(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.compactions) - 1))
        segment_id, generation, block, offsets, length = self.compactions.pop(position)
        state = self.states[segment_id[0]]
        needed = {slot for segment, slot in self.kept(segment_id[0]) if segment == segment_id}
        segment = state.segment(segment_id)
        newest = segment is not None and segment.generation == generation
        fits = newest and all(offsets[slot] != GONE for slot in needed)
        assert state.residents.move(segment_id, generation, block, offsets, length) is fits
        if fits:
            self.handles[segment_id[0]][id(block)] = block

    def kept(self, shard: int) -> set[Slot]:
        """Tensors on a shard that somebody names."""
        return {slot for (where, _), slots in self.held.items() if where == shard for slot in slots}

    def note(self, ref: ModelRef, parent: ModelRef | None, exists: bool) -> None:
        """Tell the planner and the other shards."""
        for shard, state in enumerate(self.states):
            if shard != self.home(ref.name):
                state.ledger.note({ref: (parent, exists)})
        self.planner.note({ref: (parent, exists)})
