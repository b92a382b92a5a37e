"""The catalog's version page: counters in a memfd that clients of its node map, so that repeated loads send nothing.

Rules
- Only the catalog writes it. A name has the counter at its hash; whatever changes which version is the latest of a name
  raises its counter. Names share counters: a client then asks once too often.
- What a client was told with a counter's value holds while the page shows that value, the lease whose end stands on the
  page lasts, and the process runs.
- The size is sealed, and a client maps only the file, by device and inode, that the catalog named (M1 in `memory`).
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
import zlib

import numpy as np

from .memory import FileId, file_id, open_of, process_watch, seal_size

COUNTERS = 4096
_ENDS = COUNTERS
"""Where the end of the lease stands, in words of 8 bytes."""
_BYTES = 8 * (COUNTERS + 1)


def counter_of(name: str) -> int:
    """Return which counter a name has.

    >>> counter_of("m")
    616
    """
    return zlib.crc32(name.encode()) % COUNTERS


class CounterPage:
    """The catalog's side.

    >>> page = CounterPage(first=7)
    >>> page.raise_of("m")
    >>> page.value_of("m"), page.value_of("n")
    (8, 7)

    Args:
        first: value of all counters: a random number, so that no client takes one for that of an earlier catalog.
    """

    def __init__(self, first: int) -> None:
        self.fd = os.memfd_create("tensorvine-counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, _BYTES)
        seal_size(self.fd)
        self.file = file_id(self.fd)
        self._words = np.frombuffer(mmap.mmap(self.fd, _BYTES), np.uint64)
        self._words[:COUNTERS] = first

    def raise_of(self, name: str) -> None:
        """Raise the counter of a name."""
        self._words[counter_of(name)] += np.uint64(1)

    def value_of(self, name: str) -> int:
        """Return the counter of a name."""
        return int(self._words[counter_of(name)])

    def lease(self, ends: float) -> None:
        """Show until when the counters hold, by this machine's `time.monotonic`."""
        self._words[_ENDS] = int(ends * 1e9)


class CounterView:
    """A client's side.

    Args:
        pid: the catalog's process.
        fd: its descriptor of the page.
        file: the file behind that descriptor.

    Raises:
        OSError: it cannot be opened: another node, container or user.
        ShardUnavailableError: the descriptor is of another file.
    """

    def __init__(self, pid: int, fd: int, file: FileId) -> None:
        pidfd = os.pidfd_open(pid)  # before the page is opened: if that is the catalog's, so is this
        self._close = weakref.finalize(self, os.close, pidfd)
        self._process_runs = process_watch(pidfd)
        own = open_of(pid, fd, file)
        try:
            self._words = np.frombuffer(mmap.mmap(own, _BYTES, prot=mmap.PROT_READ), np.uint64)
        finally:
            os.close(own)

    def value_of(self, name: str) -> int | None:
        """Return the counter of a name; None: the page does not hold (any more)."""
        value, ends = int(self._words[counter_of(name)]), int(self._words[_ENDS])
        return value if self._process_runs() and time.monotonic_ns() < ends else None

    def close(self) -> None:
        """Let the catalog's process go."""
        self._process_runs = _never
        self._close()


def _never() -> bool:
    return False
