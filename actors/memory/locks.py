"""The kernel's locks on what a process reads of a shared memory, or writes there.

Rules (numbered as in `memory`)
- M5. The lock of a reader or writer (`F_OFD_SETLK`) is on the block's first byte, for as long as any array on it
  lives; the kernel releases it when the process dies. One byte: blocks of different times may overlap, and to unlock
  one must not unlock another.
- M6. Locks are a process's own. A process that forks gives its child locks of its own on all that it reads, before
  there is a child: what either lets go then, the other keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Generator

import numpy as np

from ...store.segments.arena import Part

log = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
_GETLK, _SETLK = 36, 37  # F_OFD_GETLK and F_OFD_SETLK; builds of Python against old headers lack the names


class PartLocks:
    """Kernel locks on the parts that this process reads or writes.

    An exception of a signal handler may come between any two steps here. So what has a lock is noted before it gets
    that, and is noted as gone by a callback in which no such exception can be raised.

    Args:
        fd: of the memory. Locks belong to an open file description: it is opened once more for them alone.
        readable: where this process reads it, made unreadable in a forked child that could get no locks.
    """

    def __init__(self, fd: int, readable: mmap.mmap | None = None) -> None:
        self._fds = [_opened_again(fd)]
        """The descriptor that has the locks; one more while this process forks."""
        self._readable = readable
        self._held: dict[int, set[_Hold]] = {}
        """Offset of a part -> the arrays on it. What is locked is in here."""
        self._mutex = threading.Lock()
        self._released: deque[_Hold] = deque()
        """Arrays that are gone, which may happen in the middle of anything: for the thread that has the mutex."""
        weakref.finalize(self, _close_all, self._fds)
        _forking.watch(self)

    def guard(self, block: np.ndarray, part: Part, *, writes: bool = False) -> np.ndarray:
        """Lock `part` until `block`, whose base is no array, and all views on it are gone; `writes`: to write there."""
        settles = weakref.ref(block, self._settle)  # first: callbacks of later references are called earlier
        hold = _Hold(block, self._released.append)
        hold.offset, hold.writes, hold.settles = part.offset, writes, settles
        with self._mutex:
            self._held.setdefault(part.offset, set()).add(hold)
            _lock(self._fds[0], fcntl.F_RDLCK, part.offset)
        self._settle()
        return block

    def is_taken(self, part: Part, own: int) -> bool:
        """Tell whether another process has a lock on `part`, or this one has more than `own` arrays on it."""
        with self._mutex:
            return len(self._held.get(part.offset, ())) > own or is_locked(self._fds[0], part.offset)

    @contextlib.contextmanager
    def held(self, part: Part) -> Generator[None]:
        """Lock `part` meanwhile."""
        held = self.guard(np.empty(0, np.uint8), part)
        try:
            yield
        finally:
            del held

    def _settle(self, _: object = None) -> None:
        """Process queued releases, unless a thread holds the mutex: it will process them.

        That thread may be this one, in the middle of which an array goes. The mutex is taken by `with` alone: no
        exception of a signal handler comes between that and its release.
        """
        while self._released and not self._mutex.locked():
            with self._mutex:
                while self._released:
                    hold = self._released[0]
                    held = self._held.get(hold.offset, set())
                    held.discard(hold)
                    if not held:
                        self._held.pop(hold.offset, None)
                        if self._fds:  # else the interpreter ends, and has closed it
                            _lock(self._fds[0], fcntl.F_UNLCK, hold.offset)
                    self._released.popleft()  # last: to do all of this again changes nothing

    # ---- forks ----------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Make the locks that the child is to have, and keep all as it is until it has them."""
        self._mutex.acquire()
        try:
            self._fds.append(_opened_again(self._fds[0]))
            for offset, held in self._held.items():
                if any(not hold.writes for hold in held):
                    _lock(self._fds[1], fcntl.F_RDLCK, offset)
        except OSError as exc:
            log.error("fork: the child gets no locks on %d blocks, and cannot read them: %s", len(self._held), exc)
            _close_all(self._fds[1:])
            del self._fds[1:]

    def after_fork(self, child: bool) -> None:
        """Go on: by the new locks in the child, by the old ones in the parent."""
        if child and len(self._fds) == 1 and self._readable is not None:
            _forbid(self._readable)
        elif len(self._fds) == 2:
            os.close(self._fds.pop(0 if child else 1))
        if child:
            for offset, held in list(self._held.items()):
                if all(hold.writes for hold in held):
                    del self._held[offset]
        self._mutex.release()
        self._settle()


class _Hold(weakref.ref[np.ndarray]):
    """An array on a part. Its callback is C code."""

    __eq__, __hash__ = object.__eq__, object.__hash__
    offset: int
    """The part's."""
    writes: bool
    settles: weakref.ref[np.ndarray]
    """Processes the release. Where an exception comes in the middle of that, the next release or lock does."""


class _Forking:
    """Tells all locks of this process that it forks."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[PartLocks] = weakref.WeakSet()
        self._under_way: list[PartLocks] = []
        self._registered = False
        self._turn = threading.Lock()
        """Held by the thread that forks, in the child as well: two may want to at one time."""

    def watch(self, locks: PartLocks) -> None:
        self._all.add(locks)
        if not self._registered:
            self._registered = True
            child, parent = (lambda: self._after(True)), (lambda: self._after(False))
            os.register_at_fork(before=self._before, after_in_child=child, after_in_parent=parent)

    def _before(self) -> None:
        self._turn.acquire()
        self._under_way = list(self._all)
        for locks in self._under_way:
            locks.before_fork()

    def _after(self, child: bool) -> None:
        under_way, self._under_way = self._under_way, []
        for locks in under_way:
            locks.after_fork(child)
        self._turn.release()


_forking = _Forking()


def _forbid(mapping: mmap.mmap) -> None:
    """Make a mapping unreadable: who reads it ends by a signal, and not with bytes that have become another's."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), 0)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _opened_again(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)


def _lock(fd: int, kind: int, offset: int) -> None:
    fcntl.fcntl(fd, _SETLK, _flock(kind, offset))


def is_locked(fd: int, offset: int) -> bool:
    """Tell whether a part is locked through another description; nobody is disturbed by the question."""
    (found,) = struct.unpack_from("h", fcntl.fcntl(fd, _GETLK, _flock(fcntl.F_WRLCK, offset)))
    return found != fcntl.F_UNLCK


def _flock(kind: int, offset: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, PAGE_BYTES + offset, 1, 0)
