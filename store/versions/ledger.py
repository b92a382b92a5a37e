"""The ledger: which version numbers were ever used in a repository, which versions exist, and what they come from.

The planner keeps one, and each shard keeps a whole one of all names, whoever is their home (docs/design/ledger.md).

Rules
- What was ever said to be used stays used. A retirement beats a life. So two ledgers are merged in any order, once or
  several times, to the same effect.
- A version that is retired leaves its number, in a range, and its place in the lineage for as long as something
  derives from it.
- Versions that are lost count as existing: they are answered by name.
- No number up to `floor` is given to a name that is not known: after a death of all that knew, it may have been used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..refs import ModelRef
from .lineage import Lineage
from .manifest import Header

FLOOR = 10**12
"""Numbers between two floors: more than a name ever uses."""
Fact = tuple[ModelRef | None, bool]
"""Of a version: its parent, and whether it exists."""
Bounds = tuple[int, ...]
"""Ranges of numbers, ascending: first, end, first, end, ... None touches the next."""


@dataclass(frozen=True, slots=True)
class ToldName:
    """What a ledger says of one name."""

    used: Bounds
    living: Mapping[int, ModelRef | None]
    """Versions that exist or are lost -> their parents."""
    past: Mapping[int, ModelRef | None]
    """Retired ones that something derives from, if they are in no run."""
    runs: tuple[tuple[int, int], ...]
    """Retired ones that something derives from, each the child of the number before: first, end."""


@dataclass(frozen=True, slots=True)
class Told:
    """A ledger, or a part of one, on its way to another."""

    names: Mapping[str, ToldName]
    floor: int = 0


class Ledger:
    """What a repository knows of its versions.

    >>> ledger, other = Ledger(), Ledger()
    >>> ledger.note({ModelRef("m", 1): (None, True), ModelRef("m", 2): (ModelRef("m", 1), True)})
    >>> other.note({ModelRef("m", 1): (None, False)})
    >>> ledger.merge(other.told())
    >>> ledger.next("m"), list(ledger.lineage.living("m")), ledger.lineage.chain(ModelRef("m", 2))[-1].version
    (3, [2], 1)
    """

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.floor = 0
        self._used: dict[str, Bounds] = {}

    def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Learn what was committed, or is over."""
        for ref, (parent, exists) in news.items():
            if not exists:
                self.lineage.retire(ref)
            elif not self.used(ref):
                self.lineage.add(ref, parent)
            self._use(ref.name, (ref.version, ref.version + 1))

    def enter(self, ref: ModelRef, parent: ModelRef | None, quality: float | None) -> None:
        """Learn that a version exists here, whatever others say."""
        self.lineage.add(ref, parent, quality)
        self._use(ref.name, (ref.version, ref.version + 1))

    def read(self, headers: Iterable[tuple[Header, bool]]) -> None:
        """Learn what is on disk: the headers of versions, and whether each exists."""
        known = sorted(headers, key=lambda pair: pair[0].ref)
        self.note({header.ref: (header.parent, exists) for header, exists in known})
        self.lineage.add_retired((header.ref, header.parent) for header, exists in known if not exists)
        for header, exists in known:
            if not exists and header.quality is not None and header.ref in self.lineage:
                self.lineage.set_quality(header.ref, header.quality)

    # ---- what there is ----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """List all names that ever had a version."""
        return list(self._used)

    def used(self, ref: ModelRef) -> bool:
        """Tell whether a number was ever used."""
        return _contains(self._used.get(ref.name, ()), ref.version)

    def retired(self, ref: ModelRef) -> bool:
        """Tell whether a number was used, by a version that exists no more or never did."""
        return self.used(ref) and not self.lineage.lives(ref)

    def highest(self, name: str) -> int:
        """Return the highest number that a name has used; 0: none."""
        bounds = self._used.get(name)
        return bounds[-1] - 1 if bounds else 0

    def next(self, name: str) -> int:
        """Return a number that a name has surely never used."""
        return max(self.highest(name), self.floor) + 1

    # ---- others' ----------------------------------------------------------------------------------------

    def told(self, names: Iterable[str] | None = None) -> Told:
        """Return it to be told to another; of some names, or of all."""
        chosen = self._used if names is None else [name for name in names if name in self._used]
        lineage = self.lineage
        parts = {n: ToldName(self._used[n], lineage.living(n), lineage.past(n), lineage.runs(n)) for n in chosen}
        return Told(parts, self.floor)

    def merge(self, told: Told) -> None:
        """Learn all that another knows."""
        self.floor = max(self.floor, told.floor)
        over: list[ModelRef] = []
        past: list[tuple[ModelRef, ModelRef | None]] = []
        for name, part in told.names.items():
            for version in self.lineage.living(name):
                if version not in part.living and _contains(part.used, version):
                    over.append(ModelRef(name, version))
            for version, parent in part.living.items():
                if not _contains(self._used.get(name, ()), version):
                    self.lineage.add(ModelRef(name, version), parent)
            past += [(ModelRef(name, version), parent) for version, parent in part.past.items()]
            for first, end in part.runs:
                past += [(ModelRef(name, v), ModelRef(name, v - 1)) for v in range(first, end)]
            self._use(name, part.used)
        self.lineage.add_retired(past)
        for ref in over:
            self.lineage.retire(ref)

    def _use(self, name: str, bounds: Bounds) -> None:
        known = self._used.get(name, ())
        if known and bounds[0] == known[-1] and len(bounds) == 2:  # what nearly always happens
            self._used[name] = (*known[:-1], bounds[1])
        elif not _covers(known, bounds):
            self._used[name] = _union(known, bounds)


def _contains(bounds: Bounds, version: int) -> bool:
    return any(bounds[i] <= version < bounds[i + 1] for i in range(len(bounds) - 2, -1, -2))


def _covers(bounds: Bounds, others: Bounds) -> bool:
    return len(others) == 2 and any(
        bounds[i] <= others[0] and others[1] <= bounds[i + 1] for i in range(0, len(bounds), 2)
    )


def _union(bounds: Bounds, others: Bounds) -> Bounds:
    """Return the ranges of both.

    >>> _union((1, 3, 7, 8), (3, 5, 10, 11))
    (1, 5, 7, 8, 10, 11)
    """
    found: list[int] = []
    for first, end in sorted((b[i], b[i + 1]) for b in (bounds, others) for i in range(0, len(b), 2)):
        if found and first <= found[-1]:
            found[-1] = max(found[-1], end)
        else:
            found += [first, end]
    return tuple(found)
