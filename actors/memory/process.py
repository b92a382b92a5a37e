"""Process ids, which mean something only within one namespace of process ids (a container may have its own)."""

from __future__ import annotations

import os
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, as another one of its machine can name it."""

    namespace: tuple[int, int]
    """Device and inode of its namespace of process ids; (0, 0) where the system does not show it."""
    pid: int


def pid_namespace() -> tuple[int, int]:
    """Return the device and inode of this process's namespace of process ids, or (0, 0) if it is not shown."""
    try:
        found = os.stat("/proc/self/ns/pid")
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def this_process() -> ProcessId:
    """Return the id of this process."""
    return ProcessId(pid_namespace(), os.getpid())
