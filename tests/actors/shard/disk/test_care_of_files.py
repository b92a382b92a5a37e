"""Who writes, replaces and deletes a segment's files while a shard hands its segments over: one shard at any time.

The file that a successor knows must stay as it is until the successor itself replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import Chains, ToStore, Wanted
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import MovedError
from tensorvine.store.holders import Drain
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import Stored
from tensorvine.store.versions.segments import SegmentTable

from tests.support.disklife import Life, note, put

SEGMENT = (0, 1)
SMALL = 1000
HEIR = 1


def tensors(*slots: int) -> list[Wanted]:
    return [Wanted(slot, f"t1.{slot}", None, "uint8", (SMALL,), None) for slot in slots]


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A shard with one segment of four slots: three on disk, of which m@2 needs one, and all four in memory."""
    archive = Archive(str(tmp_path), 1)
    put(archive, SEGMENT, {slot: np.full(SMALL, slot, np.uint8) for slot in range(3)})
    note(archive, ModelRef("m", 1), [(1, slot, SMALL) for slot in range(3)])
    note(archive, ModelRef("m", 2), [(1, 0, SMALL)])
    return Life(tmp_path, again=False)


def files(life: Life) -> list[str]:
    life.history.persister._deleter.submit(int).result(60)  # what was to be deleted is
    return sorted(file.name for found in life.history._archive.segments().values() for file in found)


def stored(life: Life) -> Stored:
    found = life.state.segment(SEGMENT)
    assert found is not None
    assert found.stored is not None
    return found.stored


def hand_over(life: Life) -> None:
    """What a drain does in the step in which it notes who holds what."""
    with life.lock:
        life.state.where = lambda segment: HEIR


def while_written(life: Life, happens: Callable[[Life], None]) -> None:
    """Have something happen once, between a file's coming to the disk and its being taken note of."""
    write: Any = life.history._archive.write_segment

    def written(*arguments: Any) -> Any:
        file = write(*arguments)
        life.history._archive.write_segment = write
        happens(life)
        return file

    cast("Any", life.history._archive).write_segment = written


class TestTheShardThatDrains:
    def test_a_file_rewritten_while_its_segment_is_handed_over_is_dead_and_the_one_before_stays(
        self, life: Life
    ) -> None:
        before = stored(life)
        with life.lock:
            life.state.release(ModelRef("m", 1))  # two of three slots are dead
        while_written(life, hand_over)
        life.history._tiers.rewrite(SEGMENT)
        with life.lock:
            life.history.tidy()
        assert stored(life) == before
        assert files(life) == [before.name]

    def test_nothing_is_rewritten_after_it(self, life: Life) -> None:
        before = stored(life)
        hand_over(life)
        with life.lock:
            life.state.release(ModelRef("m", 1))
            assert life.state.rewritable == set()
        life.history._tiers.rewrite(SEGMENT)
        assert files(life) == [before.name]

    def test_what_goes_after_it_leaves_the_file_to_the_successor(self, life: Life) -> None:
        hand_over(life)
        with life.lock:
            life.state.release(ModelRef("m", 1))
            life.state.release(ModelRef("m", 2))
            assert life.state.segment(SEGMENT) is None
            assert life.state.dead_files == []

    def test_one_that_started_again_while_it_drains_writes_none(self, life: Life) -> None:
        life.state.writes_files = False  # its earlier life may have handed over
        with pytest.raises(MovedError, match="expected to write files"):
            life.history._tiers._write(SEGMENT, [])
        assert len(files(life)) == 1

    def test_a_version_that_waits_for_such_a_file_has_the_successor_write_it(
        self, life: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The successor does not write what it does not hold yet: it is asked again."""
        monkeypatch.setattr("tensorvine.actors.shard.disk.history.STORE_PAUSE_S", 0.01)
        asked: list[tuple[int, str, ToStore]] = []
        chains: Chains = {(SEGMENT, 0): ()}

        def call(shard: int, request: Request[Any], timeout: float) -> Chains:
            asked.append((shard, request.remote.name, *request.arguments))
            if len(asked) < 3:
                raise MovedError("the successor has not learned the new topology", 0)
            return chains

        cast("Any", life.peers).call = call
        wanted = {SEGMENT: tensors(0)}
        with life.lock:
            life.state.release(ModelRef("m", 1))
            segment = life.state.segment(SEGMENT)
            assert segment is not None
            segment.stored = None  # so that it must be written
        hand_over(life)
        assert life.history._store(0, wanted) == chains
        assert asked == [(HEIR, "store", wanted)] * 3


class TestTheSuccessor:
    def test_it_writes_what_it_received_when_it_goes_by_the_new_topology(self) -> None:
        giver, successor = SegmentTable(0), SegmentTable(HEIR)
        successor.where = lambda segment: 0
        giver.recover(SEGMENT, [4, 4], Stored("a.0", 0, 8, frozenset({0, 1})))
        giver.hold(ModelRef("m", 1), {SEGMENT: [0, 1]})
        moved = giver.moving(SEGMENT)
        successor.receive(moved, b"", Drain(0, 2))
        with pytest.raises(MovedError):  # its first file would be a.0, too, with less in it
            successor.check_care(SEGMENT)
        successor.inherit(moved, Drain(0, 2))
        with pytest.raises(MovedError):
            successor.check_care(SEGMENT)
        successor.where = lambda segment: HEIR
        successor.check_care(SEGMENT)
        fresh = successor.segment(SEGMENT)
        assert fresh is not None
        assert successor.store(SEGMENT, Stored("a.1", fresh.files, 8, frozenset({0, 1})))
        assert successor.dead_files == ["a.0"]
        giver.where = lambda segment: HEIR
        with pytest.raises(MovedError):
            giver.store(SEGMENT, Stored("a.9", 9, 8, frozenset({0, 1})))
        assert giver.dead_files == ["a.9"]


def test_two_who_write_at_once_do_not_meet_in_one_file(life: Life) -> None:
    """Of a segment that is written when it is handed over, the successor's next file has another name."""
    seen: list[int] = []

    def take_over(life: Life) -> None:
        successor = SegmentTable(HEIR)
        successor.inherit(life.state.moving(SEGMENT), Drain(0, 2))
        found = successor.segment(SEGMENT)
        assert found is not None
        seen.append(found.files)
        hand_over(life)

    with life.lock:
        life.state.release(ModelRef("m", 1))
    while_written(life, take_over)
    thread = threading.Thread(target=life.history._tiers.rewrite, args=(SEGMENT,))
    thread.start()
    thread.join(60)
    written = [file.generation for found in life.history._archive.segments().values() for file in found]
    assert written == [0, 1] or written == [1, 0]
    assert seen[0] > 2
