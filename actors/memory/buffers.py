"""Memory for bytes that arrive, used again when nobody has an array on it any more.

Rules
- A page that the system gives for the first time costs more than filling it: whoever loads version after version of
  one model fills the memory of the version before the last.
- What is kept free is never more than what was in use at one time, and the kernel may take it back (MADV_FREE).
- Small memory is not kept: making it costs nothing.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np

from ...store.archive.directory import Bytes

PAGE_BYTES = 2 << 20
"""What memory is made of, and the least that is kept."""


class Buffers:
    """Gives memory to write to, and makes arrays of it once it is written.

    >>> buffers = Buffers()
    >>> memory = buffers.take(3)
    >>> memory[:] = b"abc"
    >>> block = buffers.block(memory)
    >>> block.tobytes(), block.flags.writeable
    (b'abc', False)
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()
        self._free_bytes = 0
        self._used_bytes = 0
        self._most_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run in the middle of `take`

    def take(self, nbytes: int) -> memoryview:
        """Return memory to write to. It comes back after `block`, or is let go.

        Raises:
            MemoryError: the system has not so much.
        """
        if nbytes < PAGE_BYTES:
            return memoryview(bytearray(nbytes))
        length = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        memory = self._found(length)
        if memory is None:
            memory = _made(length)
        return memoryview(memory)[:nbytes]

    def block(self, memory: memoryview) -> Bytes:
        """Make a read-only array of memory that is written now; when it and its views go, the memory comes back."""
        block = np.frombuffer(memory.toreadonly(), np.uint8)
        if isinstance(memory.obj, mmap.mmap):
            with self._lock:
                self._used_bytes += len(memory.obj)
                self._most_bytes = max(self._most_bytes, self._used_bytes)
            weakref.finalize(block, self._back, memory.obj).atexit = False
        return block

    def _found(self, length: int) -> mmap.mmap | None:
        with self._lock:
            for memory in self._free:
                if len(memory) == length:
                    self._free.remove(memory)
                    self._free_bytes -= length
                    return memory
        return None

    def _back(self, memory: mmap.mmap) -> None:
        memory.madvise(mmap.MADV_FREE)
        with self._lock:
            self._used_bytes -= len(memory)
            self._free.append(memory)
            self._free_bytes += len(memory)
            while self._free_bytes > self._most_bytes:
                self._free_bytes -= len(self._free.popleft())


def _made(length: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise MemoryError(f"receive buffer: expected {length} bytes of memory; the system refused: {exc}") from exc
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
