"""Who derives from whom: every version that one shard was ever home to.

Rules
- A version's place and its quality outlive it: they stay when it is retired, and go when its name moves away.
- A parent may be at home elsewhere: a chain ends with the first version that is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable

from .refs import ModelRef


class Lineage:
    """The lineage of one shard's versions.

    >>> lineage = Lineage()
    >>> first, second = ModelRef("m", 1), ModelRef("m", 2)
    >>> lineage.add(first, None)
    >>> lineage.add(second, first, 0.5)
    >>> lineage.chain(second) == [second, first], lineage.offspring([first]) == [second]
    (True, True)
    """

    def __init__(self) -> None:
        self.parents: dict[ModelRef, ModelRef | None] = {}
        """All versions; changed by `add` and `remove` only."""
        self._qualities: dict[ModelRef, float] = {}
        self._children: dict[ModelRef, dict[ModelRef, None]] = {}

    def add(self, ref: ModelRef, parent: ModelRef | None, quality: float | None = None) -> None:
        """Learn of a version; of a known one, its quality."""
        self.parents[ref] = parent
        if quality is not None:
            self._qualities[ref] = quality
        if parent is not None:
            self._children.setdefault(parent, {})[ref] = None

    def remove(self, ref: ModelRef) -> None:
        """Forget a version."""
        parent = self.parents.pop(ref)
        self._qualities.pop(ref, None)
        if parent is None:
            return
        children = self._children.get(parent, {})
        children.pop(ref, None)
        if not children:
            self._children.pop(parent, None)

    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Give `ref` and its ancestors as far as this shard is their home; the last one's parent may go on."""
        chain: list[ModelRef] = []
        current: ModelRef | None = ref
        while current is not None and current in self.parents:
            chain.append(current)
            current = self.parents[current]
        if current is not None:
            chain.append(current)
        return chain

    def offspring(self, refs: Iterable[ModelRef]) -> list[ModelRef]:
        """Give all descendants of `refs` that can be reached through this shard's versions."""
        found: dict[ModelRef, None] = {}
        frontier = list(refs)
        while frontier:
            for child in self._children.get(frontier.pop(), {}):
                if child not in found:
                    found[child] = None
                    frontier.append(child)
        return list(found)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Give the qualities of those of `refs` that had one."""
        return {ref: self._qualities[ref] for ref in refs if ref in self._qualities}
