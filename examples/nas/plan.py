"""What a search is to do: all that must stay the same when it is stopped and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from .data import features_of
from .space import SMALL_UNITS, UNITS, AttnSpace, Nt3Space
from .trainer import Trainer


class Mode(StrEnum):
    """How candidates inherit from one another."""

    NONE = "none"
    """Not at all: each is trained from scratch."""
    HDF5 = "hdf5"
    """A file per candidate, and a catalogue in Redis: EvoStore's baseline HDF5+PFS with Redis-Queries."""
    REPOSITORY = "repository"
    """Through the repository."""


class Search(StrEnum):
    """Who draws the candidates."""

    EVOLUTION = "evolution"
    """Our aged evolution."""
    DEEPHYPER = "deephyper"
    """DeepHyper's regularised evolution, with the hooks of `tensorvine.actors.search.deephyper`."""


SPACES = ("attn", "attn-6", "attn-full", "nt3")


@dataclass(frozen=True, slots=True)
class Plan:
    """One search."""

    mode: Mode = Mode.REPOSITORY
    space: str = "attn"
    """One of `SPACES`: `attn` has 2 sub-graphs at an eighth of the published widths, `attn-6` has 6 of them,
    `attn-full` 6 at the published widths."""
    data: str = "digits"
    """A name of `data.NAMES`."""
    samples: int = 4000
    """Of the data set that is generated; `nt3` has no more than CANDLE's 1,400."""
    files: str = ""
    """With CANDLE's own files, for `nt3`; empty: the data are generated."""
    candidates: int = 1000
    """How many are evaluated, those that fail included."""
    population: int = 50
    sample: int = 5
    seed: int = 0
    keep: bool = False
    """Nothing is retired: what leaves the population stays in store."""
    search: Search = Search.EVOLUTION
    name: str = "nas"
    """Of the search: its candidates are saved as `NAME/NUMBER`."""

    def trainer(self) -> Trainer:
        """Return what builds and trains the candidates.

        Raises:
            ValueError: there is no such space, or no such data set.
        """
        if self.space == "nt3":
            return self._trainer(Nt3Space(features_of(self.data)))
        if self.space not in SPACES:
            raise ValueError(f"space: expected one of {', '.join(SPACES)}; found {self.space!r}")
        subgraphs = 2 if self.space == "attn" else 6
        space = AttnSpace(subgraphs, UNITS if self.space == "attn-full" else SMALL_UNITS)
        return self._trainer(space)

    def _trainer(self, space: AttnSpace | Nt3Space) -> Trainer:
        return Trainer(space, self.data, self.samples, self.seed, self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """Take what `to_json` gave."""
        kinds = {"mode": Mode(values["mode"]), "search": Search(values.get("search", Search.EVOLUTION))}
        return Plan(**{**values, **kinds})

    def expect_same(self, other: Plan) -> None:
        """See that a search may go on under this plan; only the number of candidates may differ.

        Raises:
            ValueError: names what differs.
        """
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs and field.name != "candidates":
                raise ValueError(f"resume: {field.name}: expected {mine!r}, as the search began; found {theirs!r}")
