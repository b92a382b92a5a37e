"""The protocol of shared memory (`actors.memory.memory`, rules M1 to M7): headers, locks, forks, old kernels."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.client.save.upload import copy_into
from tensorvine.actors.memory import copying as copying_module
from tensorvine.actors.memory import locks as locks_module
from tensorvine.actors.memory import memory as memory_module
from tensorvine.actors.memory import pages as pages_module
from tensorvine.actors.memory.memory import MemoryView, SharedMemory
from tensorvine.actors.memory.pages import CHUNK_BYTES
from tensorvine.actors.memory.workers import Workers
from tensorvine.actors.rpc.messages import Filled
from tensorvine.actors.shard import segment_memory as segment_memory_module
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.store.errors import ShardUnavailableError, without_frames
from tensorvine.store.holders import Request
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import HEADER_BYTES, header_of
from tensorvine.store.segments.segment import File, SegmentId, layout
from tensorvine.store.shard import ShardState

from tests.support.interrupts import Interrupt, at_each, when_waiting
from tests.support.other_user import as_other_user, needs_root
from tests.support.waiting import PATIENCE_S, eventually

PART = Part(HEADER_BYTES, 4096)
HEADER = header_of((0, 7), 1)


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(1 << 20)


@pytest.fixture
def view(memory: SharedMemory) -> MemoryView:
    return MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20)


class TestUsers:
    def test_the_memory_is_of_its_user_only(self, memory: SharedMemory) -> None:
        assert stat.S_IMODE(os.fstat(memory.fd).st_mode) == 0o600

    @needs_root
    def test_another_user_cannot_open_it(self, memory: SharedMemory) -> None:
        code = "print([tried(lambda: os.open(arguments[0], flag)) for flag in (os.O_RDONLY, os.O_RDWR)])"
        assert as_other_user(code, f"/proc/{os.getpid()}/fd/{memory.fd}") == "['EACCES', 'EACCES']"


class TestHeaders:
    def test_a_block_is_given_only_under_its_own_header(self, memory: SharedMemory, view: MemoryView) -> None:
        memory.part(PART)[:] = 5
        assert view.read(PART, HEADER) is None
        memory.label(PART, HEADER)
        for other in (header_of((0, 7), 2), header_of((0, 8), 1), header_of((1, 7), 1)):
            assert view.read(PART, other) is None
        found = view.read(PART, HEADER)
        assert found is not None
        assert (found == 5).all()

    def test_who_comes_after_the_header_was_cleared_gets_nothing_and_keeps_nothing(
        self, memory: SharedMemory, view: MemoryView
    ) -> None:
        memory.label(PART, HEADER)
        memory.clear(PART)
        assert view.read(PART, HEADER) is None
        assert not memory.is_read(PART)

    def test_who_came_before_keeps_the_block(self, memory: SharedMemory, view: MemoryView) -> None:
        memory.label(PART, HEADER)
        found = view.read(PART, HEADER)
        memory.clear(PART)
        assert memory.is_read(PART)
        del found
        assert not memory.is_read(PART)


def opened() -> set[tuple[str, str]]:
    """Return the descriptors of this process that are of memory or of processes, without those of garbage."""
    gc.collect()
    found: set[tuple[str, str]] = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {one for one in found if "memfd:tensorvine" in one[1] or "pidfd" in one[1]}


class TestTheFile:
    """Which file a client maps, and what it can do to it."""

    @pytest.mark.parametrize("length", [0, 4096, 1 << 30], ids=["to nothing", "to a page", "to more"])
    def test_nobody_changes_its_size(self, memory: SharedMemory, length: int) -> None:
        code = f"import os; os.ftruncate(os.open('/proc/{os.getpid()}/fd/{memory.fd}', os.O_RDWR), {length})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert "PermissionError: [Errno 1]" in done.stderr
        memory.part(Part(memory.capacity - 4096, 4096))[:] = 5  # had it been cut, this process would end here

    def test_nobody_takes_the_seals_off_or_adds_one(self, memory: SharedMemory) -> None:
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, 1033, 8)  # F_ADD_SEALS, F_SEAL_WRITE

    def test_a_kernel_that_does_not_seal_is_refused_at_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_module, "_ADD_SEALS", 0x7FFF)
        with pytest.raises(ShardUnavailableError, match=r"expected a kernel that seals its size \(Linux 3.17"):
            SharedMemory(1 << 20)

    @pytest.mark.parametrize("kind", ["another memory", "a file", "a pipe", "a device"])
    def test_another_file_behind_the_number_is_refused_and_not_opened(
        self, memory: SharedMemory, kind: str, tmp_path: Path
    ) -> None:
        """The shard has ended, and its process id and the number of its descriptor are another process's."""
        gone = memory.file
        with contextlib.ExitStack() as stack:
            if kind == "another memory":
                fd = (other := SharedMemory(1 << 20)).fd
                stack.callback(lambda: other)
            else:
                path = tmp_path / "file" if kind == "a file" else Path("/dev/null")
                fd = os.pipe()[0] if kind == "a pipe" else os.open(path, os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, fd)
            before = opened()
            with pytest.raises(ShardUnavailableError, match=rf"expected descriptor {fd} of process {os.getpid()} to"):
                MemoryView(os.getpid(), fd, gone, 1 << 20)
            assert opened() <= before

    def test_a_view_that_is_closed_or_dropped_leaves_no_descriptor(self, memory: SharedMemory) -> None:
        before = opened()
        for closes in (True, False):
            view = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20)
            if closes:
                view.close()
                assert not view.alive
            del view
            assert opened() <= before


class TestLocks:
    def test_to_unlock_a_block_of_before_unlocks_no_other_that_lies_there_now(
        self, memory: SharedMemory, view: MemoryView
    ) -> None:
        """A stale answer may name a place that spans the blocks of today."""
        inner = Part(PART.offset + 1024, 512)
        memory.label(inner, HEADER)
        held = view.read(inner, HEADER)
        assert view.read(PART, header_of((0, 9), 9)) is None
        assert memory.is_read(inner)
        del held
        assert not memory.is_read(inner)

    def test_looking_for_readers_never_stands_in_the_way_of_one(
        self, memory: SharedMemory, view: MemoryView, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kinds: list[int] = []
        true = fcntl.fcntl

        def watched(fd: int, command: int, argument: Any = 0) -> Any:
            if command in (37, fcntl.F_SETLK) and isinstance(argument, bytes):
                kinds.append(int.from_bytes(argument[:2], sys.byteorder))
            return true(fd, command, argument)

        monkeypatch.setattr(locks_module.fcntl, "fcntl", watched)
        memory.label(PART, HEADER)
        found = view.read(PART, HEADER)
        assert memory.is_read(PART)
        del found
        assert not memory.is_read(PART)
        assert fcntl.F_WRLCK not in kinds

    def test_an_array_that_goes_while_another_is_made_of_the_same_block(self, memory: SharedMemory) -> None:
        """A finalizer runs wherever Python's collector does: here between the look at the count and the counting."""
        first: list[np.ndarray] = [memory.read(PART)]

        class Counts(dict[Any, set[Any]]):
            def setdefault(self, key: Any, default: Any = None) -> Any:
                found = super().setdefault(key, default)
                first.clear()
                return found

        locks = memory._locks
        locks._held = Counts(locks._held)
        second = memory.read(PART)
        assert first == []
        assert memory.is_read(PART)
        del second
        assert not memory.is_read(PART)

    def test_many_threads_and_the_collector(self, memory: SharedMemory) -> None:
        def work() -> None:
            for turn in range(300):
                block = memory.read(Part(HEADER_BYTES + 4096 * (turn % 3), 64))
                cycle: list[Any] = [block]
                cycle.append(cycle)
                if turn % 50 == 0:
                    gc.collect()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        assert memory._locks._held == {}
        assert not any(memory.is_read(Part(HEADER_BYTES + 4096 * place, 64)) for place in range(3))


class TestWriters:
    """What keeps a part in place while somebody writes there."""

    def test_a_part_is_locked_until_no_array_to_write_to_is_left(self, memory: SharedMemory, view: MemoryView) -> None:
        block = view.part(PART)
        slot = block[128:256].view(np.float32)
        del block
        assert memory.is_read(PART)
        del slot
        assert not memory.is_read(PART)

    @pytest.mark.parametrize("work", ["copies", "makes pages"])
    def test_a_helper_that_an_exception_left_alone_keeps_the_part(
        self, monkeypatch: pytest.MonkeyPatch, work: str
    ) -> None:
        """A signal handler raises while the caller waits for its helper: the part is another's only after that."""
        length, state = 4 * CHUNK_BYTES, ShardState(0, 1)
        held = SegmentMemory(state, threading.RLock(), length, 0)
        view = MemoryView(os.getpid(), held.memory.fd, held.memory.file, length)
        (offset,) = held.grant(Request("c", 1), [length])
        part, began, go_on = Part(offset, length), threading.Event(), threading.Event()

        def late(true: Callable[..., Any], *arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                assert began.wait(PATIENCE_S)
            else:
                began.set()
                assert go_on.wait(PATIENCE_S)
            return true(*arguments)

        if work == "copies":
            view.part(part)  # its pages are made
            monkeypatch.setattr(copying_module.np, "copyto", partial(late, np.copyto))
        else:
            monkeypatch.setattr(pages_module, "_advise", partial(late, pages_module._advise))
        with Workers(1) as helper, when_waiting(wait, go_on):
            try:
                copy_into(view.part(part, helper), [np.full(length, 7, np.uint8)], helper)
            except Interrupt as exc:
                without_frames(exc)
                state.end(Request("c", 1))
                held.drop_over()
                assert held.grant(Request("c", 2), [length]) == []
            else:
                pytest.fail("expected an exception")
        eventually(lambda: held.grant(Request("c", 2), [length]) == [offset], "the part comes back")

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_an_exception_at_any_point_leaves_no_lock_behind(self, memory: SharedMemory, view: MemoryView) -> None:
        memory.label(PART, HEADER)

        def work() -> None:
            view.part(PART)[:1] = view.read(PART, HEADER) is not None

        points = sum(1 for _ in at_each(work, "/memory/"))
        assert points > 30
        gc.collect()
        work()
        assert view._locks._held == {}
        assert not memory.is_read(PART)


class TestForks:
    """In a process of its own, whose parent and child tell each other by pipes how far they are."""

    SCENE = """
        import os, signal, sys
        import numpy as np
        from tensorvine.actors.memory.memory import MemoryView, SharedMemory
        from tensorvine.store.segments.arena import Part
        from tensorvine.store.segments.blockheader import HEADER_BYTES, header_of

        part, header = Part(HEADER_BYTES, 4096), header_of((0, 7), 1)
        memory = SharedMemory(1 << 20)
        memory.part(part)[:] = 5
        memory.label(part, header)

        def turn():
            ends = os.pipe()
            return (lambda: os.read(ends[0], 1)), (lambda: os.write(ends[1], b"x"))

        def forked(child):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    child()
                    code = 0
                finally:
                    os._exit(code)
            return pid

        def ended(pid):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    """

    def play(self, scene: str) -> None:
        code = textwrap.dedent(self.SCENE) + textwrap.dedent(scene)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    def test_what_the_child_lets_go_the_parent_keeps(self) -> None:
        self.play("""
            held = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20).read(part, header)
            def child():
                global held
                assert (held == 5).all()
                del held
            assert ended(forked(child)) == 0
            memory.clear(part)
            assert memory.is_read(part)
            del held
            assert not memory.is_read(part)
        """)

    def test_what_the_parent_lets_go_the_child_keeps_until_it_ends(self) -> None:
        self.play("""
            held = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20).read(part, header)
            wait, go = turn()
            pid = forked(wait)
            del held
            memory.clear(part)
            assert memory.is_read(part)
            go()
            assert ended(pid) == 0
            assert not memory.is_read(part)
        """)

    def test_a_child_that_holds_nothing_keeps_nothing_of_a_parent_that_died(self) -> None:
        self.play("""
            (up, tell_up), (wait, go) = turn(), turn()
            def reader():
                held = MemoryView(os.getppid(), memory.fd, memory.file, 1 << 20).read(part, header)
                def worker():
                    nonlocal held
                    del held
                    tell_up()
                    wait()
                forked(worker)
                signal.pause()
            pid = forked(reader)
            up()
            memory.clear(part)
            assert memory.is_read(part)
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL
            assert not memory.is_read(part), "the worker of the dead reader locks what it does not hold"
            go()
        """)

    def test_a_child_keeps_nothing_of_what_its_parent_wrote(self) -> None:
        self.play("""
            view = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20)
            written = view.part(part)
            wait, go = turn()
            pid = forked(wait)
            memory.clear(part)
            assert memory.is_read(part)
            del written
            assert not memory.is_read(part)
            go()
            assert ended(pid) == 0
        """)

    def test_threads_that_fork_at_one_time_have_children_with_locks(self) -> None:
        self.play("""
            import threading
            views = [MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20) for _ in range(20)]
            held = [view.read(part, header) for view in views]
            sys.setswitchinterval(1e-6)
            def many():
                for _ in range(40):
                    ends.append(ended(forked(held.clear)))
            ends, threads = [], [threading.Thread(target=many, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert ends == [0] * 160
            del held[:]
            memory.clear(part)
            assert not memory.is_read(part)
        """)

    def test_a_child_for_which_there_are_no_descriptors_cannot_read(self) -> None:
        self.play("""
            import resource
            held = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20).read(part, header)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            assert ended(forked(lambda: held.sum())) == -signal.SIGSEGV
            assert (held == 5).all()
            memory.clear(part)
            assert memory.is_read(part)
        """)


class TestOldKernels:
    def test_pages_are_made_without_a_change_to_those_that_are_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where MADV_POPULATE_READ is not there (Linux before 5.14, gVisor)."""

        class Libc:
            def __init__(self, *_: object, **__: object) -> None:
                pass

            def madvise(self, *_: object) -> int:
                pages_module.ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(pages_module.ctypes, "CDLL", Libc)
        monkeypatch.setattr(pages_module.ctypes, "get_errno", lambda: errno.EINVAL)
        memory = SharedMemory(2 * CHUNK_BYTES)
        there = Part(HEADER_BYTES, 64 << 10)
        memory.part(there)[:] = 7
        other = MemoryView(os.getpid(), memory.fd, memory.file, 2 * CHUNK_BYTES)
        other.part(Part(there.offset + there.length + HEADER_BYTES, 64 << 10))[:] = 9
        assert (memory.part(there) == 7).all()

    def test_a_kernel_without_the_locks_is_refused_at_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> bytes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(locks_module.fcntl, "fcntl", refused)
        with pytest.raises(ShardUnavailableError, match=r"expected a kernel with open file description locks"):
            SharedMemory(1 << 20)


class TestSegmentMemory:
    """What a shard's memory does while somebody copies in it."""

    SIZES = (256 << 10, 256 << 10)

    def start(self, capacity: int) -> tuple[SegmentMemory, ShardState]:
        lock = threading.RLock()
        state = ShardState(0, 1)
        return SegmentMemory(state, lock, capacity, 0), state

    def saved(self, held: SegmentMemory, segment: SegmentId, value: int) -> Part:
        length = layout(self.SIZES)[1]
        (offset,) = held.grant(Request("c", 1), [length])
        part = Part(offset, length)
        held.memory.part(part)[:] = value
        held.adopt(Request("c", 1), os.getpid(), [Filled(segment, part, self.SIZES)])
        return part

    def test_a_compaction_does_not_let_its_own_source_leave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held, state = self.start(layout(self.SIZES)[1])
        self.saved(held, (0, 1), 5)
        state.commit(Request("c", 1), {(0, 1): [1]})
        assert state.offer((0, 1), File("a.0", 0, 1, frozenset({0, 1})))
        state.accept((0, 1))
        true: Callable[[Part], np.ndarray] = held.memory.part

        def part(which: Part) -> np.ndarray:
            """Have another save come between the compaction's grant and its copying."""
            monkeypatch.undo()
            for offset in held.grant(Request("c", 2), [256 << 10]):
                true(Part(offset, 256 << 10))[:] = 99
            return true(which)

        monkeypatch.setattr(held.memory, "part", part)
        held._compact((0, 1))
        segment = state.segment((0, 1))
        assert segment is not None
        content = held.view(segment)
        offset = segment.offsets[1]
        if content is not None:
            assert (content[int(offset) : int(offset) + self.SIZES[1]] == 5).all()  # pyright: ignore[reportArgumentType]

    def test_a_block_that_is_being_filled_is_no_other_save_s_when_its_own_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client of another node times out and gives its save up while the shard still copies its block."""
        length = layout(self.SIZES)[1]
        held, _ = self.start(length)
        (offset,) = held.grant(Request("far", 1), [length])
        part, others = Part(offset, length), []
        true = np.copyto

        def copyto(target: np.ndarray, source: np.ndarray) -> None:
            held.drop_grants(Request("far", 1))
            others.extend(held.grant(Request("c", 2), [length]))
            true(target, source)

        monkeypatch.setattr(segment_memory_module.np, "copyto", copyto)
        held.fill(part, Request("far", 1), np.full(length, 3, np.uint8))
        monkeypatch.undo()
        assert others == []
        assert held.grant(Request("c", 2), [length]) == [offset]
        with pytest.raises(ShardUnavailableError, match="the save was cancelled"):
            held.fill(part, Request("far", 1), np.full(length, 3, np.uint8))

    def test_a_freed_block_has_no_header_before_its_memory_is_another_s(self) -> None:
        held, state = self.start(layout(self.SIZES)[1])
        part = self.saved(held, (0, 1), 5)
        segment = state.segment((0, 1))
        assert segment is not None
        header = header_of(segment.id, segment.generation)
        reader = MemoryView(os.getpid(), held.memory.fd, held.memory.file, held.memory.capacity)
        found = reader.read(part, header)
        assert found is not None
        state.drop(Request("c", 1))
        held.settle()
        assert held.grant(Request("c", 2), [part.length]) == []
        assert reader.read(part, header) is None
        del found
        assert held.grant(Request("c", 2), [part.length]) == [part.offset]

    def test_the_shard_s_own_process_stops_reading_when_its_array_goes(self) -> None:
        held, state = self.start(layout(self.SIZES)[1])
        part = self.saved(held, (0, 1), 5)
        segment = state.segment((0, 1))
        assert segment is not None
        kept = held.view(segment)
        assert kept is not None
        assert held.memory.is_read(part)
        del kept
        assert not held.memory.is_read(part)
