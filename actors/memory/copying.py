"""Copies of many bytes by two threads: one alone does not reach the memory's bandwidth.

Rules
- An exception that a signal handler raises can end the caller's wait while the helper still writes. The helper's task
  refers to the targets until it ends, so memory may be reused only once no array refers to it. What runs in an `except`
  or `finally` of the caller proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, wait

import numpy as np

from ...store.arrays import as_bytes

PIECE_BYTES = 4 << 20
"""Copies are dealt out to the threads in pieces of about this size."""
Pair = tuple[np.ndarray, np.ndarray]
"""(target, source) of one shape and dtype."""


def copy_all(pairs: Iterable[Pair], helper: Executor) -> None:
    """Copy sources to their targets; `helper` copies half of many bytes."""
    pieces = [piece for target, source in pairs for piece in _cut(target, source)]
    if sum(target.nbytes for target, _ in pieces) <= PIECE_BYTES:
        _run(pieces)
        return
    other = helper.submit(_run, pieces)
    try:
        _run(pieces)
    finally:
        pieces.clear()  # after a failure the helper stops at its next piece
        wait([other])
    other.result()


def _cut(target: np.ndarray, source: np.ndarray) -> list[Pair]:
    """Cut a long contiguous copy into pieces."""
    if source.nbytes <= PIECE_BYTES or not (source.flags.c_contiguous and target.flags.c_contiguous):
        return [(target, source)] if source.nbytes else []
    to, whence = as_bytes(target), as_bytes(source)
    starts = range(0, source.nbytes, PIECE_BYTES)
    return [(to[start : start + PIECE_BYTES], whence[start : start + PIECE_BYTES]) for start in starts]


def _run(pieces: list[Pair]) -> None:
    """Copy until no piece is left; two threads may share one list."""
    while pieces:
        try:
            piece = pieces.pop()
        except IndexError:  # the other thread took it
            return
        np.copyto(*piece)
