"""A shard's rules, held to plain dictionaries over random histories: one shard, and three wired together.

Rules
- The plain model knows who named which tensor on which shard (`held`), and nothing of counts, blocks or indices.
- The machine plays the shell: it carries messages between shards, in any order and twice, and compacts late.
- Every block holds the bytes that were staged, so that a tensor read back at a wrong offset shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensorvine.store.errors import (
    CorruptDataError,
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    TensorVineError,
)
from tensorvine.store.graphs.graph import ModelGraph, common_prefix
from tensorvine.store.graphs.index import PrefixQuery, rank_of
from tensorvine.store.holders import Holder, Lease, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import GONE, Offset, SegmentId, layout
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import Ledger
from tensorvine.store.versions.table import LATEST_NS
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


class OneShard(RuleBasedStateMachine):
    """Saves, retirements, pins, leases and compactions on one shard."""

    shards = 1

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
            assert self.states[shard].renew(client, self.now) is ((shard, client) in self.sessions)
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
        with pytest.raises(CorruptDataError, match="taken"):
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
            record, lease = self.states[home].pin(ref.name, ref.version, client, self.now)
            assert record.header.ref == ref
            self.pinned(home, version, client, lease)
        else:
            with pytest.raises(ModelNotFoundError, match=str(ref)):
                self.states[home].pin(ref.name, ref.version, client, self.now)

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
        for shard, state in enumerate(self.states):
            here = {ref: v for ref, v in self.live.items() if self.home(ref.name) == shard}
            best = self.best(query, here)
            (answer,) = state.match([QUERIES[query]], client, self.now)
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

    # ---- what always holds ----------------------------------------------------------------------------

    @invariant()
    def outboxes_are_taken(self) -> None:
        for state in self.states:
            outbox, state.outbox = state.outbox, []
            self.messages += outbox

    @invariant()
    def stats_are_sums_over_the_plain_model(self) -> None:
        for shard, state in enumerate(self.states):
            state.check()
            stats, kept = state.stats(), self.kept(shard)
            assert stats.tensors == len(kept)
            assert stats.bytes_memory == sum(len(self.content[slot]) for slot in kept)
            segments = [state.segment(segment) for segment in {segment for segment, _ in kept}]
            assert stats.bytes_allocated == sum(segment.allocated for segment in segments if segment is not None)
            assert stats.models == sum(self.home(ref.name) == shard for ref in self.live)
            pins = [v.pins for ref, v in {**self.live, **self.retired_pinned}.items() if self.home(ref.name) == shard]
            assert stats.pins == sum(map(len, pins))

    @invariant()
    def every_named_tensor_is_reachable(self) -> None:
        for shard, state in enumerate(self.states):
            kept = self.kept(shard)
            blocks = state.blocks({segment for segment, _ in kept})
            for segment, slot in kept:
                start, text = blocks[segment].offsets[slot], self.content[segment, slot]
                assert isinstance(start, int)
                assert blocks[segment].handle[start : start + len(text)] == text

    @invariant()
    def every_block_is_in_a_segment_or_freed_once(self) -> None:
        for shard, state in enumerate(self.states):
            freed, state.residents.freed = state.residents.freed, []
            for handle in freed:
                del self.handles[shard][id(handle)]
            segments = [state.segment(segment) for segment in {segment for segment, _ in self.kept(shard)}]
            assert {id(segment.handle) for segment in segments if segment is not None} == set(self.handles[shard])

    @invariant()
    def no_dead_bytes_are_forgotten(self) -> None:
        waiting = {segment_id for segment_id, *_ in self.compactions}
        for shard, state in enumerate(self.states):
            for segment_id in {segment for segment, _ in self.kept(shard)} - waiting - state.residents.compactable:
                segment = state.segment(segment_id)
                assert segment is not None
                assert not segment.wants_compaction

    @invariant()
    def everybody_sees_what_they_may(self) -> None:
        for shard, state in enumerate(self.states):
            refs = [*self.version_facts[shard], *(r for r in self.commits if self.home(r.name) == shard)]
            answers = {(ref, client): self.answer(state, ref, client) for ref in refs for client in CLIENTS}
            assert answers == {key: self.expected(*key) for key in answers}
            epoch, seen = self.seen[shard]
            live = {name: outcome(lambda n=name, s=state: s.resolve(n, None)) for name in NAMES}
            if epoch == state.epoch:
                committed = {key: answer for key, answer in answers.items() if key[0] not in self.commits}
                assert seen == (committed, live)
            committed = {key: answer for key, answer in answers.items() if key[0] not in self.commits}
            self.seen[shard] = (state.epoch, (committed, live))

    @staticmethod
    def answer(state: ShardState, ref: ModelRef, client: str) -> object:
        return outcome(lambda: state.record(ref.name, ref.version, client).header.ref)

    def expected(self, ref: ModelRef, client: str) -> object:
        if ref in self.live or (ref in self.retired_pinned and client in self.retired_pinned[ref].pins.values()):
            return ref
        return ModelLostError if ref in self.lost else ModelNotFoundError

    @invariant()
    def the_newest_live_version_is_the_latest(self) -> None:
        for shard, state in enumerate(self.states):
            for name in NAMES:
                if self.home(name) != shard:
                    continue
                live = [ref for ref in self.live if ref.name == name]
                lost = [ref for ref in self.lost if ref.name == name]
                expected = max(live) if live else ModelLostError if lost else ModelNotFoundError
                assert outcome(lambda n=name, s=state: s.resolve(n, None)) == expected
                assert state.newer(name, 0) == max(live, default=None)
            here = sorted(ref for ref in self.live if self.home(ref.name) == shard)
            assert state.models() == here
            assert state.graphs.find([{}], exact=False) == here

    @invariant()
    def lineage_names_what_exists_and_what_it_comes_from(self) -> None:
        parents = {ref: parent for version_facts in self.version_facts for ref, (parent, _) in version_facts.items()}
        exists = {*self.live, *self.retired_pinned, *self.lost}
        for ref in exists:
            chain = [ref]
            while (parent := parents.get(chain[-1])) is not None:
                chain.append(parent)
            named = self.chain(ref)
            assert named == chain[: len(named)]
            assert len(named) == len(chain) or self.onto_retired_pinned & set(chain)
        for shard, state in enumerate(self.states):
            version_facts = self.version_facts[shard]
            named = state.version_facts()
            assert named.items() <= version_facts.items()
            assert named.keys() >= {ref for ref in exists if self.home(ref.name) == shard}
            assert all(state.offspring([ref]) for ref in named.keys() - exists)
        for root in {parent for parent in parents.values() if parent is not None}:
            below = {root}
            for _ in parents:
                below |= {ref for ref, parent in parents.items() if parent in below}
            told = [pair for state in self.states for pair in state.offspring([root])]
            if not self.onto_retired_pinned & below:
                assert {ref for ref, _ in told} >= (below - {root}) & exists
            assert {ref for ref, live in told if live} <= below & self.live.keys()

    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Name the lineage as clients do: from home to home."""
        chain = [ref]
        while len(more := self.states[self.home(chain[-1].name)].lineage.chain(chain[-1])) > 1:
            chain += more[1:]
        return chain

    def note(self, ref: ModelRef, parent: ModelRef | None, exists: bool) -> None:
        """Tell the planner and the other shards."""
        for shard, state in enumerate(self.states):
            if shard != self.home(ref.name):
                state.ledger.note({ref: (parent, exists)})
        self.planner.note({ref: (parent, exists)})

    def teardown(self) -> None:
        """Once all is retired and unpinned, nothing is left."""
        if not hasattr(self, "states"):
            return
        for ref in list(self.commits):
            self.abandon(ref)
        for ref in list(self.live):
            self.retire_one(ref)
        for shard, state in enumerate(self.states):
            for client in CLIENTS:
                state.end(client)
                self.ended(shard, client)
        self.outboxes_are_taken()
        for shard, holder in reversed(self.messages):
            self.release(shard, holder)
        assert not self.held
        self.every_block_is_in_a_segment_or_freed_once()
        assert not any(self.handles)
        for state in self.states:
            state.check()
            stats = state.stats()
            assert (stats.models, stats.tensors, stats.bytes_memory, stats.bytes_allocated) == (0, 0, 0, 0)
            assert (stats.bytes_metadata, stats.pins) == (0, 0)
            assert not state.residents.compactable


class ThreeShards(OneShard):
    """The same over three shards that start again at any time, with messages between them."""

    shards = 3

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        message = data.draw(st.sampled_from(self.messages))
        if not twice:
            self.messages.remove(message)
        self.release(*message)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """A shard dies and starts again, knowing only the ledger; the others let go what it held there."""
        dead = self.any_shard(data)
        for ref in [ref for ref in self.commits if self.home(ref.name) == dead]:
            del self.commits[ref]
        known = {**self.live, **self.retired_pinned}
        for ref in [ref for ref in known if self.home(ref.name) == dead]:
            self.retired_pinned.pop(ref, None)
            if self.live.pop(ref, None):
                self.lost.add(ref)
        stale = {h for _, h in self.held if isinstance(h, ModelRef) and self.home(h.name) == dead}
        self.held = {(s, h): slots for (s, h), slots in self.held.items() if s != dead and h not in stale}
        self.sessions = {(s, c): expires for (s, c), expires in self.sessions.items() if s != dead}
        for commit in self.commits.values():
            commit.asked = [shard for shard in commit.asked if shard != dead]
        self.states[dead] = self.new_state(dead)
        self.handles[dead] = {}
        self.states[dead].ledger.merge(self.planner.told())
        self.states[dead].claim(name for name in NAMES if self.home(name) == dead)
        for shard, state in enumerate(self.states):
            if shard != dead:
                for holder in state.held_by(dead):
                    state.release(holder)
        self.seen[dead] = (-1, None)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def retire_lost(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(sorted(self.lost)))
        with pytest.raises(ModelLostError, match=f"{ref} is lost"):
            self.states[self.home(ref.name)].retire(ref)


TestOneShard = OneShard.TestCase
TestOneShard.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestThreeShards = ThreeShards.TestCase
TestThreeShards.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class TestHistories:
    """Short histories that random ones meet too seldom."""

    def state(self) -> ShardState:
        state = ShardState(0, lambda name: 0, SESSION_S)
        state.open("c", 0.0)
        return state

    def draft(self, name: str, slots: list[int], graph: ModelGraph | None = GRAPHS[0]) -> Draft:
        text = (graph.to_json(), None) if graph is not None else None
        holds = {(0, 1): slots} if slots else dict[SegmentId, list[int]]()
        return Draft(
            name=name,
            save=Save("c", 1),
            parent=None,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=text,
            body=b"",
            holds=holds,
            bytes_owned=1,
            bytes_total=1,
        )

    def save(self, state: ShardState, name: str, slots: list[int]) -> ModelRef:
        draft = self.draft(name, slots)
        return state.publish(state.begin_commit(draft), draft, 1)

    def test_no_version_is_older_than_those_of_its_name_before_it(self) -> None:
        state = self.state()
        state.adopt(Save("c", 1), (0, 1), "old", [64])
        for now_ns, expected in ((5, 5), (3, 6), (LATEST_NS, LATEST_NS), (7, LATEST_NS)):  # the clock goes back
            draft = self.draft("m", [0])
            ref = state.begin_commit(draft)
            assert state.dated(ref, now_ns) == expected
            state.publish(ref, draft, expected)
        draft = self.draft("other", [0])
        assert state.dated(state.begin_commit(draft), 4) == 4
        moved = self.state()
        moved.begin_commit(self.draft("m", []))
        moved._enter(state.record("m", 2, "c").header, b"", ())
        assert moved.dated(moved.begin_commit(self.draft("m", [])), 1) == 7

    def test_a_segment_that_dies_on_while_it_is_compacted_is_compacted_again(self) -> None:
        state = self.state()
        state.adopt(Save("c", 1), (0, 1), "old", [64] * 4)
        first, second = self.save(state, "m", [0, 1, 2]), self.save(state, "m", [0, 1])
        self.save(state, "m", [0])
        assert state.residents.compactable == set()  # exactly a quarter is dead
        state.retire(first)
        assert state.residents.compactable == {(0, 1)}
        segment = state.segment((0, 1))
        assert segment is not None
        offsets, length = segment.compacted()
        state.retire(second)
        assert state.residents.move((0, 1), 0, "new", offsets, length)
        assert state.residents.compactable == {(0, 1)}
        assert not state.residents.move((0, 1), 0, "made from what was there before", offsets, length)
        assert state.residents.move((0, 1), 1, "newest", *segment.compacted())
        assert state.residents.freed == ["old", "new"]
        assert state.residents.compactable == set()
        assert state.stats().bytes_allocated == 64

    def test_a_copy_that_lacks_a_slot_held_meanwhile_is_not_taken(self) -> None:
        state = self.state()
        state.adopt(Save("c", 1), (0, 1), "old", [64] * 4)
        self.save(state, "m", [0])
        segment = state.segment((0, 1))
        assert segment is not None
        offsets, length = segment.compacted()
        state.hold(ModelRef("n", 1), {(0, 1): [3]})
        assert not state.residents.move((0, 1), 0, "new", offsets, length)
        assert state.blocks([(0, 1)])[0, 1].handle == "old"
        assert state.residents.compactable == {(0, 1)}

    def test_a_commit_keeps_its_graph_when_the_parent_goes_meanwhile(self) -> None:
        state = self.state()
        parent = self.save(state, "m", [])
        draft = self.draft("m", [], graph=None)
        ref = state.begin_commit(draft)
        state.retire(parent)
        state.publish(ref, draft, 2)
        assert state.graphs.architecture(b"key")[0] == GRAPHS[0].to_json()
        state.retire(ref)
        assert state.stats().bytes_metadata == 0

    def test_a_save_announces_its_graph_and_commits_without_it(self) -> None:
        state, architecture = self.state(), (GRAPHS[0].to_json(), None)
        for _ in range(2):  # the second is a message that was repeated
            state.announce(Save("c", 1), b"key", architecture)
        assert state.graphs.find([{}], exact=False) == []
        draft = self.draft("m", [], graph=None)
        ref = state.publish(state.begin_commit(draft), draft, 1)
        assert state.graphs.find([{}], exact=False) == [ref]
        state.retire(ref)
        assert state.stats().bytes_metadata == 0

    @pytest.mark.parametrize("how", ["it is given up", "its client goes"])
    def test_an_announced_graph_goes_with_its_save(self, how: str) -> None:
        state, architecture = self.state(), (GRAPHS[0].to_json(), None)
        state.announce(Save("c", 1), b"key", architecture)
        assert state.stats().bytes_metadata > 0
        if how == "it is given up":
            state.release(Save("c", 1))
        else:
            state.end("c")
            with pytest.raises(OperationTimeoutError, match="its session ended"):
                state.announce(Save("c", 1), b"key", architecture)
        assert state.stats().bytes_metadata == 0
        with pytest.raises(GraphError, match="found no such key"):
            state.begin_commit(self.draft("m", [], graph=None))

    def test_the_graph_of_a_version_that_was_lost_is_lost_with_it(self) -> None:
        """A client that knows the version's table asks for its graph alone, to load layers."""
        state = ShardState(0, lambda name: 0)
        lost, never = ModelRef("m", 1), ModelRef("m", 2)
        state.restore({lost: (None, True)})
        with pytest.raises(ModelLostError, match="m@1 is lost"):
            state.architecture(lost, b"key", "client")
        with pytest.raises(ModelNotFoundError, match="found no m@2"):
            state.architecture(never, b"key", "client")

    def test_a_commit_that_is_abandoned_leaves_nothing_but_its_number(self) -> None:
        state = self.state()
        ref = state.begin_commit(self.draft("m", []))
        state.abandon(ref)
        assert state.stats().bytes_metadata == 0
        assert self.save(state, "m", []) == ModelRef("m", ref.version + 1)

    def test_a_commit_with_a_malformed_graph_changes_nothing(self) -> None:
        state = self.state()
        draft = replace(self.draft("m", []), architecture=("no graph", None))
        with pytest.raises(GraphError, match="expected what"):
            state.begin_commit(draft)
        assert self.save(state, "m", []) == ModelRef("m", 1)

    def test_a_lease_of_an_earlier_life_releases_no_pin_of_this_one(self) -> None:
        old = self.state()
        self.save(old, "m", [])
        _, stale = old.pin("m", 1, "c", 0.0)
        new = self.state()
        new.restore(old.version_facts())
        ref = self.save(new, "m", [])
        new.pin("m", ref.version, "c", 0.0)
        new.unpin([stale])
        assert new.stats().pins == 1

    def test_what_is_lost_stays_lost_through_a_second_restart(self) -> None:
        old, new, newest = self.state(), self.state(), self.state()
        ref = self.save(old, "m", [])
        new.restore(old.version_facts())
        newest.restore(new.version_facts())
        for state in (new, newest):
            with pytest.raises(ModelLostError, match="m@1 is lost"):
                state.record("m", ref.version, "c")
            with pytest.raises(ModelLostError, match="m@1 is lost"):
                state.resolve("m", None)
        assert self.save(newest, "m", []) == ModelRef("m", 2)

    def test_the_end_of_a_client_spares_models_that_are_called_like_it(self) -> None:
        state = self.state()
        state.adopt(Save("c", 1), (0, 1), b"", [64])
        self.save(state, "c/model", [0])
        state.end("c")
        assert state.stats().tensors == 1

    def test_an_epoch_passes_when_a_ghost_vanishes_for_one_of_two_clients(self) -> None:
        state = self.state()
        ref = self.save(state, "m", [])
        _, lease = state.pin("m", 1, "c", 0.0)
        state.pin("m", 1, "other", 0.0)
        state.retire(ref)
        before = state.epoch
        assert state.record("m", 1, "c").header.ref == ref
        state.unpin([lease])
        assert state.epoch > before
        with pytest.raises(ModelNotFoundError, match="m@1 was retired"):
            state.record("m", 1, "c")

    def test_a_quality_of_nan_ranks_below_every_number(self) -> None:
        matches = [
            Match(ModelRef("m", i), 1, quality, 0, b"", "") for i, quality in enumerate([math.nan, -1.0, math.nan], 1)
        ]
        assert max(matches, key=lambda match: match.rank).ref == ModelRef("m", 2)
