"""The staging area's bookkeeping: which part of a preallocated buffer belongs to whom (DStore, section 3).

Rules
- First fit from the low end, so that pages touched once are used again and again.
- Neighbouring free parts are one. Every part has an owner and can be taken back by owner.
- A grant may be shorter than what was asked for: the caller stages what it got and asks again. So two savers
  that each hold a part never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from .segment import padded


class StagingArea:
    """Allocator over `capacity` bytes.

    >>> area = StagingArea(256)
    >>> area.grant("a", [100, 100]), area.grant("b", [64])
    ([0, 128], [])
    >>> area.free(0)
    >>> area.grant("b", [64])
    [0]
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, tuple[int, str]] = {}
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def used(self) -> int:
        """Bytes granted, padding included."""
        return sum(length for length, _ in self._taken.values())

    def grant(self, owner: str, sizes: Sequence[int]) -> list[int]:
        """Give offsets for as many of `sizes` as fit now, in order; perhaps none."""
        offsets: list[int] = []
        for size in sizes:
            offset = self._first_fit(padded(size) or padded(1), owner)
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def free(self, offset: int) -> None:
        """Take back the part that starts at `offset`; an unknown one is no error."""
        taken = self._taken.pop(offset, None)
        if taken is None:
            return
        spans = sorted([*self._free, (offset, offset + taken[0])])
        merged = [spans[0]]
        for start, end in spans[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def free_owner(self, owner: str) -> None:
        """Take back all that `owner` was granted."""
        for offset in [offset for offset, (_, who) in self._taken.items() if who == owner]:
            self.free(offset)

    def owners(self) -> set[str]:
        """Who holds a part."""
        return {owner for _, owner in self._taken.values()}

    def owner_of(self, offset: int) -> str | None:
        """Who holds the part that starts at `offset`."""
        taken = self._taken.get(offset)
        return taken[1] if taken else None

    def _first_fit(self, length: int, owner: str) -> int | None:
        for position, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[position : position + 1] = [(start + length, end)] if end - start > length else []
                self._taken[start] = (length, owner)
                return start
        return None
