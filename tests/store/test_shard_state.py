"""A shard's rules, held to plain dictionaries over random histories: one shard, and three wired together.

Rules
- The plain model and the steps are in tests/support/shard_machine.py; what always holds is here. Short histories that
  random ones meet too seldom are in test_shard_histories.py.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tensorvine.store.errors import ModelLostError, ModelNotFoundError
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState

from tests.support.shard_machine import CLIENTS, NAMES, ShardMachine, outcome


class OneShard(ShardMachine):
    """Saves, retirements, pins, leases and compactions on one shard."""

    shards = 1

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
