"""Rows, goals and tables of one benchmark, on the terminal and as a JSON file.

Rules
- A row states the distance to the peer (`ratio`, larger is better) and to the floor (`limit_ratio`, 1 is the floor).
- A goal is printed next to the measured value; a missed goal changes nothing.
- The file contains the machine, its load, the commit, the versions of the packages, and all samples.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import GIB, Sample

PACKAGES = ("tensorvine", "numpy", "ray", "distributed", "h5py", "keras", "tensorflow", "safetensors", "torch", "redis")
ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Effort(Enum):
    """How much of a benchmark to run."""

    QUICK = "quick"
    """Each case once or a few times, on small sizes: shows that it runs."""
    NORMAL = "normal"
    """The sizes of the published figures."""


@dataclass(frozen=True)
class Goal:
    """A bound on a measured value."""

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the value keeps the bound."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bound = f">= {self.at_least:,g}" if self.at_least is not None else f"<= {self.at_most:,.10g}"
        value = f"{self.value:,.0f}" if abs(self.value) >= 1e5 else f"{self.value:.3g}"
        return f"{'reached' if self.reached else 'MISSED'}: {self.what}: {value} ({bound})"


@dataclass(frozen=True)
class Row:
    """One case: TensorVine next to one peer and one floor. Times are in seconds."""

    case: str
    ours: Sample
    size_bytes: int = 0
    peer: str | None = None
    peer_times: Sample | None = None
    limit: str | None = None
    limit_s: float | None = None
    goals: tuple[Goal, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """Other measured values, with the unit in the key."""

    @property
    def ratio(self) -> float | None:
        """The peer's time divided by TensorVine's time."""
        return None if self.peer_times is None else self.peer_times.median / self.ours.median

    @property
    def limit_ratio(self) -> float | None:
        """TensorVine's time divided by the floor."""
        return None if not self.limit_s else self.ours.median / self.limit_s

    def as_dict(self, *, samples: bool = False) -> dict[str, Any]:
        """Return the row as JSON values, with all samples if asked for."""
        theirs = self.peer_times
        return {
            "case": self.case,
            "ours_s": self.ours.median,
            "ours_min_s": self.ours.low,
            "ours_max_s": self.ours.high,
            "peer": self.peer,
            "peer_s": None if theirs is None else theirs.median,
            "peer_min_s": None if theirs is None else theirs.low,
            "peer_max_s": None if theirs is None else theirs.high,
            "ratio": self.ratio,
            "limit": self.limit,
            "limit_s": self.limit_s,
            "limit_ratio": self.limit_ratio,
            "size_bytes": self.size_bytes,
            "goals": [{"goal": str(goal), "value": goal.value, "reached": goal.reached} for goal in self.goals],
            **self.facts,
            **({"ours_times_s": self.ours.times, "peer_times_s": theirs and theirs.times} if samples else {}),
        }


@dataclass
class Report:
    """All rows of one benchmark."""

    benchmark: str
    effort: Effort = Effort.NORMAL
    rows: list[Row] = field(default_factory=list)
    headline: Row | None = None
    """The row that stands for the benchmark; by default the first one."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Title -> lines of equal keys; values under keys that end in `_s` are seconds."""
    notes: list[str] = field(default_factory=list)

    def pick(self, *, quick: T, normal: T) -> T:
        """Return the value for this report's effort."""
        return quick if self.effort is Effort.QUICK else normal

    def add(
        self,
        case: str,
        ours: Sample,
        size_bytes: int = 0,
        *,
        peer: tuple[str, Sample | None] | None = None,
        floor: tuple[str, Sample | float] | None = None,
        goals: Sequence[Goal] = (),
        headline: bool = False,
        **facts: Any,
    ) -> Row:
        """Append a row; `headline` makes it stand for the benchmark."""
        limit, limit_s = floor or (None, None)
        limit_s = limit_s.median if isinstance(limit_s, Sample) else limit_s
        row = Row(case, ours, size_bytes, *(peer or (None, None)), limit, limit_s, tuple(goals), facts)
        self.rows.append(row)
        self.headline = row if headline else self.headline
        return row

    def as_dict(self, *, samples: bool = False) -> dict[str, Any]:
        """Return the headline's fields, the environment and all rows as JSON values."""
        return {
            "benchmark": self.benchmark,
            **(self.headline or self.rows[0]).as_dict(),
            "effort": self.effort.value,
            **environment(),
            "rows": [row.as_dict(samples=samples) for row in self.rows],
            "tables": self.tables,
            "notes": self.notes,
        }

    def write(self, folder: Path) -> Path:
        """Write the result file, with all samples."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        path.write_text(json.dumps(self.as_dict(samples=True), indent=1) + "\n")
        return path

    def print(self, console: Console) -> None:
        """Print the environment, all tables, the rows, the goals and the notes."""
        found = environment()
        about = found["machine"] | found["versions"] | {"commit": found["commit"]}
        console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
        for title, lines in self.tables.items():
            console.print(table_of(title, [{key: _cell(key, value) for key, value in line.items()} for line in lines]))
        console.print(
            table_of(
                self.benchmark,
                [
                    {
                        "case": row.case,
                        "ours [min-max]": spread(row.ours),
                        "peer": row.peer or "",
                        "peer's [min-max]": spread(row.peer_times),
                        "peer/ours": "" if row.ratio is None else f"{row.ratio:.3g}x",
                        "ours/floor": "" if row.limit_ratio is None else f"{row.limit_ratio:.3g}x",
                        "floor": "" if row.limit_s is None else f"{row.limit}: {seconds(row.limit_s)}",
                    }
                    for row in self.rows
                ],
            )
        )
        for row in self.rows:
            for goal in row.goals:
                console.print(f"{row.case}: {goal}", style="" if goal.reached else "red", highlight=False)
        for note in self.notes:
            console.print(note, highlight=False)


def environment() -> dict[str, Any]:
    """Describe the run: machine, commit, versions."""
    return {
        "machine": {
            "cpu": _processor(),
            "cores": os.cpu_count() or 1,
            "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
            "load": round(os.getloadavg()[0], 1),
            "files_on": _file_system(tempfile.gettempdir()),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        },
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
    }


def seconds(value: float) -> str:
    """Write a duration with a fitting unit.

    >>> seconds(0.00123), seconds(2), seconds(4e-6)
    ('1.23 ms', '2 s', '4 us')
    """
    unit, scale = _unit(value)
    return f"{value / scale:.3g} {unit}"


def spread(times: Sample | None) -> str:
    """Write a median and, in brackets and the same unit, minimum and maximum.

    >>> spread(Sample((0.010, 0.012, 0.2)))
    '12 ms [10-200]'
    """
    if times is None:
        return ""
    unit, scale = _unit(times.median)
    return f"{times.median / scale:.3g} {unit} [{times.low / scale:.3g}-{times.high / scale:.3g}]"


def table_of(title: str, lines: Sequence[dict[str, str]]) -> Table:
    """Make a table of lines with equal keys; `_s` at the end of a heading is not shown."""
    table = Table(title=title or None)
    for heading in lines[0] if lines else ():
        table.add_column(heading.removesuffix("_s"), no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line.values()))
    return table


def _cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return seconds(value) if key.endswith("_s") else f"{value:.4g}"


def _unit(value: float) -> tuple[str, float]:
    return next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if abs(value) >= pair[1]), ("us", 1e-6))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _file_system(folder: str) -> str:
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda part: len(part.mountpoint), reverse=True)
    home = Path(folder).resolve()
    return next((part.fstype for part in mounts if home.is_relative_to(part.mountpoint)), "unknown")
