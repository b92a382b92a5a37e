"""Which pages of a shard's memory are made before anybody needs them, and which go back to the system.

Rules
- Made ahead is what the next save takes if it is like the largest of the last `RECENT_S` seconds, where it would be
  granted: first fit, as in `arena`. When nobody has needed memory for `IDLE_S`, at most `IDLE_BYTES` of it.
- What is free, was not needed for `IDLE_S`, is not to be made ahead, and does not lie in what was preallocated may go:
  highest addresses first, whole chunks only.
- Free memory alone: what somebody has, or still reads, is none of it.
- It knows no memory and no clock: it is told what is free, and when it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

Span: TypeAlias = tuple[int, int]
"""Where bytes begin and end."""

RECENT_S = 600.0
IDLE_S = 20.0
IDLE_BYTES = 768 << 20


class PagePlan:
    """The plan for one shard's memory.

    Args:
        size: of the memory.
        chunk: bytes that are made, or go, together.
        kept: bytes at the low end that never go.

    >>> plan, free = PagePlan(1000, 100, 0), [(250, 1000)]
    >>> plan.saved([120, 80], 5.0)
    >>> plan.ahead(free, 6.0), plan.idle(free, 6.0)
    ([(200, 500)], [(500, 1000)])
    >>> plan.used(600, 150, 7.0)
    >>> plan.idle(free, 8.0), plan.idle(free, 7.5 + IDLE_S)
    ([(800, 1000), (500, 600)], [(500, 1000)])
    """

    def __init__(self, size: int, chunk: int, kept: int) -> None:
        self._size = size
        self._chunk = chunk
        self._kept = -(-kept // chunk)
        self._used = np.full(-(-size // chunk), -math.inf)
        """When each chunk was had by somebody last."""
        self._needed = -math.inf
        """When somebody needed memory last, or was about to."""
        self._saves: list[tuple[float, tuple[int, ...]]] = []
        """Saves of late, each larger than all that came later."""

    def saved(self, sizes: Sequence[int], now: float) -> None:
        """Note that a save asked for blocks of these sizes."""
        total = sum(sizes)
        self._saves = [(when, some) for when, some in self._saves if sum(some) > total]
        self._saves.append((now, tuple(sizes)))
        self._needed = now

    def expect(self, now: float) -> bool:
        """Note that somebody came who may save. Return whether more is to be made ahead now: nobody had for long."""
        was_idle = now - self._needed >= IDLE_S
        self._needed = now
        return was_idle

    def used(self, offset: int, length: int, now: float) -> None:
        """Note that somebody had this memory until now."""
        self._used[offset // self._chunk : -(-(offset + length) // self._chunk)] = now

    def ahead(self, free: Iterable[Span], now: float) -> list[Span]:
        """Say which chunks the next save will take.

        Args:
            free: what nobody has, by address.
            now: as all other times.
        """
        self._saves = [(when, sizes) for when, sizes in self._saves if now - when < RECENT_S]
        if not self._saves:
            return []
        most = IDLE_BYTES if now - self._needed >= IDLE_S else self._size
        left, spans = list(free), list[Span]()
        for size in self._saves[0][1]:
            position = next((i for i, (start, end) in enumerate(left) if end - start >= size), None)
            if position is None or most <= 0:
                break
            start, end = left[position]
            left[position] = (start + size, end)
            spans.append((start, start + min(size, most)))
            most -= size
        return self._merged(self._outward(span) for span in spans)

    def idle(self, free: Sequence[Span], now: float) -> list[Span]:
        """Say which chunks may go back to the system, those at the highest addresses first. Arguments as of `ahead`."""
        whole = np.zeros(len(self._used), np.bool_)
        for start, end in free:
            whole[-(-start // self._chunk) : end // self._chunk] = True
        self._used[~whole] = now
        may_go = whole & (now - self._used >= IDLE_S)
        may_go[: self._kept] = False
        for start, end in self.ahead(free, now):
            may_go[start // self._chunk : -(-end // self._chunk)] = False
        edges = np.flatnonzero(np.diff(may_go, prepend=False, append=False)).reshape(-1, 2) * self._chunk
        return [(int(start), int(end)) for start, end in edges[::-1]]

    def _outward(self, span: Span) -> Span:
        start, end = span
        return start // self._chunk * self._chunk, min(-(-end // self._chunk) * self._chunk, self._size)

    @staticmethod
    def _merged(spans: Iterable[Span]) -> list[Span]:
        merged: list[Span] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged


def pieces(span: Span, most: int) -> list[Span]:
    """Cut a span into pieces of at most so many bytes, the highest first.

    >>> pieces((200, 450), 100)
    [(400, 450), (300, 400), (200, 300)]
    """
    return [(start, min(start + most, span[1])) for start in range(*span, most)][::-1]
