"""Collectives by which each member copies from the memory of the others.

Rules
- Each collective is a number of turns: all tell where their bytes lie, then each copies what it needs, from whoever is
  there first, and says so. A member's array stays as it is until all who need it have said so.
- In an all-reduce, rank r combines part r of all arrays (`reduction`), then all copy the parts from each other.
- What is told carries what the member brings, in words. All hear so from all before any copies: whoever finds other
  words has written to no array, and neither has anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from ....store.arrays import Array
from ..buffers import Bytes
from ..group import even_bounds
from ..links import Frame
from ..reduction import Reduction

BLOCK_BYTES = 512 << 10
"""Of an array, that are combined at once: they stay in a processor's cache."""


class Turn(Protocol):
    """One member's part in one collective."""

    rank: int
    others: Sequence[int]
    """All other ranks."""

    def tell(self, peers: Iterable[int], memory: Array | None = None) -> None:
        """Tell members where memory lies, or that this member has come so far."""
        ...

    def coming(self, peers: Iterable[int]) -> Iterator[tuple[int, Frame]]:
        """Wait for what members tell; the first comes first.

        Raises:
            PeerLostError: a member died or left.
            OperationTimeoutError: a member did not come in time.
            TensorMismatchError: a member does something else.
        """
        ...

    def pull(self, peer: int, address: int, into: Bytes) -> None:
        """Copy from a member's memory; errors as in `coming`."""
        ...


Collective = Callable[[Turn], None]


def barrier(turn: Turn) -> None:
    """Wait for all."""
    turn.tell(turn.others)
    for _ in turn.coming(turn.others):
        continue


def broadcast(memory: Bytes, root: int) -> Collective:
    """Send what the root has to all ranks."""

    def run(turn: Turn) -> None:
        turn.tell(turn.others, memory if turn.rank == root else None)
        starts = {peer: frame.address for peer, frame in turn.coming(turn.others)}
        if turn.rank == root:
            for _ in turn.coming(turn.others):
                continue
            return
        turn.pull(root, starts[root], memory)
        turn.tell([root])

    return run


def all_gather(parts: Sequence[Bytes]) -> Collective:
    """Send all parts to all ranks."""

    def run(turn: Turn) -> None:
        turn.tell(turn.others, parts[turn.rank])
        for peer, frame in list(turn.coming(turn.others)):
            turn.pull(peer, frame.address, parts[peer])
            turn.tell([peer])
        for _ in turn.coming(turn.others):
            continue

    return run


def all_reduce(flat: Array, reduction: Reduction) -> Collective:
    """Combine the arrays of all ranks, in place.

    Args:
        flat: this rank's.
        reduction: how.
    """

    def run(turn: Turn) -> None:
        bounds = even_bounds(flat.size, len(turn.others) + 1)
        parts = [flat[first:end] for first, end in pairwise(bounds)]
        turn.tell(turn.others, flat)
        starts = {peer: frame.address for peer, frame in turn.coming(turn.others)}
        offset = bounds[turn.rank] * flat.itemsize
        _reduce(turn, parts[turn.rank], {peer: start + offset for peer, start in starts.items()}, reduction)
        turn.tell(turn.others, parts[turn.rank])
        for peer, frame in turn.coming(turn.others):
            turn.pull(peer, frame.address, parts[peer].view(np.uint8))
            turn.tell([peer])
        for _ in turn.coming(turn.others):
            continue

    return run


def _reduce(turn: Turn, own: Array, starts: Mapping[int, int], reduction: Reduction) -> None:
    """Combine this rank's part of all arrays, block by block.

    Args:
        turn: of this rank.
        own: its part of its own array, which becomes the result.
        starts: where that part lies at the others.
        reduction: as in `all_reduce`.
    """
    length = min(max(BLOCK_BYTES // own.itemsize, 1), own.size)
    combined, theirs = reduction.blocks(length), np.empty(length, own.dtype)

    def blocks(at: int, block: Array) -> Iterator[Array]:
        for rank in range(len(turn.others) + 1):
            if rank == turn.rank:
                yield block
            else:
                turn.pull(rank, starts[rank] + at * own.itemsize, theirs[: block.size].view(np.uint8))
                yield theirs[: block.size]

    for at in range(0, own.size, max(length, 1)):
        block = own[at : at + length]
        combined.combine(blocks(at, block), block)
