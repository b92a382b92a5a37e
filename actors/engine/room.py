"""The memory that a Ray may use which is started on this machine, here or by a script: what the machine has, or the
control group of this process, where a container or a batch system limits it.

Rules
- Ray itself looks at the limit of a whole container, and not at that of a job within a node.
- Pages of files that the kernel can drop are no use of memory.
- Of a Ray that is started here, the object store is small: models lie in the shards' own memory.
- Where memory runs out, whatever runs on a Ray that is started here ends before its shards do. Ray's memory monitor
  would end actors that restart, which it takes for cheap, before a task that does not, so it is off (`MONITOR_OFF`):
  the kernel then ends a worker, for Ray tells it to take those first, and services take that back for themselves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...store.errors import StoreFullError

log = logging.getLogger(__name__)

STORE_SHARE, STORE_MOST, STORE_LEAST = 0.1, 2 << 30, 80 << 20
"""The object store of a Ray that is started here: its share of what is available, the most, and the least."""
NEEDED_BYTES = 768 << 20
"""What a Ray, a planner and a small shard take at least."""
MONITOR_OFF = ("RAY_memory_monitor_refresh_ms", "0")
"""A variable of a new Ray's environment, and its value."""
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of a control group are called."""

    limit: str
    used: str
    droppable: str
    """A line of `memory.stat`."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that is available."""

    nbytes: int
    total: int
    """What there is, used or not."""
    limited_by: str
    """Words that say by what."""

    @property
    def store_bytes(self) -> int:
        """The size of an object store in it."""
        return max(STORE_LEAST, min(STORE_MOST, int(STORE_SHARE * self.nbytes)))

    def beside(self, store_bytes: int) -> int:
        """Return what is left to reserve beside an object store."""
        return max(1, self.nbytes - store_bytes)

    def check(self) -> None:
        """Refuse to start a Ray where its processes would be ended for want of memory.

        Raises:
            StoreFullError: there is too little.
        """
        if self.nbytes < NEEDED_BYTES:
            raise StoreFullError(
                f"starting a Ray: expected at least {NEEDED_BYTES >> 20} MiB of memory for its processes, a planner "
                f"and a shard; found {self.nbytes >> 20} MiB, according to {self.limited_by}"
            )


def available(groups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> Room:
    """Tell how much memory there is left for this process, and for what it starts.

    Args:
        groups: where control groups are mounted.
        membership: says of which this process is one.
    """
    machine = psutil.virtual_memory()
    least = Room(int(machine.available), int(machine.total), "the machine")
    for folder, files in _own_groups(groups, membership):
        with contextlib.suppress(OSError, ValueError):  # not there, or no number: no limit
            limit = int((folder / files.limit).read_text())
            left = limit - int((folder / files.used).read_text()) + _droppable(folder, files)
            if left < least.nbytes:
                least = Room(max(left, 0), limit, f"the limit of {limit >> 20} MiB in {folder}")
    return least


def ray_start_options() -> list[str]:
    """Return the options of `ray start` that give a Ray what is available here.

    Raises:
        StoreFullError: there is too little for a Ray.
    """
    room = available()
    room.check()
    return [f"--object-store-memory={room.store_bytes}", f"--memory={room.beside(room.store_bytes)}"]


def outlast_workers(adjustment: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Have the kernel, where memory runs out, end this process no earlier than others that are not a Ray's workers."""
    try:
        if int(adjustment.read_text()) > 0:
            adjustment.write_text("0")
    except OSError as exc:
        log.warning("the kernel may end this process first when memory runs out: %s", exc)


def _own_groups(groups: Path, membership: Path) -> Iterator[tuple[Path, _Files]]:
    """Name this process's control groups that may limit memory, up to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _upwards(groups / "memory", path, _V1)
        elif not controllers:
            yield from _upwards(groups, path, _V2)


def _upwards(root: Path, path: str, files: _Files) -> Iterator[tuple[Path, _Files]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]  # a container may not see where it is
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth]), files


def _droppable(folder: Path, files: _Files) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == files.droppable:
            return int(value)
    return 0
