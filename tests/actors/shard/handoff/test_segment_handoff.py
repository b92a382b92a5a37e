"""A shard that drains, where the successor refuses, where the planner dies on the way, and where the successor does."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.handoff.segment_handoff import SegmentHandoff
from tensorvine.planner.topology import Topology
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import MovedError, StoreFullError
from tensorvine.store.holders import Drain, Reason, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.handover import MovedSegment
from tensorvine.store.versions.replica import Copy

from tests.support.disk import MIB
from tests.support.disklife import Life, note, put
from tests.support.waiting import eventually

COPY = Copy((4,), (0,), b"abcd")
SEGMENTS = tuple((0, serial) for serial in range(1, 4))


class Full:
    """The other shards: none has room."""

    topology = topology_after = Topology("alone", (1,), "starter")

    async def ask(self, shard: int, request: Request[Any], timeout: float) -> None:
        raise StoreFullError(f"shard {shard}: no room")


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A shard with three segments in memory."""
    Archive(str(tmp_path), 1)
    life = Life(tmp_path, again=False)
    for segment in SEGMENTS:
        with life.lock:
            (offset,) = life.segment_memory.grant(Save("c", 1), [MIB])
            part = Part(offset, MIB)
            life.segment_memory.memory.part(part)[:] = np.uint8(segment[1])
            life.state.adopt(Save("c", 1), segment, part, [MIB])
            life.segment_memory.keep(part, segment)
            life.state.hold(ModelRef("m", 1), {segment: [0]})
    return life


def test_a_drain_that_is_refused_locks_no_memory_however_long_its_error_is_kept(life: Life) -> None:
    segment_handoff = SegmentHandoff(replace(life.context, peers=cast("Any", Full())))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(StoreFullError) as kept:
            asyncio.run(segment_handoff.copy(Topology("alone", (1,), "starter")))
        found = [life.state.segment(segment) for segment in SEGMENTS]
        handles = [segment.handle for segment in found if segment is not None]
        # A thread that copied lets go a moment after others have the answer.
        eventually(lambda: not any(map(life.segment_memory.memory.is_read, handles)), "nobody reads the memory")
        del kept
    finally:
        gc.enable()


class Topologies:
    """The other shards: by this topology, and no more."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology


def moved_of(segment: SegmentId) -> MovedSegment:
    """Describe a segment of one small tensor that is in memory."""
    return MovedSegment(
        id=segment, sizes=(4,), offsets=(0,), allocated=64, generation=1, digests=None, stored=None, files=0
    )


def test_copies_of_a_try_that_a_planner_did_not_live_to_finish_are_let_go_with_those_of_the_next(
    tmp_path: Path,
) -> None:
    Archive(str(tmp_path), 1)
    successor = Life(tmp_path, again=False)
    peers = Topologies(Topology("tries", (0, 1, 10), "starter"))
    segment_handoff = SegmentHandoff(replace(successor.context, peers=cast("Any", peers)))
    tries = list[Drain]()
    for shard, segment in ((1, (1, 8)), (1, (1, 9)), (10, (10, 9))):
        peers.topology = peers.topology.warned((shard,))
        tries.append(Drain(shard, peers.topology.version + 1))
        segment_handoff.receive(moved_of(segment), COPY, tries[-1])
    moved = replace(moved_of((1, 9)), holders={ModelRef("m", 1): [0]})
    assert segment_handoff.inherit(tries[1], [moved]) == []
    assert (successor.state.drains(), successor.state.version_holders()) == ([tries[2]], [ModelRef("m", 1)])


def test_a_copy_that_comes_after_its_drain_was_given_up_is_refused(tmp_path: Path) -> None:
    """Nobody would let it go: the shard that sent it may have died."""
    Archive(str(tmp_path), 1)
    successor = Life(tmp_path, again=False)
    warned = Topology("late", (0, 1), "starter").warned((1,))
    peers = Topologies(warned)
    segment_handoff = SegmentHandoff(replace(successor.context, peers=cast("Any", peers)))
    copy = moved_of((1, 9))
    segment_handoff.receive(copy, COPY, Drain(1, 2))
    peers.topology = warned.warned(())
    segment_handoff.learned()
    with pytest.raises(MovedError, match="drain of shard 1 to topology 2 was cancelled"):
        segment_handoff.receive(copy, COPY, Drain(1, 2))
    peers.topology = peers.topology.warned((1,))
    with pytest.raises(MovedError):
        segment_handoff.receive(copy, COPY, Drain(1, 2))
    assert successor.state.drains() == []
    assert successor.state.segment(copy.id) is None


class TestAnSuccessorThatStartsAgainBeforeTheDrainIsDecided:
    """Shard 0 was told that it holds the segments of shard 1, and died."""

    before = Topology("successors", (0, 1), "starter")
    after = before.warned((1,)).shrunk((1,))

    def segment_handoff(self, life: Life) -> SegmentHandoff:
        return SegmentHandoff(replace(life.context, peers=cast("Any", Topologies(self.before))))

    def test_it_notices_what_it_missed(self, tmp_path: Path) -> None:
        Archive(str(tmp_path), 1)
        life = Life(tmp_path, again=True)
        segment_handoff = self.segment_handoff(life)
        assert segment_handoff.missed(self.before) == set()
        assert segment_handoff.missed(self.after) == {1}
        segment_handoff.inherit(Drain(1, 2), [])
        assert segment_handoff.missed(self.after) == set()

    def test_it_reads_what_it_was_handed_in_the_step_in_which_it_goes_by_the_new_topology(self, tmp_path: Path) -> None:
        archive, serial = Archive(str(tmp_path), 1), self.before.serial(1, 5)
        put(archive, (1, serial), {slot: np.full(1000, slot, np.uint8) for slot in range(2)})
        note(archive, ModelRef("m", 3), [(serial, slot, 1000) for slot in range(2)], maker=1)
        life = Life(tmp_path, again=True, topology=self.before, home=1)
        asked: list[list[ModelRef]] = []

        def learn() -> None:
            life.state.where = self.after.where

        life.history.recovery._take_over(lambda holders: asked.append(sorted(holders)), learn)
        # what homes let go meanwhile is noted; then they are asked what they name
        assert asked == [[], [ModelRef("m", 3)]]
        assert [content[0] for content in life.content_of((1, serial), range(2))] == [0, 1]
        assert life.state.is_holder(Reason.RESTORED)
        life.history.recovery._take_over(lambda holders: asked.append(sorted(holders)), learn)
        assert asked[2:] == [[], []]  # a second time changes nothing

    def test_it_knows_what_was_written_while_it_read(self, tmp_path: Path) -> None:
        """Its home told this shard of it while that went by the old topology, by which nothing of it was here."""
        archive = Archive(str(tmp_path), 1)
        early, late = self.before.serial(1, 5), self.before.serial(1, 6)
        for serial in (early, late):
            put(archive, (1, serial), {slot: np.full(1000, slot, np.uint8) for slot in range(2)})
        note(archive, ModelRef("m", 3), [(early, 0, 1000)], maker=1)
        life = Life(tmp_path, again=True, topology=self.before, home=1)

        def learn() -> None:
            note(archive, ModelRef("m", 4), [(early, 1, 1000), (late, 0, 1000)], maker=1)
            life.state.where = self.after.where

        life.history.recovery._take_over(lambda holders: None, learn)
        assert [content[0] for content in life.content_of((1, early), range(2))] == [0, 1]
        assert life.content_of((1, late), [0])[0][0] == 0
        assert life.state.held(ModelRef("m", 4)) == {(1, early): [1], (1, late): [0]}
