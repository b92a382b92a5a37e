"""Short histories of one shard that the random ones of test_shard_state.py meet too seldom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tensorvine.store.errors import (
    CorruptDataError,
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
)
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Lease, Query, Save
from tensorvine.store.refs import LAST_VERSION, ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.table import LATEST_NS
from tensorvine.store.versions.version import Draft, Match

from tests.support.shard_machine import GRAPHS, SESSION_S


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

    def root(self, state: ShardState, name: str, serial: int, digests: list[str], created_ns: int) -> ModelRef:
        """Publish a version without a parent, with one segment of its own, which is hashed."""
        segment = (0, serial)
        state.adopt(Save("c", serial), segment, "block", [64] * len(digests))
        draft = replace(self.draft(name, []), save=Save("c", serial), holds={segment: list(range(len(digests)))})
        ref = state.publish(state.begin_commit(draft), draft, created_ns)
        state.set_digests(segment, digests)
        return ref

    def test_a_root_with_the_graph_and_tensors_of_an_older_version_is_noticed(self) -> None:
        state = self.state()
        first = self.root(state, "a", 1, ["x", "y"], 1)
        assert state.unshared((0, 1)) == []
        self.root(state, "b", 2, ["x", "z"], 2)
        assert state.unshared((0, 2)) == []
        same = self.root(state, "c", 3, ["x", "y"], 3)
        assert state.unshared((0, 3)) == [(same, first)]
        state.retire(first)
        assert state.unshared((0, 3)) == []
        assert state.unshared((0, 9)) == []

    def test_a_name_whose_last_number_is_taken_is_refused_with_the_file(self) -> None:
        state = self.state()
        state.miss(ModelRef("a/m", LAST_VERSION), CorruptDataError("cut"), mine=True)
        state.adopt(Save("c", 1), (0, 1), "block", [64])
        with pytest.raises(CorruptDataError, match=f"save of 'a/m'.*manifests/a/m@{LAST_VERSION}.arrow"):
            state.begin_commit(self.draft("a/m", [0]))

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
        after = self.save(state, "m", [])
        assert after == ModelRef("m", ref.version + 1)
        with pytest.raises(ModelNotFoundError, match="m@1 never existed: its save failed"):
            state.resolve("m", ref.version)
        state.retire(after)
        with pytest.raises(ModelNotFoundError, match="m@2 was retired"):
            state.resolve("m", after.version)

    def test_a_commit_with_a_malformed_graph_changes_nothing(self) -> None:
        state = self.state()
        draft = replace(self.draft("m", []), architecture=("no graph", None))
        with pytest.raises(GraphError, match="expected a text from"):
            state.begin_commit(draft)
        assert self.save(state, "m", []) == ModelRef("m", 1)

    def test_a_lease_of_an_earlier_life_releases_no_pin_of_this_one(self) -> None:
        old = self.state()
        self.save(old, "m", [])
        stale = Lease(Query("c", 1), 0)
        old.pin("m", 1, stale, 0.0)
        new = self.state()
        new.restore(old.version_facts())
        ref = self.save(new, "m", [])
        new.pin("m", ref.version, Lease(Query("c", 2), 0), 0.0)
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
        lease = Lease(Query("c", 1), 0)
        state.pin("m", 1, lease, 0.0)
        state.pin("m", 1, Lease(Query("other", 1), 0), 0.0)
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
