"""Where a tensor of a save is put together, of which each process of a cluster has a part.

Rules
- A process that has a slice offers it, and the shard fetches it: nobody but the shard writes into its memory.
- The same slice may be brought twice, also by two processes at once: a task of a process that was taken for dead is
  run again by another. The first to arrive is written. The save's commit fails while any is still being fetched.
- The shard records which slices it has written. The commit fails unless they cover the tensor exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from ....store.arrays import as_bytes
from ....store.errors import TensorMismatchError
from ....store.holders import Request
from ....store.segments.arena import Part
from ....store.waiting import Deadline
from ...shard.calls import ShardCalls
from ...shard.calls.copies import Piece
from ...shard.segment_memory import INLINE_BYTES
from ..session import Session
from .offer import Offer

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""What a shard fetches at a time, where the slice can be cut so."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a shard's memory. It may be sent to other processes."""

    shard: int
    save: Request
    part: Part
    offset: int
    """In the part."""
    shape: tuple[int, ...]
    itemsize: int

    def bring(self, session: Session, start: Sequence[int], array: np.ndarray, timeout: float) -> None:
        """Have a slice of the tensor put into its place.

        Args:
            session: of this process.
            start: where the slice starts, in each axis.
            array: the slice, of the tensor's dtype.
            timeout: seconds.

        Raises:
            TensorMismatchError: it does not lie within the tensor, or its elements are of another size.
            ShardUnavailableError, OperationTimeoutError: the shard died or is slow, or the save has ended.
        """
        self._check(start, array)
        deadline, what = Deadline.after(timeout), f"save {self.save}"
        arrays = list(_cut(np.asarray(array, order="C"))) if array.nbytes else []
        pieces = [self._piece(at, piece) for at, piece in _starts(start, arrays)]
        connection = session.connection(self.shard, deadline)
        if array.nbytes > INLINE_BYTES and not connection.unreached:
            reason = self._offered(session, pieces, arrays, deadline, what)
            if reason is None:
                return
            connection.unreached = True
            log.warning(
                "shard %d cannot fetch tensors from this process, they are sent in messages: %s", self.shard, reason
            )
        for piece, bytes_of in zip(pieces, arrays, strict=True):
            left, data = deadline.left_for(what), as_bytes(bytes_of).tobytes()
            place = ShardCalls.place(self.save, self.part, [replace(piece, data=data)], None, left)
            session.call(self.shard, place, left + 1.0)

    def _check(self, start: Sequence[int], array: np.ndarray) -> None:
        inside = len(start) == array.ndim == len(self.shape) and all(
            at >= 0 and at + n <= whole for at, n, whole in zip(start, array.shape, self.shape, strict=True)
        )
        if not inside or array.itemsize != self.itemsize:
            raise TensorMismatchError(
                f"save {self.save}: expected a slice of {self.shape} with {self.itemsize} bytes per element; found "
                f"{array.shape} at {tuple(start)} with {array.itemsize} bytes per element"
            )

    def _piece(self, start: Sequence[int], array: np.ndarray) -> Piece:
        stop = (at + n for at, n in zip(start, array.shape, strict=True))
        return Piece(self.offset, (*self.shape, self.itemsize), (*start, 0), (*stop, self.itemsize), None)

    def _offered(
        self, session: Session, pieces: Sequence[Piece], arrays: Sequence[np.ndarray], deadline: Deadline, what: str
    ) -> str | None:
        """Have the shard fetch the pieces; give why it cannot connect to this process."""
        try:
            offer = Offer(what, {(0, 0): arrays}, session.engine.address())
        except OSError as exc:
            return f"this process cannot listen: {exc}"
        with closing(offer):
            left = deadline.left_for(what)
            return session.call(
                self.shard, ShardCalls.place(self.save, self.part, pieces, offer.address, left), left + 1.0
            )


def _cut(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cut a slice along its first axis, into pieces of at most `PIECE_BYTES` if that is more than a row."""
    if array.ndim == 0:
        yield array
        return
    rows = max(PIECE_BYTES * len(array) // array.nbytes, 1)
    for row in range(0, len(array), rows):
        yield array[row : row + rows]


def _starts(start: Sequence[int], pieces: Sequence[np.ndarray]) -> Iterator[tuple[Sequence[int], np.ndarray]]:
    """Give each piece of a slice with where it starts in the tensor."""
    row = 0
    for piece in pieces:
        yield ((start[0] + row, *start[1:]) if piece.ndim else ()), piece
        row += len(piece) if piece.ndim else 0
