"""The memory of Dask's workers, by which Dask spills, pauses and ends them: without what lies in shards.

Rules
- Dask goes by a process's resident memory. The pages of a version that a task has loaded count there, as they are
  mapped; but they are a shard's, and stay when the worker has ended. So Dask would end a worker, again and again, whose
  tasks load what is larger than its limit.
- Which pages those are takes 10 to 25 ms of a core to read. It is read near a limit only, once in a second and when
  more has come meanwhile.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any, cast

import psutil
from distributed import Nanny, Worker

NEAR = 0.5
"""Of a worker's limit; Dask does nothing before 0.6."""
MORE = 0.05
"""Of what is near: what comes to a process before it is read anew which pages are its own."""
ANEW_S = 1.0
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
_OF_A_SHARD = "/memfd:tensorvine "


class OwnBytes:
    """Resident bytes of processes without those of shards' memory.

    Args:
        near: up to so many bytes, all are counted.
    """

    def __init__(self, near: float) -> None:
        self._near = near
        self._pid = 0
        self._own = self._others = 0
        self._due = 0.0

    def of(self, pid: int) -> int:
        """Return those of a process.

        Raises:
            psutil.NoSuchProcess: it has ended.
        """
        resident = int(psutil.Process(pid).memory_info().rss)
        if resident <= self._near:
            return resident
        own = resident - self._others
        if pid != self._pid or time.monotonic() >= self._due or own > self._own + MORE * self._near:
            self._own, self._others = read(pid)
            self._pid, self._due = pid, time.monotonic() + ANEW_S
            own = self._own
        return own


def count_own_of(worker: Worker) -> None:
    """Have a worker spill, pause and report by its own bytes."""
    limit = worker.memory_manager.memory_limit
    if limit is not None:
        measured, own = cast(Any, worker.monitor), OwnBytes(NEAR * limit)
        measured.get_process_memory = lambda: own.of(measured.proc.pid)


def spare_worker_of(nanny: Nanny) -> None:
    """Have a nanny end its worker for its own bytes only."""
    looks = cast(Any, nanny.periodic_callbacks.get("memory_monitor"))
    if looks is None:  # there is no limit
        return
    manager, ends = nanny.memory_manager, looks.callback
    most = cast(int, manager.memory_limit) * float(manager.memory_terminate_fraction)
    own = OwnBytes(most)

    def look() -> None:
        pid = cast("int | None", nanny.pid)
        with contextlib.suppress(psutil.Error):
            if pid is not None and own.of(pid) > most:
                ends()

    looks.callback = look


def read(pid: int) -> tuple[int, int]:
    """Add up what is resident of a process's mappings: its own, and of shards' memory.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    sums, kind = [0, 0], 0
    try:
        with open(f"/proc/{pid}/smaps") as lines:
            for line in lines:
                if _MAPPING.match(line):
                    kind = int(_OF_A_SHARD in line)
                elif line.startswith("Rss:"):
                    sums[kind] += int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise psutil.NoSuchProcess(pid) from exc
    return sums[0], sums[1]
