"""The report of `fork`: all ways of cloning, measure by measure, beside each other and beside the floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .fork_runs import Measures
from .measure import MIB, Goal, Report, Row, Sample, seconds, spread

FILE, OBJECTS = "HDF5 file", "object store"
RESOLUTION_S = 1e-3
"""What was shorter, or negative because steps vary, counts as this in ratios."""
PUBLISHED = (
    "DeepClone as published (8 nodes, section VI-D), times below HDF5 over a parallel file system: NT3.A and NT3.B "
    "17 to 23 in overhead and 14 to 22 in readiness, NT3.C 25 and 35; ResNet-50 more than 20, below mpi4py more than "
    "10; ResNet family up to 17 and 75; standby almost the backward pass"
)


@dataclass
class Case:
    """A training that was cloned, and what each way took."""

    net: str
    ranks: int
    nbytes: int
    """Of the state."""
    tensors: int
    copy_s: float
    """One warm memory copy of the state."""
    loopback_s: float
    """The state through a raw loopback socket."""
    ways: dict[str, list[Measures]] = field(default_factory=dict[str, list[Measures]])
    """Way -> what was measured, in order."""
    first: Measures | None = None
    """The very first clone by ours, which does not count."""

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"{self.net}, {self.ranks} {'ranks' if self.ranks > 1 else 'rank'}"

    def sample(self, way: str, value: Callable[[Measures], float]) -> Sample:
        """Return one measure of a way, each at least `RESOLUTION_S`."""
        return Sample(tuple(max(value(each), RESOLUTION_S) for each in self.ways[way]))

    def medians(self, way: str) -> dict[str, float]:
        """Return the median of each measure, in seconds."""
        return {part.name: median(getattr(each, part.name) for each in self.ways[way]) for part in fields(Measures)}

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON values."""
        head = {"net": self.net, "ranks": self.ranks, "size_bytes": self.nbytes, "tensors": self.tensors}
        floors = {"copy_s": self.copy_s, "loopback_s": self.loopback_s}
        ways = {
            way: {"times": len(found), "overhead_min_s": low, "overhead_max_s": high, **self.medians(way)}
            for way, found in self.ways.items()
            for low, high in [(min(each.overhead_s for each in found), max(each.overhead_s for each in found))]
        }
        return head | floors | {"ways": ways, "first": None if self.first is None else asdict(self.first)}

    def row(self, way: str) -> Row:
        """Return readiness by ours beside HDF5's, with the goals."""
        readiness = self.sample(way, lambda each: each.readiness_s)
        theirs = self.sample(FILE, lambda each: each.readiness_s)
        overhead = self.sample(FILE, lambda each: each.overhead_s).median
        own_overhead = self.sample(way, lambda each: each.overhead_s).median
        found = self.medians(way)
        limit, limit_s = ("raw loopback socket", self.loopback_s) if "gloo" in way else ("memory copy", self.copy_s)
        return Row(
            f"{self.name}: {way}",
            readiness,
            self.nbytes,
            FILE,
            theirs,
            limit,
            limit_s,
            goals=(
                Goal("times less overhead than an HDF5 file", overhead / own_overhead, at_least=10),
                Goal("times sooner ready than by an HDF5 file", theirs.median / readiness.median, at_least=20),
                Goal("backward passes on standby", found["standby_s"] / found["backward_s"], at_most=1.25),
            ),
            facts=found | {"ranks": self.ranks, "tensors": self.tensors},
        )


@dataclass
class ForkReport(Report):
    """Also all ways, measure by measure."""

    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, and the cases under `cases`."""
        return super().as_dict() | {"cases": [each.as_dict() for each in self.cases], "notes": self.notes}

    def print(self, console: Console) -> None:
        """Print the ways, then the rows."""
        table = Table(title="medians; readiness and overhead [min-max]")
        for heading in ("case", "by", "overhead", "readiness"):
            table.add_column(heading, no_wrap=True)
        for heading in ("standby", "backward", "step", "noise", "ranks' CPU", "held up"):
            table.add_column(heading, justify="right", no_wrap=True)
        for case in self.cases:
            size = f"{case.name} ({case.nbytes / MIB:.0f} MiB, {case.tensors} tensors)"
            for way, found in case.ways.items():
                middle = case.medians(way)
                table.add_row(
                    size,
                    way,
                    *(
                        escape(_signed([getattr(each, part) for each in found]))
                        for part in ("overhead_s", "readiness_s")
                    ),
                    *(
                        _signed([middle[part]]) if middle[part] else ""
                        for part in ("standby_s", "backward_s", "step_s", "noise_s", "cpu_s", "hooks_s")
                    ),
                )
                size = ""
        console.print(table)
        super().print(console)
        for note in self.notes:
            console.print(note, highlight=False)


def _signed(values: list[float]) -> str:
    """Write a median and, of several, the spread; some may be negative.

    >>> _signed([0.01, -0.002, 0.03]), _signed([-0.0015])
    ('10 ms [-2-30]', '-1.5 ms')
    """
    if len(values) == 1:
        return seconds(values[0]) if values[0] > 0 else f"{values[0] * 1e3:.3g} ms"
    if min(values) > 0:
        return spread(Sample(tuple(values)))
    middle, low, high = (f"{value * 1e3:.3g}" for value in (median(values), min(values), max(values)))
    return f"{middle} ms [{low}-{high}]"
