"""A disk that is slow, full or fails, for real processes: system calls below a folder, by a preloaded library.

Rules
- The library (`disk_trouble.c`) is built with the machine's C compiler. Where there is none, there is no trouble, and
  `why_not` says so: a remount is no way, for the kernel refuses it while the repository's lock is open for writing.
- The library looks at a mapped page before each call, so trouble begins and ends at once, in all processes that were
  started with `environment`, whichever life of a shard they are.
"""

from __future__ import annotations

import errno
import mmap
import struct
from pathlib import Path

from tests.support.preload import compiler, preloaded

SOURCE = Path(__file__).with_name("disk_trouble.c")
ERRORS = {"full disk": errno.ENOSPC, "failing disk": errno.EIO, "slow disk": 0}
SLOW_US = 20_000
"""Delay of each call on a slow disk, in microseconds."""


def why_not() -> str | None:
    """Say why a disk cannot be troubled on this machine; None when it can."""
    return None if compiler() else "no C compiler was found, so the disk is left in peace"


class Disk:
    """The disk below a folder, as far as processes with its `environment` see it.

    Args:
        folder: absolute.
        own: folder for the library and its switch.
    """

    def __init__(self, folder: Path, own: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        self._switch: mmap.mmap | None = None
        if compiler() is None:
            return
        switch = own / "switch"
        switch.write_bytes(bytes(8))
        with open(switch, "r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 8)
        self.environment = preloaded(SOURCE, own) | {
            "TENSORVINE_SOAK_FOLDER": str(folder),
            "TENSORVINE_SOAK_SWITCH": str(switch),
        }

    def trouble(self, kind: str) -> None:
        """Begin: one of `ERRORS`."""
        self._set(ERRORS[kind], SLOW_US if kind == "slow disk" else 0)

    def heal(self) -> None:
        """End whatever trouble there is."""
        self._set(0, 0)

    def _set(self, number: int, delay_us: int) -> None:
        if self._switch is not None:
            self._switch[:] = struct.pack("ii", number, delay_us)
