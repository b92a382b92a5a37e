"""The report of `update_latency`: who took how long, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import Report, Sample, seconds, spread
from .update_parties import Parts


@dataclass
class Figure:
    """What was measured of one party with one network."""

    network: str
    party: str
    cold: Parts
    """The very first."""
    warm: list[Parts] = field(default_factory=list)
    """Those that count."""

    @property
    def counted(self) -> list[Parts]:
        """Those that count, or the very first where there was no other."""
        return self.warm or [self.cold]

    @property
    def sample(self) -> Sample:
        """The whole updates."""
        return Sample(tuple(each.total_s for each in self.counted))

    def medians(self) -> dict[str, float]:
        """Return the median of each part, in seconds."""
        return {part.name: median(getattr(each, part.name) for each in self.counted) for part in fields(Parts)}

    def as_dict(self) -> dict[str, Any]:
        """Return the medians as JSON values."""
        head = {"network": self.network, "party": self.party, "versions": len(self.counted)}
        times = {"cold_s": self.cold.total_s, "min_s": self.sample.low, "max_s": self.sample.high}
        return head | times | self.medians()


@dataclass
class UpdateReport(Report):
    """Also all parties, part by part."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, and the parties under `parties`."""
        return super().as_dict() | {"parties": [each.as_dict() for each in self.figures], "notes": self.notes}

    def print(self, console: Console) -> None:
        """Print the parties, then the rows."""
        table = Table(title="medians of each part; of a file: written, read")
        for heading in ("network", "party", "update [min-max]"):
            table.add_column(heading, no_wrap=True)
        for heading in ("first", "stall", "commit", "until it exists", "notify", "fetch", "swap"):
            table.add_column(heading, justify="right", no_wrap=True)
        for each in self.figures:
            found = each.medians()
            parts = [seconds(found[part.name]) if found[part.name] else "" for part in fields(Parts)[1:]]
            table.add_row(each.network, each.party, escape(spread(each.sample)), seconds(each.cold.total_s), *parts)
        console.print(table)
        super().print(console)
        for note in self.notes:
            console.print(note, highlight=False)
