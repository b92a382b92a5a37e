"""How a shard reads what is on disk only into its memory: together, without loads that wait for each other."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.memory.workers import Workers
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import CorruptDataError, StoreFullError
from tensorvine.store.holders import Request
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.sizes import size

from tests.support.disklife import CAPACITY, MIB, Life, put
from tests.support.waiting import eventually

ONE, TWO, THREE, FOUR = ((0, serial) for serial in range(1, 5))
BYTES = {ONE: 3 * MIB, TWO: 7 * MIB // 2, THREE: 3 * MIB, FOUR: 3 * MIB}


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A shard of 8 MiB with four segments on disk: 3, 3.5, 3 and 3 MiB."""
    archive = Archive(str(tmp_path))
    for segment, nbytes in BYTES.items():
        put(archive, segment, {0: np.full(nbytes, segment[1], np.uint8)})
    return Life(tmp_path)


async def load(life: Life, *segments: SegmentId) -> list[np.ndarray]:
    return await life.history.loading.load("m", {segment: [0] for segment in segments}, life.room.taken)


def run(life: Life, *loads: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run loads at once, and what a shard does now and then meanwhile: it lets those who wait look again."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(0.01)
            life.context.notifier.tell_all()

    async def all_of_them() -> list[Any]:
        sweeping = asyncio.create_task(sweep())
        try:
            return await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), 60)
        finally:
            sweeping.cancel()

    return asyncio.run(all_of_them())


def parts(life: Life) -> list[Any]:
    """Return where those segments lie that are in memory."""
    with life.lock:
        found = [life.state.segment(segment) for segment in BYTES]
        return [segment.handle for segment in found if segment is not None and segment.handle is not None]


def here(life: Life, *segments: SegmentId) -> bool:
    """Say whether these segments are in memory, whole, with their bytes."""
    with life.lock:
        views = [life.segment_memory.view(found) for s in segments if (found := life.state.segment(s)) is not None]
        return all(v is not None and (v == s[1]).all() for s, v in zip(segments, views, strict=True))


class TestAdmission:
    def test_what_a_load_has_already_does_not_lie_in_its_own_way(self, life: Life) -> None:
        with life.lock:
            life.segment_memory.grant(Request("c", 1), [2 * MIB])
        run(life, load(life, ONE))
        with life.lock:
            life.segment_memory.drop_grants(Request("c", 1))
        # 2 MiB, the first segment, 3 MiB: the second needs 3.5
        (kept,) = run(life, load(life, ONE, TWO))
        assert len(kept) == 2
        assert here(life, ONE, TWO)

    def test_what_is_not_needed_leaves_before_that(self, life: Life) -> None:
        run(life, load(life, FOUR))
        run(life, load(life, ONE))
        with life.lock:
            place = life.state.segment(ONE)
            assert place is not None
            before = place.handle
        (kept,) = run(life, load(life, ONE, THREE))
        assert len(kept) == 2
        assert place.handle == before

    def test_loads_that_each_have_half_of_the_memory_do_not_wait_for_each_other(self, life: Life) -> None:
        """Either begins with what the other has not; neither could go on if it kept that while it waits."""

        async def both(*segments: SegmentId) -> bool:
            kept = await load(life, *segments)
            found = len(kept) == 2 and here(life, *segments)
            kept.clear()
            return found

        pairs = [(ONE, TWO), (THREE, FOUR), (TWO, THREE), (FOUR, ONE)] * 5
        assert run(life, *(both(*pair) for pair in pairs)) == [True] * 20
        assert life.segment_memory.bytes_filling == 0

    def test_what_never_fits_is_said_at_once(self, life: Life) -> None:
        (error,) = run(life, load(life, ONE, TWO, THREE))
        assert isinstance(error, StoreFullError)
        assert f"expected at most {size(CAPACITY)}," in str(error)

    def test_where_a_save_takes_the_rest_the_error_names_the_load(self, life: Life) -> None:
        with life.lock:
            life.segment_memory.grant(Request("c", 1), [3 * MIB])

        async def impatient() -> Any:
            taken = lambda *arguments: life.room.taken(*arguments, timeout=0.05)  # noqa: E731
            return await life.history.loading.load("m", {ONE: [0], TWO: [0]}, taken)

        (error,) = run(life, impatient())
        assert isinstance(error, StoreFullError)
        assert "load of m: expected room for 6.8 MB in shard 0" in str(error)
        assert life.segment_memory.bytes_filling == 3 * MIB
        with life.lock:
            life.segment_memory.drop_grants(Request("c", 1))
        run(life, load(life, ONE, TWO))
        assert here(life, ONE, TWO)


class TestOneReadingForAll:
    def test_what_is_read_already_is_waited_for(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[SegmentId] = []
        true = life.history._tiers.load

        def counted(segment: SegmentId, *arguments: Any) -> np.ndarray | None:
            read.append(segment)
            return true(segment, *arguments)

        monkeypatch.setattr(life.history._tiers, "load", counted)
        several = run(life, *(load(life, ONE, TWO) for _ in range(5)))
        assert [len(kept) for kept in several] == [2] * 5
        assert sorted(read) == [ONE, TWO]

    def test_they_all_hear_of_a_file_that_cannot_be_read(self, life: Life, tmp_path: Path) -> None:
        (file,) = tmp_path.glob("segments/*1.0.arrow")
        file.write_bytes(b"no segment")
        run(life, load(life, TWO))
        errors = run(life, *(load(life, ONE, TWO) for _ in range(3)))
        assert {type(error) for error in errors} == {CorruptDataError}
        assert life.segment_memory.bytes_filling == 0
        assert not life.history.loading._loading

    def test_one_that_wants_other_tensors_of_a_file_does_not_hear_of_it(
        self, life: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on = threading.Event(), threading.Event()
        true = life.history._tiers.load

        def failing_once(*arguments: Any) -> np.ndarray | None:
            if begun.is_set():
                return true(*arguments)
            begun.set()
            assert go_on.wait(60)
            life.segment_memory.give_back(arguments[2], arguments[3])
            raise CorruptDataError("slot 0")

        monkeypatch.setattr(life.history._tiers, "load", failing_once)

        async def second() -> list[np.ndarray]:
            assert await asyncio.to_thread(begun.wait, 60)
            asyncio.get_running_loop().call_soon(go_on.set)
            return await load(life, ONE)

        error, kept = run(life, load(life, ONE), second())
        assert isinstance(error, CorruptDataError)
        assert len(kept) == 1
        assert here(life, ONE)

    def test_an_error_that_is_kept_keeps_no_memory(
        self, life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (file,) = tmp_path.glob("segments/*1.0.arrow")
        file.write_bytes(b"no segment")
        captured = threading.Event()
        true = life.history._tiers.load

        def three_first(segment: SegmentId, *arguments: Any) -> np.ndarray | None:
            """Have the segment that cannot be read fail when the other's view is there."""
            with life.lock:
                three = life.history.loading._loading.get(THREE)
            if segment == ONE and three is not None:
                captured.set()
                wait([three], 60)
            elif segment == THREE:
                assert captured.wait(60)
            return true(segment, *arguments)

        monkeypatch.setattr(life.history._tiers, "load", three_first)
        run(life, load(life, TWO))
        gc.collect()
        gc.disable()
        try:
            errors = [run(life, load(life, ONE, other))[0] for other in (TWO, THREE)]
            assert {type(error) for error in errors} == {CorruptDataError}
            # A thread that read lets go a moment after others have the answer.
            eventually(
                lambda: not any(map(life.segment_memory.memory.is_read, parts(life))),
                "nobody reads the memory",
            )
        finally:
            gc.enable()

    def test_one_that_is_given_up_takes_nothing_with_it(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, go_on = threading.Event(), threading.Event()
        true = life.history._tiers.load

        def slow(*arguments: Any) -> np.ndarray | None:
            begun.set()
            assert go_on.wait(60)
            return true(*arguments)

        monkeypatch.setattr(life.history._tiers, "load", slow)
        monkeypatch.setattr(life.history.loading, "_workers", Workers(1))

        async def given_up() -> int:
            loads = [asyncio.create_task(load(life, ONE, TWO)) for _ in range(2)]
            assert await asyncio.to_thread(begun.wait, 60)
            loads[0].cancel()  # its second segment waits for a thread
            await asyncio.wait(loads[:1])
            go_on.set()
            return len(await loads[1])

        assert run(life, given_up()) == [2]
        assert here(life, ONE, TWO)
        assert life.segment_memory.bytes_filling == 0


class TestReadings:
    def test_what_was_read_from_disk_is_the_segment_s_before_others_can_push_it_out(
        self, life: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        true = life.history._tiers.load

        def pushed_out(*arguments: Any) -> np.ndarray | None:
            """Have another save need the room just when the thread that reads is done."""
            view = true(*arguments)
            with life.lock:
                assert life.state.residents.evict(ONE)
                life.segment_memory.settle()
                assert life.segment_memory.grant(Request("c", 1), [MIB])
            return view

        monkeypatch.setattr(life.history._tiers, "load", pushed_out)
        ((view,),) = run(life, load(life, ONE))
        assert (view == 1).all()
        assert life.segment_memory.bytes_filling == MIB  # the other save's, still its own

    def test_others_cannot_push_it_out_before_it_is_kept(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        true = life.history._tiers.load

        def crowded(*arguments: Any) -> np.ndarray | None:
            view = true(*arguments)
            with life.lock:
                assert not life.segment_memory.grant(Request("c", 1), [CAPACITY - MIB])
            return view

        monkeypatch.setattr(life.history._tiers, "load", crowded)
        (kept,) = run(life, load(life, ONE))
        assert len(kept) == 1
        assert here(life, ONE)
