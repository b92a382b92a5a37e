"""Samples, timing in turn, floors, and waiting until the machine is idle."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

MIB = 1 << 20
GIB = 1 << 30
ONE_COPY = "one warm memory copy"
ROUND_TRIP = "one actor round trip"
SWEEP_S = 0.6
"""A shard begins to hash a new version within this time after the commit."""
TICK_S, IDLE_SHARE, LONGEST_S = 0.1, 0.2, 15.0
"""Of `quiet`: its period, the share of a core below which a process counts as idle, and its time limit."""

Tensors = dict[str, NDArray[Any]]
Action = Callable[[], Any] | tuple[Callable[[], Any], Callable[[Any], object]]
"""The function to time, or that function and its cleanup. The cleanup receives the result and is not timed."""
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """Times of one action, in seconds."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median time."""
        return median(self.times)

    @property
    def low(self) -> float:
        """The shortest time."""
        return min(self.times)

    @property
    def high(self) -> float:
        """The longest time."""
        return max(self.times)


def sample(times: Sequence[float] | float) -> Sample:
    """Return a sample of one or several times."""
    return Sample((times,) if isinstance(times, (int, float)) else tuple(times))


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Call a function; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def in_turn(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in the order of a turn: each turn starts one place further along.

    >>> in_turn(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    shift = turn % len(items)
    return [*items[shift:], *items[:shift]]


def alternate(
    actions: Mapping[str, Action], *, rounds: int, warmup: int = 1, pause_s: float = 0.0
) -> dict[str, Sample]:
    """Time all actions in turn.

    Args:
        actions: What to time, by name.
        rounds: How often each action is timed.
        warmup: Number of rounds before these that do not count.
        pause_s: Seconds to sleep before each action.

    >>> samples = alternate({"nothing": lambda: None}, rounds=3)
    >>> len(samples["nothing"].times)
    3
    """
    found: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    gc.freeze()  # a framework's many objects would make each of the collections below slow
    try:
        for turn in range(warmup + rounds):
            for name in in_turn(list(actions), turn):
                action = actions[name]
                run, after = action if isinstance(action, tuple) else (action, None)
                gc.collect()
                time.sleep(pause_s)
                took, result = timed(run)
                if after is not None:
                    after(result)
                del result
                if turn >= warmup:
                    found[name].append(took)
    finally:
        gc.unfreeze()
    return {name: sample(times) for name, times in found.items()}


def copying(tensors: Mapping[str, NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
    """Return the floor of a save or load: one thread copies every tensor into a warm buffer."""

    def copy() -> None:
        for name, tensor in tensors.items():
            np.copyto(buffers[name], tensor)

    return copy


def copy_floor(size_bytes: int, *, rounds: int = 5) -> Sample:
    """Time one thread that copies `size_bytes` between two warm arrays."""
    source, target = (np.ones(size_bytes, dtype=np.uint8) for _ in range(2))
    return alternate({ONE_COPY: lambda: np.copyto(target, source)}, rounds=rounds)[ONE_COPY]


def buffers_like(tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    """Allocate arrays like the tensors and touch every page of them."""
    buffers = {name: np.empty_like(tensor) for name, tensor in tensors.items()}
    for buffer in buffers.values():
        buffer.fill(0)
    return buffers


def total_bytes(tensors: Mapping[str, NDArray[Any]], names: Sequence[str] | None = None) -> int:
    """Sum the sizes of the tensors, or of the named tensors."""
    return sum(tensors[name].nbytes for name in (tensors if names is None else names))


def equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Compare two models' tensors."""
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], each) for name, each in wanted.items())


def memory_growth(action: Callable[[], T]) -> tuple[int, int, T]:
    """Run an action while a thread samples this process's memory.

    Returns:
        Greatest growth of resident memory and of unshared memory in bytes, and the action's result.
    """
    process = psutil.Process()
    before = process.memory_full_info()
    peak = [before.rss, before.uss]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            now = process.memory_full_info()
            peak[:] = max(peak[0], now.rss), max(peak[1], now.uss)

    thread = threading.Thread(target=watch, name="memory-sampler")
    thread.start()
    try:
        result = action()
    finally:
        done.set()
        thread.join()
    return peak[0] - before.rss, peak[1] - before.uss, result


def wait_until(reached: Callable[[], bool], what: str, *, timeout: float = 60.0) -> None:
    """Wait for a condition that the benchmark does not time, such as free memory.

    Raises:
        TimeoutError: if the condition is false for too long. The message names it.
    """
    end = time.monotonic() + timeout
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"benchmark: expected {what} within {timeout:g} s; it did not happen")
        time.sleep(0.01)


def quiet(*, since: float = 0.0) -> None:
    """Wait until this process and its children are idle, so that one party's rest does not slow the next.

    Args:
        since: Time of the last commit by `time.monotonic`; its follow-up work is waited for.
    """
    children = psutil.Process().children(recursive=True)
    start = now = time.monotonic()
    calm, before = 0, _cpu_s([psutil.Process(), *children])
    while (calm < 2 or now < since + SWEEP_S) and now < start + LONGEST_S:
        time.sleep(TICK_S)
        used = _cpu_s([psutil.Process(), *children])
        calm = calm + 1 if used - before < TICK_S * IDLE_SHARE and not any(map(_runs, children)) else 0
        before, now = used, time.monotonic()


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs, or waits for nothing but a processor."""
    try:
        return process.status() == psutil.STATUS_RUNNING
    except psutil.NoSuchProcess:
        return False


def expect(holds: bool, where: str, what: str) -> None:
    """Raise `RuntimeError` if a benchmark's parties do not return what they should."""
    if not holds:
        raise RuntimeError(f"benchmark {where}: expected {what}; found another result")


def progress(text: str) -> None:
    """Print the current step to the standard error stream."""
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)
