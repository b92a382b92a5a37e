"""Waiting until nothing runs any more: what one party left behind must not slow the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

SWEEP_S = 0.6
"""Within so long after a commit, a shard begins to hash what it took."""
TICK_S = 0.1
IDLE_SHARE = 0.2
"""Of a core: who takes less does nothing that would disturb."""
LONGEST_S = 15.0
"""After so long it is given up: something always runs on this machine."""


def quiet(*, since: float = 0.0) -> float:
    """Wait until this process and those that it started are idle.

    Who is ready to run but gets no processor, because others have them all, is not idle.

    Args:
        since: when something was committed last, by `time.monotonic`; what follows it is waited for.

    Returns:
        Seconds that it took.

    >>> quiet() < LONGEST_S + 5
    True
    """
    others = psutil.Process().children(recursive=True)
    processes = [psutil.Process(), *others]
    start = now = time.monotonic()
    calm, before = 0, _cpu_s(processes)
    while (calm < 2 or now < since + SWEEP_S) and now < start + LONGEST_S:
        time.sleep(TICK_S)
        used = _cpu_s(processes)
        calm = calm + 1 if used - before < TICK_S * IDLE_SHARE and not _ready(others) else 0
        before, now = used, time.monotonic()
    return now - start


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Sum the processor time that processes took so far."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _ready(processes: Sequence[psutil.Process]) -> bool:
    """Tell whether a process runs, or waits for a processor only."""
    for process in processes:
        try:
            if process.status() == psutil.STATUS_RUNNING:
                return True
        except psutil.NoSuchProcess:
            continue
    return False
