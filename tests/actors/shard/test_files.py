"""The files of a shard's segments: when they are written, what counts, and what comes back. A real path, no Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.rpc.catalog_messages import Committed, Proposal, Refused
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.disk import persister as persister_module
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.store.archive import local
from tensorvine.store.catalog.orders import Cool, Discard, Free, Inspect, Leave, Take, Yield
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    OperationTimeoutError,
    ShardUnavailableError,
    StorageError,
)
from tensorvine.store.segments.segment import SegmentId

from tests.support.shard_room import Room, disk_at, room
from tests.support.waiting import eventually

LARGE = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Room]:
    with room() as made:
        made.start(disk=disk_at(tmp_path))
        yield made


def saved(one: Room, number: int, *contents: bytes, **named: Any) -> SegmentId:
    handed = one.save(number, *contents, **named)
    assert isinstance(one.call(ShardCalls.commit(handed)), Committed)
    return handed.blocks[0].id


def written(one: Room, segment: SegmentId) -> None:
    one.catalog.until(lambda: segment in one.catalog.stored)
    eventually(lambda: one.state().segment(segment).is_safe, "the file to count")


def files(path: Path) -> list[str]:
    return sorted(f"segments/{file.name}" for file in (path / "segments").glob("*.arrow"))


def cold(one: Room, segment: SegmentId, first: int = 1) -> None:
    """Have a segment leave the memory."""
    one.order(Cool((segment,)), first=first)
    eventually(lambda: one.state().segment(segment).handle is None, "the segment to leave the memory")


@pytest.mark.parametrize("contents", [(b"few", b""), (LARGE, LARGE[::-1])], ids=["few", "many"])
def test_what_was_written_comes_back(one: Room, contents: tuple[bytes, bytes], tmp_path: Path) -> None:
    segment = saved(one, 1, *contents)
    written(one, segment)
    cold(one, segment)
    assert one.call(ShardCalls.stats()).bytes_memory == 0
    assert one.content(segment, [1, 0]) == [contents[1], contents[0]]
    assert one.call(ShardCalls.check_tensors({segment: {0: "t0", 1: "t1"}})) == []
    assert [file.name for file in one.catalog.stored.values()] == files(tmp_path)


def test_the_memory_stays_until_the_catalog_knows_the_file(one: Room) -> None:
    one.catalog.reachable = False
    segment = one.segment()
    state = one.state()
    handed = one.handed(1, [one.filled(1, segment, [LARGE], one.save(9, LARGE).blocks[0].labels)])
    late = one.send(ShardCalls.commit(handed))
    one.catalog.reachable = True
    late.result(60.0)
    one.catalog.reachable = False
    one.order(Cool((segment,)))
    eventually(lambda: state.is_offered(segment) or state.segment(segment).is_safe, "the file to be written")
    if state.is_offered(segment):
        assert state.segment(segment).handle is not None
    one.catalog.reachable = True
    eventually(lambda: state.segment(segment).handle is None, "the segment to leave the memory")


def test_what_is_freed_leaves_the_path(one: Room, tmp_path: Path) -> None:
    segment, other = saved(one, 1, LARGE), saved(one, 2, LARGE)
    written(one, segment)
    written(one, other)
    one.order(Free({segment: (0,)}))
    eventually(lambda: files(tmp_path) == [one.catalog.stored[other].name], "the file to go")


def test_a_file_that_is_mostly_dead_is_written_anew(one: Room, tmp_path: Path) -> None:
    segment = saved(one, 1, b"few", LARGE, b"other")
    written(one, segment)
    first = one.catalog.stored[segment]
    cold(one, segment)
    one.order(Free({segment: (1,)}), first=2)
    eventually(lambda: one.catalog.stored[segment].name != first.name, "a new file")
    assert one.catalog.stored[segment].slots == {0, 2}
    eventually(lambda: files(tmp_path) == [one.catalog.stored[segment].name], "the former file to go")
    assert one.content(segment, [0, 2]) == [b"few", b"other"]
    with pytest.raises(ModelLostError, match="not here"):
        one.call(ShardCalls.blocks({segment: [1]}))


class TestDurable:
    def test_its_files_are_reported_while_the_proposal_waits(self, one: Room) -> None:
        def when_stored(proposal: Proposal) -> Committed | Refused | None:
            done = one.catalog.stored.keys() >= proposal.staged.keys()
            return one.catalog.commits(proposal) if done else None

        one.catalog.answers = when_stored
        segment = saved(one, 1, LARGE, durable=True)
        assert one.state().segment(segment).is_safe

    def test_a_report_that_came_before_the_proposal_is_made_up_for(self, one: Room) -> None:
        one.catalog.open.clear()
        handed = one.save(1, LARGE, durable=True)
        segment = handed.blocks[0].id
        one.catalog.refuses.add(segment)
        late = one.send(ShardCalls.commit(handed))
        one.catalog.until(lambda: any(segment in report.stored for report in one.catalog.reports))
        one.catalog.refuses.clear()
        one.catalog.until(lambda: segment in one.catalog.stored)
        one.catalog.open.set()
        assert isinstance(late.result(60.0), Committed)

    def test_one_that_comes_to_nothing_leaves_no_file(self, one: Room, tmp_path: Path) -> None:
        one.catalog.answers = lambda proposal: Refused("slots", "gone")
        handed = one.save(1, LARGE, durable=True)
        one.call(ShardCalls.commit(handed))
        eventually(lambda: handed.blocks[0].id in one.catalog.stored, "the file")
        one.call(ShardCalls.abort(handed.draft.save))
        eventually(lambda: files(tmp_path) == [], "the file to go")

    def test_it_needs_a_path(self) -> None:
        with room() as without:
            without.start()
            with pytest.raises(StorageError, match="path="):
                without.call(ShardCalls.commit(without.save(1, LARGE, durable=True)))


class TestTrouble:
    """The disk fails, or does not answer."""

    @pytest.fixture
    def refusing(self, one: Room, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """While it is set, no file can be written."""
        refuses = threading.Event()
        refuses.set()
        write = local.LocalDirectory.write

        def fails(self: Any, name: str, fill: Any) -> int:
            if refuses.is_set() and name.startswith("segments/"):
                raise StorageError(f"{name}: the disk is full")
            return write(self, name, fill)

        monkeypatch.setattr(local.LocalDirectory, "write", fails)
        monkeypatch.setattr(persister_module, "RETRY_LAST_S", 0.05)
        return refuses

    def test_saves_go_on_and_the_catalog_hears_why_no_file_comes(self, one: Room, refusing: threading.Event) -> None:
        segments = [saved(one, number, LARGE) for number in (1, 2, 3)]
        report = one.catalog.until(lambda: next((r for r in reversed(one.catalog.reports) if r.failing), None))
        assert "the disk is full" in next(iter(report.failing.values()))
        assert one.content(segments[2], [0]) == [LARGE]
        refusing.clear()
        for segment in segments:
            written(one, segment)
        assert not one.state().failing
        assert one.call(ShardCalls.stats()).bytes_unwritten == 0

    def test_savers_wait_when_too_much_waits(self, tmp_path: Path, refusing: threading.Event) -> None:
        with room() as full:
            full.start(disk=disk_at(tmp_path / "full", unwritten=50_000))
            saved(full, 1, LARGE)
            eventually(lambda: full.part(Writes)._history.persister.is_full(), "the queue to be full")
            with pytest.raises((StorageError, OperationTimeoutError), match="written to disk"):
                full.call(ShardCalls.commit(full.save(2, LARGE, timeout=0.1)))
            waits = full.send(ShardCalls.commit(full.save(3, LARGE)))
            refusing.clear()
            assert isinstance(waits.result(60.0), Committed)

    def test_a_disk_that_hangs_holds_up_no_save_in_memory(self, one: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        hangs, goes_on = threading.Event(), threading.Event()
        write = local.LocalDirectory.write

        def slow(self: Any, name: str, fill: Any) -> int:
            if name.startswith("segments/"):
                hangs.set()
                goes_on.wait(60.0)
            return write(self, name, fill)

        monkeypatch.setattr(local.LocalDirectory, "write", slow)
        first = saved(one, 1, LARGE)
        assert hangs.wait(60.0)
        segments = [first, *(saved(one, number, LARGE) for number in range(2, 10))]
        assert [one.content(segment, [0]) for segment in segments] == [[LARGE]] * len(segments)
        one.order(Free({first: (0,)}))
        goes_on.set()
        for segment in segments[1:]:
            written(one, segment)

    def test_nothing_is_written_without_a_lease_or_after_the_shard_left(self, one: Room, tmp_path: Path) -> None:
        saved(one, 1, b"few")
        one.order(Leave())
        history = one.part(Writes)._history
        with pytest.raises(ShardUnavailableError, match="drained"):
            history._archive.directory.delete("segments/1.0.arrow")
        one.call(ShardCalls.end())
        with pytest.raises(ShardUnavailableError, match="stopped"):
            history._archive.directory.delete("segments/1.0.arrow")


class TestTakenOver:
    """Files that the catalog gives to a shard, or another one."""

    def test_a_shard_that_starts_again_opens_them_when_they_are_needed(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, b"few", LARGE)
        written(one, segment)
        one.start(disk=one.part(Writes)._context.config.disk)
        one.order(Take({segment: one.catalog.stored[segment]}))
        assert one.state().segment(segment) is None
        assert one.call(ShardCalls.stats()).bytes_disk > 0
        assert one.call(ShardCalls.blocks({segment: [0]}))
        assert one.content(segment, [0, 1]) == [b"few", LARGE]
        assert one.call(ShardCalls.digests([segment]))[segment][0]

    def test_one_that_is_freed_before_anybody_opens_it_goes(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, LARGE, b"few")
        written(one, segment)
        one.start(disk=one.part(Writes)._context.config.disk)
        one.order(Take({segment: one.catalog.stored[segment]}), Free({segment: (0,)}))
        assert one.state().known_files[segment].slots == {1}
        one.order(Free({segment: (1,)}), first=3)
        eventually(lambda: files(tmp_path) == [], "the file to go")

    def test_one_that_is_not_there_is_lost_and_reported(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, LARGE)
        written(one, segment)
        file = one.catalog.stored[segment]
        one.start(disk=one.part(Writes)._context.config.disk)
        (tmp_path / file.name).unlink()
        one.order(Take({segment: file}))
        with pytest.raises(ModelLostError, match="it is not there"):
            one.call(ShardCalls.blocks({segment: [0]}))
        one.catalog.until(lambda: one.catalog.reports[-1].lost == {segment: (0,)})

    def test_a_damaged_one_is_named_and_no_new_version_may_name_it(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, LARGE)
        written(one, segment)
        file = one.catalog.stored[segment]
        one.start(disk=one.part(Writes)._context.config.disk)
        (tmp_path / file.name).write_bytes(b"damaged" * 100)
        one.order(Take({segment: file}))
        with pytest.raises(CorruptDataError, match=Path(file.name).name):
            one.call(ShardCalls.blocks({segment: [0]}))
        with pytest.raises(CorruptDataError, match=Path(file.name).name):
            one.call(ShardCalls.commit(one.handed(5, [], names={segment: [0]})))

    def test_one_that_was_never_reported_is_inspected_and_reported(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, b"few", LARGE)
        written(one, segment)
        file = one.catalog.stored.pop(segment)
        one.start(disk=one.part(Writes)._context.config.disk)
        missing = one.segment()
        one.order(Inspect({segment: file.name, missing: f"segments/{missing[1]:x}.7.arrow"}))
        one.catalog.until(lambda: segment in one.catalog.stored)
        one.catalog.until(lambda: any(report.lost == {missing: ()} for report in one.catalog.reports))
        assert one.catalog.stored[segment] == file
        assert one.content(segment, [1]) == [LARGE]

    def test_one_that_another_shard_keeps_from_now_on_stays(self, one: Room, tmp_path: Path) -> None:
        segment, other = saved(one, 1, LARGE), saved(one, 2, LARGE)
        written(one, segment)
        written(one, other)
        cold(one, other)
        one.order(Yield((segment, other)), first=2)
        assert one.state().segment(other) is None
        assert one.content(segment, [0]) == [LARGE]
        one.order(Free({segment: (0,), other: (0,)}), first=3)
        third = saved(one, 3, LARGE)
        written(one, third)
        one.order(Free({third: (0,)}), first=4)
        kept = sorted(one.catalog.stored[each].name for each in (segment, other))
        eventually(lambda: files(tmp_path) == kept, "the file that is its own to go")

    def test_files_that_nobody_needs_are_discarded_and_its_own_are_not(self, one: Room, tmp_path: Path) -> None:
        segment = saved(one, 1, LARGE)
        written(one, segment)
        own, stray = one.catalog.stored[segment].name, "segments/abc.5.arrow"
        (tmp_path / stray).write_bytes(b"")
        one.order(Discard((own, stray)))
        eventually(lambda: files(tmp_path) == [own], "the stray file to go")


class TestDeltas:
    @pytest.fixture
    def one(self, tmp_path: Path) -> Iterator[Room]:
        with room() as made:
            made.start(disk=disk_at(tmp_path, codec="delta|zstd"))
            yield made

    def changed(self, content: bytes, at: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    def test_a_tensor_is_encoded_against_its_parent_s_and_comes_back(self, one: Room) -> None:
        contents, base = [LARGE], None
        segments: list[SegmentId] = []
        for number in range(1, 12):
            segments.append(saved(one, number, contents[-1], base=base))
            written(one, segments[-1])
            base = segments[-1]
            contents.append(self.changed(contents[-1], number))
        bases = [one.catalog.stored[segment].bases for segment in segments]
        assert not bases[0]
        assert bases[1] == {0: (segments[0], 0)}
        assert any(not each for each in bases[2:])  # no chain is longer than what a reader follows
        for first, segment in enumerate(segments, 1):
            cold(one, segment, first)
        assert [one.content(segment, [0])[0] for segment in segments] == contents[: len(segments)]

    def test_a_file_that_is_refused_is_written_without_bases(self, one: Room) -> None:
        first = saved(one, 1, LARGE)
        written(one, first)
        handed = one.save(2, self.changed(LARGE, 5), base=first)
        segment = handed.blocks[0].id
        one.catalog.refuses.add(segment)
        one.call(ShardCalls.commit(handed))
        report = one.catalog.until(lambda: next((r for r in one.catalog.reports if segment in r.stored), None))
        assert report.stored[segment].bases
        one.catalog.refuses.clear()
        one.catalog.until(lambda: segment in one.catalog.stored)
        assert not one.catalog.stored[segment].bases

    def test_a_base_in_a_file_of_another_shard_is_read(self, one: Room) -> None:
        first = saved(one, 1, LARGE)
        written(one, first)
        second = saved(one, 2, self.changed(LARGE, 5), base=first)
        written(one, second)
        assert one.catalog.stored[second].bases
        one.start(disk=one.part(Writes)._context.config.disk)
        one.order(Take({second: one.catalog.stored[second]}))
        assert one.content(second, [0]) == [self.changed(LARGE, 5)]
