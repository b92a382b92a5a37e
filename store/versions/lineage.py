"""Who derives from whom: the versions that exist, those that are lost, and those that they come from.

Rules
- A version that is retired stays for as long as a version that exists derives from it, through however many
  generations; then it is forgotten, and so are its ancestors that nothing else derives from.
- Retired versions whose parent is the same name's preceding number are kept as runs: eight bytes each, whatever their
  number. All others are kept one by one.
- A chain ends with the first version that is not known here.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from ..refs import ModelRef

NONE = math.nan
"""In a run: had no quality."""


class Run:
    """Retired versions of one name, without a gap, each the child of the one before."""

    __slots__ = ("first", "qualities")

    def __init__(self, first: int, qualities: array[float]) -> None:
        self.first = first
        self.qualities = qualities

    @property
    def end(self) -> int:
        """The version after the last."""
        return self.first + len(self.qualities)


class Lineage:
    """The lineage of versions.

    >>> lineage = Lineage()
    >>> first, second = ModelRef("m", 1), ModelRef("m", 2)
    >>> lineage.add(first, None)
    >>> lineage.add(second, first, 0.5)
    >>> lineage.retire(first)
    >>> lineage.chain(second) == [second, first], lineage.offspring([first]) == [second]
    (True, True)
    >>> lineage.retire(second)
    >>> second in lineage, first in lineage
    (False, False)
    """

    def __init__(self) -> None:
        self._parents: dict[str, dict[int, ModelRef | None]] = {}
        """All versions that are in no run, by name."""
        self._retired: set[ModelRef] = set()
        """Those of them that exist no more."""
        self._runs: dict[str, list[Run]] = {}
        self._qualities: dict[ModelRef, float] = {}
        self._children: dict[ModelRef, dict[ModelRef, None]] = {}
        """Without the children that are in a run: these follow their parents by number."""

    def add(self, ref: ModelRef, parent: ModelRef | None, quality: float | None = None) -> None:
        """Learn that a version exists; of one that does already, its quality, and its parent if that was not known."""
        if not self.lives(ref):
            self._revive(ref)
            self._enter(ref, parent)
        elif parent is not None and self.parent(ref) is None:
            self._enter(ref, parent)
        if quality is not None:
            self.set_quality(ref, quality)

    def retire(self, ref: ModelRef) -> None:
        """Learn that a version exists no more; an unknown one is no error."""
        if self.lives(ref):
            self._retired.add(ref)
            self._shrink(ref)
            self._forget(ref)

    def add_retired(self, facts: Iterable[tuple[ModelRef, ModelRef | None]]) -> None:
        """Learn the parents of versions that exist no more; those that nothing derives from are not kept."""
        new = [(ref, parent) for ref, parent in facts if ref not in self]
        for ref, parent in new:
            self._enter(ref, parent)
            self._retired.add(ref)
            self._shrink(ref)
        for ref, _ in new:
            self._forget(ref)

    def set_quality(self, ref: ModelRef, quality: float) -> None:
        """Learn the quality of a known version."""
        run = self._run(ref)
        if run is not None:
            run.qualities[ref.version - run.first] = quality
        else:
            self._qualities[ref] = quality

    # ---- what there is ----------------------------------------------------------------------------------

    def __contains__(self, ref: ModelRef) -> bool:
        """Tell whether a version is known: it exists, or something derives from it."""
        return ref.version in self._parents.get(ref.name, ()) or self._run(ref) is not None

    def lives(self, ref: ModelRef) -> bool:
        """Tell whether a version exists, or is lost."""
        return ref.version in self._parents.get(ref.name, ()) and ref not in self._retired

    def parent(self, ref: ModelRef) -> ModelRef | None:
        """Return the parent of a known version."""
        known = self._parents.get(ref.name, {})
        return known[ref.version] if ref.version in known else ModelRef(ref.name, ref.version - 1)

    def living(self, name: str) -> dict[int, ModelRef | None]:
        """Return the versions of a name that exist, or are lost, with their parents."""
        known = self._parents.get(name, {})
        return {version: parent for version, parent in known.items() if ModelRef(name, version) not in self._retired}

    def past(self, name: str) -> dict[int, ModelRef | None]:
        """Return the retired versions of a name that are in no run, with their parents."""
        known = self._parents.get(name, {})
        return {version: parent for version, parent in known.items() if ModelRef(name, version) in self._retired}

    def runs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the runs of a name, as the first version and the one after the last."""
        return tuple((run.first, run.end) for run in self._runs.get(name, ()))

    def known(self, name: str) -> Iterator[tuple[ModelRef, ModelRef | None]]:
        """List the versions of a name that are known, with their parents."""
        for version, parent in self._parents.get(name, {}).items():
            yield ModelRef(name, version), parent
        for first, end in self.runs(name):
            for version in range(first, end):
                yield ModelRef(name, version), ModelRef(name, version - 1)

    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Return `ref` and its ancestors as far as they are known; the last one's parent may go on elsewhere.

        Manifests may say that two versions derive from each other: each is named once.
        """
        chain = {ref: None}
        while ref in self and (parent := self.parent(ref)) is not None and parent not in chain:
            chain[parent] = None
            ref = parent
        return list(chain)

    def offspring(self, refs: Iterable[ModelRef]) -> list[ModelRef]:
        """Return all descendants of `refs` that are known."""
        found: dict[ModelRef, None] = {}
        frontier = list(refs)
        while frontier:
            for child in self._children_of(frontier.pop()):
                if child not in found:
                    found[child] = None
                    frontier.append(child)
        return list(found)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities of those of `refs` that had one."""
        found: dict[ModelRef, float] = {}
        for ref in refs:
            run = self._run(ref)
            quality = self._qualities.get(ref) if run is None else run.qualities[ref.version - run.first]
            if quality is not None and (run is None or not math.isnan(quality)):
                found[ref] = quality
        return found

    # ---- within -----------------------------------------------------------------------------------------

    def _enter(self, ref: ModelRef, parent: ModelRef | None) -> None:
        self._parents.setdefault(ref.name, {})[ref.version] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[ref] = None

    def _revive(self, ref: ModelRef) -> None:
        """Have a retired version that is known be none."""
        run = self._run(ref)
        if run is not None:
            at, runs = ref.version - run.first, self._runs[ref.name]
            rest = run.qualities[at + 1 :]
            del run.qualities[at:]
            if rest:
                runs.insert(runs.index(run) + 1, Run(ref.version + 1, rest))
            self._cut(ref.name, run)
        self._retired.discard(ref)

    def _cut(self, name: str, run: Run) -> None:
        """Let go of a run if it is empty."""
        if not run.qualities:
            self._runs[name].remove(run)
            if not self._runs[name]:
                del self._runs[name]

    def _children_of(self, ref: ModelRef) -> list[ModelRef]:
        after = ModelRef(ref.name, ref.version + 1)
        return [*self._children.get(ref, ()), *([after] if self._run(after) is not None else ())]

    def _run(self, ref: ModelRef) -> Run | None:
        """Return the run that a version is in."""
        runs = self._runs.get(ref.name)
        if runs is None:
            return None
        at = bisect_right(runs, ref.version, key=_first) - 1
        return runs[at] if at >= 0 and ref.version < runs[at].end else None

    def _shrink(self, ref: ModelRef) -> None:
        """Put a retired version into a run if it fits into one."""
        parent, quality = self._parents[ref.name][ref.version], self._qualities.get(ref, NONE)
        follows = parent is not None and parent.name == ref.name and parent.version == ref.version - 1
        if not follows or (ref in self._qualities and math.isnan(quality)):
            return
        self._drop(ref)
        runs = self._runs.setdefault(ref.name, [])
        at = bisect_right(runs, ref.version, key=_first)
        if at and runs[at - 1].end == ref.version:
            at -= 1
            runs[at].qualities.append(quality)
        else:
            runs.insert(at, Run(ref.version, array("d", [quality])))
        if at + 1 < len(runs) and runs[at + 1].first == runs[at].end:
            runs[at].qualities.extend(runs.pop(at + 1).qualities)

    def _forget(self, ref: ModelRef) -> None:
        """Forget a retired version that nothing derives from, and its ancestors likewise."""
        current: ModelRef | None = ref
        while current is not None and not self._children_of(current):
            run = self._run(current)
            if run is not None:  # nothing follows it: it is the run's last
                run.qualities.pop()
                self._cut(current.name, run)
                current = ModelRef(current.name, current.version - 1)
            elif current in self._retired:
                current = self._drop(current)
            else:
                return

    def _drop(self, ref: ModelRef) -> ModelRef | None:
        """Take a version out of those that are kept one by one; gives its parent."""
        known = self._parents[ref.name]
        parent = known.pop(ref.version)
        if not known:
            del self._parents[ref.name]
        self._retired.discard(ref)
        self._qualities.pop(ref, None)
        if parent is not None:
            children = self._children[parent]
            del children[ref]
            if not children:
                del self._children[parent]
        return parent


def _first(run: Run) -> int:
    return run.first
