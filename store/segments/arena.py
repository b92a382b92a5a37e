"""The arena's bookkeeping: which part of a shard's preallocated memory belongs to whom (DStore, section 3).

Rules
- First fit from the low end, so that pages touched once are used again and again: a fresh page costs ten times
  what copying into it does.
- Neighbouring free parts are one. Every part has an owner: a save, a shard that fills it itself, or `KEPT`
  once a segment lies in it.
- A grant may be shorter than what was asked for: the saver fills what it got and asks again. So two savers that
  each hold a part never wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..holders import Filling, Owner, Request
from .segment import padded

KEPT = Filling("kept")
"""Owner of parts that hold segments."""
PAGES = Filling("pages")
"""Owner of a part, otherwise free, for the moment in which its pages go back to the system."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of an arena; the handle of a segment that lies there."""

    offset: int
    length: int


class Arena:
    """Allocator over `capacity` bytes.

    >>> from tensorvine.store.holders import Request
    >>> arena, one, other = Arena(256), Request("client", 1), Request("client", 2)
    >>> arena.grant(one, [100, 100]), arena.grant(other, [64])
    ([0, 128], [])
    >>> arena.free(0)
    >>> arena.grant(other, [64, 128], least=2), arena.grant(other, [64, 128])
    ([], [0])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, tuple[int, Owner]] = {}
        self._parts = Counter[Owner]()
        """How many parts each owner has; those that have none are not in it."""
        self._free: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    def used(self, *, kept: bool) -> int:
        """Sum the bytes, padding included, of parts that hold segments, or of those that savers fill."""
        return sum(length for length, owner in self._taken.values() if (owner == KEPT) == kept and owner != PAGES)

    @property
    def free_bytes(self) -> int:
        """Sum the bytes that nobody has."""
        return sum(end - start for start, end in self._free)

    @property
    def free_spans(self) -> list[tuple[int, int]]:
        """Where the bytes that nobody has begin and end, by address."""
        return list(self._free)

    def grant(self, owner: Owner, sizes: Sequence[int], least: int = 1) -> list[int]:
        """Return offsets for as many of `sizes` as fit now, in order; none where fewer than `least` do."""
        wanted = [padded(size) or padded(1) for size in sizes]
        if sum(wanted[:least]) > self.free_bytes:
            return []
        before = list(self._free)
        offsets: list[int] = []
        for length in wanted:
            offset = self._first_fit(length, owner)
            if offset is None:
                break
            offsets.append(offset)
        if len(offsets) >= least:
            return offsets
        self._free = before
        for offset in offsets:
            self._drop(offset)
        return []

    def claim(self, offset: int, length: int, owner: Owner) -> bool:
        """Hand just this part to an owner, if all of it is free."""
        for position, (start, end) in enumerate(self._free):
            if start <= offset and offset + length <= end:
                beside = ((start, offset), (offset + length, end))
                self._free[position : position + 1] = [span for span in beside if span[0] < span[1]]
                self._take(offset, length, owner)
                return True
        return False

    def give(self, offset: int, owner: Owner) -> None:
        """Hand the part that starts at `offset` to another owner."""
        length, before = self._taken[offset]
        self._taken[offset] = (length, owner)
        self._parts[owner] += 1
        self._has_one_less(before)

    def free(self, offset: int) -> None:
        """Take back the part that starts at `offset`; an unknown one is no error."""
        if offset not in self._taken:
            return
        spans = sorted([*self._free, (offset, offset + self._drop(offset))])
        merged = [spans[0]]
        for start, end in spans[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def parts_of(self, owner: Owner) -> list[Part]:
        """List what `owner` was granted; looks at all parts, if it has any."""
        if owner not in self._parts:
            return []
        return [Part(offset, length) for offset, (length, who) in self._taken.items() if who == owner]

    def owners(self) -> set[Owner]:
        """Who fills a part now."""
        return self._parts.keys() - {KEPT, PAGES}

    @property
    def saving(self) -> bool:
        """Whether a save fills a part now; one whose memory waits for it does not."""
        return any(isinstance(owner, Request) for owner in self._parts)

    def owner_of(self, offset: int) -> Owner | None:
        """Who holds the part that starts at `offset`."""
        taken = self._taken.get(offset)
        return taken[1] if taken else None

    def _first_fit(self, length: int, owner: Owner) -> int | None:
        for position, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[position : position + 1] = [(start + length, end)] if end - start > length else []
                self._take(start, length, owner)
                return start
        return None

    def _take(self, offset: int, length: int, owner: Owner) -> None:
        self._taken[offset] = (length, owner)
        self._parts[owner] += 1

    def _drop(self, offset: int) -> int:
        """Have nobody own a part any more; gives its length."""
        length, owner = self._taken.pop(offset)
        self._has_one_less(owner)
        return length

    def _has_one_less(self, owner: Owner) -> None:
        self._parts[owner] -= 1
        if not self._parts[owner]:
            del self._parts[owner]
