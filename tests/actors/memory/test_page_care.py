"""Pages of a shard's memory that are made ahead, and those that go back: on real memory."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tensorvine.actors.memory import locks as locks_module
from tensorvine.actors.memory import memory as memory_module
from tensorvine.actors.memory import page_care as page_care_module
from tensorvine.actors.memory import pages as pages_module
from tensorvine.actors.memory.memory import MemoryView
from tensorvine.actors.memory.pages import CHUNK_BYTES
from tensorvine.actors.rpc.messages import Filled
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.store.errors import StoreFullError
from tensorvine.store.holders import Request
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import header_of
from tensorvine.store.segments.page_plan import IDLE_S
from tensorvine.store.shard import ShardState

CAPACITY = 24 * CHUNK_BYTES


class Life:
    """A shard's memory, at a time of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, touch: int = 0) -> None:
        self.now = 1000.0
        monkeypatch.setattr(page_care_module.time, "monotonic", lambda: self.now)
        self.state = ShardState(0, 1)
        self.held = SegmentMemory(self.state, threading.RLock(), CAPACITY, touch)
        self.memory, self.care = self.held.memory, self.held.page_care
        self.serial = 0

    def view(self) -> MemoryView:
        return MemoryView(os.getpid(), self.memory.fd, self.memory.file, CAPACITY)

    def grant(self, nbytes: int) -> tuple[Request, Part]:
        self.serial += 1
        save = Request("c", self.serial)
        (offset,) = self.held.grant(save, [nbytes])
        return save, Part(offset, nbytes)

    def saved(self, nbytes: int, value: int, view: MemoryView | None = None) -> tuple[Request, Part]:
        save, part = self.grant(nbytes)
        (view or self.memory).part(part)[:] = value
        self.held.adopt(save, os.getpid(), [Filled((0, self.serial), part, (nbytes,))])
        return save, part

    def retire(self, save: Request) -> None:
        self.state.drop(save)
        self.held.settle()

    def wait(self, seconds: float) -> None:
        """Let time pass as the ticker sees it: it looked before, and looks then."""
        self.care.look()
        self.now += seconds
        self.care.look()
        self.care.look()


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


class TestGivingBack:
    """Pages that nobody needs go back."""

    def test_what_is_free_for_long_goes_and_what_is_kept_stays(self, life: Life) -> None:
        kept, there = life.saved(2 * CHUNK_BYTES, 7)
        gone = [life.saved(4 * CHUNK_BYTES, 9)[0] for _ in range(4)]
        full = life.memory.bytes_resident
        for save in gone:
            life.retire(save)
        life.care.look()
        assert life.memory.bytes_resident >= full
        life.wait(IDLE_S)
        assert life.memory.bytes_resident < 8 * CHUNK_BYTES
        assert (life.memory.part(there) == 7).all()
        life.retire(kept)

    def test_what_was_preallocated_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        life = Life(monkeypatch, touch=CAPACITY)
        life.wait(10 * IDLE_S)
        assert life.memory.bytes_resident >= CAPACITY

    def test_a_reader_of_a_version_that_is_retired_keeps_its_bytes(self, life: Life) -> None:
        save, part = life.saved(3 * CHUNK_BYTES, 5)
        segment = life.state.segment((0, 1))
        assert segment is not None
        found = life.view().read(part, header_of(segment.id, segment.generation))
        assert found is not None
        life.retire(save)
        life.wait(1000.0)
        assert (found == 5).all()
        del found, segment
        life.held.settle()
        life.wait(1000.0)
        assert life.memory.bytes_resident < CHUNK_BYTES

    def test_a_grant_of_all_there_is_waits_for_what_just_goes(
        self, life: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save, _ = life.saved(10 * CHUNK_BYTES, 5)
        life.retire(save)
        true: Callable[[int, int], None] = life.memory.punch
        granted: list[Part] = []
        with ThreadPoolExecutor(1) as other:
            asked = []

            def punch(start: int, end: int) -> None:
                if not asked:
                    asked.append(other.submit(lambda: granted.append(life.grant(CAPACITY)[1])))
                true(start, end)

            monkeypatch.setattr(life.memory, "punch", punch)
            life.wait(1000.0)
            asked[0].result(60)
        assert granted[0].length == CAPACITY
        assert life.held.bytes_filling == CAPACITY

    @pytest.mark.parametrize("ends", [True, False], ids=["one-that-ends", "one-that-takes-long"])
    def test_what_goes_waits_for_saves_that_end_soon(
        self, life: Life, monkeypatch: pytest.MonkeyPatch, ends: bool
    ) -> None:
        gone = [life.saved(4 * CHUNK_BYTES, 9)[0] for _ in range(4)]
        save, part = life.grant(CHUNK_BYTES)
        for each in gone:
            life.retire(each)
        life.care.look()
        waits, during = list[float](), list[bool]()

        def waited(seconds: float) -> None:
            waits.append(seconds)
            if ends and len(waits) == 3:
                life.held.adopt(save, os.getpid(), [Filled((0, life.serial), part, (part.length,))])

        def noted(start: int, end: int) -> None:
            during.append(life.care._arena.saving)
            punch(start, end)

        punch = life.memory.punch
        monkeypatch.setattr(page_care_module.time, "sleep", waited)
        monkeypatch.setattr(life.memory, "punch", noted)
        full = life.memory.bytes_resident
        life.now += IDLE_S
        life.care.look()
        life.care.look()
        assert during == [not ends] * len(during)
        assert life.memory.bytes_resident < full
        assert len(waits) == (3 if ends else page_care_module.WAY_LOOKS * len(during))

    def test_a_system_that_takes_none_back_is_asked_once(
        self, life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def punch(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(memory_module, "punch", punch)
        for _ in range(2):
            life.retire(life.saved(10 * CHUNK_BYTES, 5)[0])
            life.wait(1000.0)
        assert caplog.text.count("Operation not supported") == 1
        assert life.grant(CAPACITY)[1].length == CAPACITY

    def test_contents_stay_whatever_happens_at_random(self, life: Life) -> None:
        drawn = random.Random(5)  # noqa: S311 - a test's choices
        view, there = life.view(), dict[Request, tuple[Part, int]]()
        for step in range(120):
            if there and (drawn.random() < 0.5 or len(there) > 6):
                life.retire(save := drawn.choice(list(there)))
                del there[save]
            else:
                save, part = life.saved(drawn.randrange(64 << 10, 3 * CHUNK_BYTES), step, view)
                there[save] = part, step
            if drawn.random() < 0.4:
                life.wait(drawn.choice((1.0, IDLE_S, 700.0)))
            for part, value in there.values():
                found = life.memory.part(part)
                assert found[0] == found[-1] == found[found.size // 2] == value
        for part, value in there.values():
            assert (life.memory.part(part) == value).all()


class TestClients:
    """What clients know of pages."""

    def test_pages_that_went_are_made_anew_and_not_written_to_one_by_one(
        self, life: Life, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        view = life.view()
        save, part = life.saved(10 * CHUNK_BYTES, 5, view)
        life.retire(save)
        life.wait(1000.0)
        _, again = life.grant(part.length)
        assert again == part
        with monkeypatch.context() as patch:
            patch.setattr(pages_module, "_advise", lambda start, length: errno.ENOMEM)
            with pytest.raises(StoreFullError, match="the system refused"):
                view.part(again)
        view.part(again)
        assert life.memory.bytes_resident >= part.length

    @pytest.mark.parametrize("who", ["client", "shard"])
    def test_pages_that_are_made_while_they_go_do_not_count_as_made(
        self, life: Life, monkeypatch: pytest.MonkeyPatch, who: str
    ) -> None:
        """A helper may go on making pages of a part that was given back meanwhile."""
        maker = life.view()._pages if who == "client" else life.memory._pages
        life.retire(life.saved(10 * CHUNK_BYTES, 5)[0])
        true, made = memory_module.punch, list[tuple[int, int]]()

        def punch(fd: int, offset: int, length: int) -> None:
            start = offset - locks_module.PAGE_BYTES
            maker.make(start, start + length)
            made.append((start, start + length))
            true(fd, offset, length)

        monkeypatch.setattr(memory_module, "punch", punch)
        life.wait(1000.0)
        assert made
        assert all(maker.unmade(start, start + CHUNK_BYTES) for start, _ in made)

    def test_pages_that_went_elsewhere_leave_what_is_mapped(self, life: Life) -> None:
        view = life.view()
        _, low = life.saved(4 * CHUNK_BYTES, 5, view)
        high, part = life.saved(8 * CHUNK_BYTES, 6, view)
        life.retire(high)
        life.wait(1000.0)
        assert view._pages.unmade(part.offset + 2 * CHUNK_BYTES, part.offset + part.length)
        assert not view._pages.unmade(low.offset, low.offset + 2 * CHUNK_BYTES)

    def test_a_forked_child_makes_them_anew_as_well(self, life: Life) -> None:
        view = life.view()
        save, part = life.saved(4 * CHUNK_BYTES, 5, view)
        child = os.fork()
        if child == 0:  # it has the parent's mapping, and finds on the page what happens later
            try:
                os._exit(0 if not view._pages.unmade(part.offset, part.offset + 1) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        life.retire(save)
        life.wait(1000.0)
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if view._pages.unmade(part.offset, part.offset + 1) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0

    def test_what_is_ahead_is_mapped_once_and_no_pages_are_made_for_it(self, life: Life) -> None:
        view = life.view()
        assert not view.map_ahead()
        life.saved(12 * CHUNK_BYTES, 5, view)
        assert not view.map_ahead()
        life.care.look()
        resident = life.memory.bytes_resident
        assert resident >= 23 * CHUNK_BYTES
        assert view.map_ahead()
        while view.map_ahead():
            pass
        assert life.memory.bytes_resident == resident
        _, part = life.grant(11 * CHUNK_BYTES)
        assert not view._pages.unmade(part.offset, part.offset + part.length)

    def test_half_of_many_pages_is_made_by_a_helper(self, life: Life) -> None:
        _, part = life.grant(8 * CHUNK_BYTES)
        with ThreadPoolExecutor(1) as helper:
            life.view().part(part, helper)[:] = np.uint8(3)
        assert (life.memory.part(part) == 3).all()


class TestAhead:
    """Pages are made before they are needed."""

    def test_as_many_as_the_largest_save_took_when_none_is_under_way(self, life: Life) -> None:
        save, part = life.grant(5 * CHUNK_BYTES)
        life.care.look()
        assert life.memory.bytes_resident <= 4096 + CHUNK_BYTES
        life.held.adopt(save, os.getpid(), [Filled((0, 1), part, (part.length,))])
        life.care.look()
        assert 5 * CHUNK_BYTES <= life.memory.bytes_resident <= 8 * CHUNK_BYTES

    def test_none_where_the_machine_is_short(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(page_care_module, "SPARE_SHARE", 2.0)
        before = life.memory.bytes_resident
        save, part = life.grant(5 * CHUNK_BYTES)
        life.held.adopt(save, os.getpid(), [Filled((0, 1), part, (part.length,))])
        life.care.look()
        assert life.memory.bytes_resident <= before + 4096

    def test_a_look_is_asked_for_by_a_chunk_that_was_saved_and_by_who_comes_after_long(self, life: Life) -> None:
        asked: list[float] = []
        life.care.soon = lambda: asked.append(life.now)
        for nbytes, looks in ((1024, 0), (CHUNK_BYTES - 1025, 0), (1, 1), (CHUNK_BYTES - 1, 1), (3 * CHUNK_BYTES, 2)):
            life.care.filled(nbytes)
            assert len(asked) == looks
        life.care.came()
        assert len(asked) == 3
        life.care.came()
        assert len(asked) == 3

    def test_a_client_that_comes_has_all_of_it_made_again(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorvine.store.segments.page_plan.IDLE_BYTES", 2 * CHUNK_BYTES)
        life.retire(life.saved(8 * CHUNK_BYTES, 5)[0])
        life.wait(2 * IDLE_S)
        assert life.memory.bytes_resident <= 3 * CHUNK_BYTES
        life.care.came()
        life.care.look()
        assert life.memory.bytes_resident >= 8 * CHUNK_BYTES
