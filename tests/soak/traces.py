"""What a process leaves lying about: descriptors, threads, kernel locks, as Linux tells them under /proc.

Rules
- Counted by kind: what grows with the age of a process is named, and Ray's own sockets are not taken for ours.
- A process that is gone has nothing.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

KINDS = ("memory", "pidfd", "file", "socket")
"""Descriptors of shards' memory, of processes, of files below the repository's path, and of the sockets of calls."""


def descriptors(pid: int, folder: Path) -> dict[str, int]:
    """Count a process's descriptors by kind; `folder` is the repository's path."""
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    sockets = _sockets_of_ours()
    for target in _targets(pid).values():
        if target.startswith("/memfd:tensorvine"):
            found["memory"] += 1
        elif target == "anon_inode:[pidfd]":
            found["pidfd"] += 1
        elif target.startswith(f"{folder}/"):
            found["file"] += 1
        elif target in sockets:
            found["socket"] += 1
    return dict(found)


def threads() -> dict[str, int]:
    """Count this process's Python threads by name, without their numbers."""
    names = (thread.name.rstrip("0123456789").rstrip("-_ ") for thread in threading.enumerate())
    return dict(Counter(name for name in names if name.startswith("tensorvine")))


def memory_of(pid: int) -> set[tuple[int, int]]:
    """Return device and inode of the memory that a shard shares."""
    found: set[tuple[int, int]] = set()
    for descriptor, target in _targets(pid).items():
        if target.startswith("/memfd:tensorvine"):
            try:
                stat = os.stat(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            found.add((stat.st_dev, stat.st_ino))
    return found


def locks_on(files: Iterable[tuple[int, int]]) -> int:
    """Count the kernel's locks on files, given by device and inode."""
    wanted = {f"{os.major(device):02x}:{os.minor(device):02x}:{inode}" for device, inode in files}
    rows = (line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> " not in line)
    return sum(row[5] in wanted for row in rows)


def lockers(files: Iterable[tuple[int, int]]) -> list[str]:
    """Say which processes have locks on files, given by device and inode: number, first words, range of bytes."""
    wanted = {f"{os.major(device):02x}:{os.minor(device):02x}:{inode}" for device, inode in files}
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            rows = [line.split() for line in path.read_text().splitlines() if line.startswith("lock:")]
            who = Path(f"/proc/{path.parts[2]}/cmdline").read_text().replace("\0", " ")[:60] if rows else ""
        except OSError:
            continue  # closed, or ended, since it was listed
        found += [f"{path.parts[2]} {who}: {' '.join(row[2:])}" for row in rows if row[6] in wanted]
    return found


def more(now: Mapping[str, int], before: Mapping[str, int], slack: int = 0) -> dict[str, tuple[int, int]]:
    """Name the kinds of which there is more now: kind -> (before, now).

    >>> more({"pidfd": 5, "memory": 2}, {"pidfd": 2, "memory": 2}, slack=1)
    {'pidfd': (2, 5)}
    """
    return {kind: (before.get(kind, 0), n) for kind, n in now.items() if n > before.get(kind, 0) + slack}


def _targets(pid: int) -> dict[str, str]:
    targets: dict[str, str] = {}
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                targets[descriptor] = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue  # closed since it was listed
    except OSError:
        return {}
    return targets


def _sockets_of_ours() -> set[str]:
    """Name the sockets of calls, as descriptors show them; the calling end has no name, so its peer's is looked at."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {f"socket:[{row[6]}]" for row in rows if len(row) > 7 and row[7].startswith("@tensorvine-")}
