"""What the other members bring, until it has been compared with what this one does: to collectives, and in messages.

Rules
- Each member tells all others what it brings to a collective as soon as it is called, in one frame, whatever the
  collective is. Collectives go on in the order of the calls, each when all have told the same.
- Small arrays travel in that frame: Gloo has no part in such a collective.
- A sender tells size and dtype of each message. Nobody waits for that to be compared: a message that does not fit meets
  nobody in Gloo (`library`).
- All here is guarded by the member's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ....store.errors import TensorMismatchError, TensorVineError
from ..brought import Content, mismatch, unlike
from ..links import PAYLOAD_BYTES, Frame
from .library import Handle, Library
from .transfer import Transfer

ALL_BYTES = 128 << 10
"""Bytes of a small array that a member sends to all others together, at most: to very many, Gloo sends less."""

Told = Mapping[int, bytes]
"""Rank -> the bytes that travelled with what it told."""
Start = Callable[[Library, int], list[Handle]]
"""Has Gloo begin a collective, given its number."""
Deliver = Callable[[Told], None]
"""Writes the result of a collective of small arrays."""


def travels(nbytes: int, others: int) -> bool:
    """Tell whether an array is small enough to travel with what is told.

    >>> travels(1 << 10, 3), travels(1 << 20, 1)
    (True, False)
    """
    return not others or (nbytes <= PAYLOAD_BYTES and nbytes * others <= ALL_BYTES)


class Pending:
    """A collective that waits until all bring the same.

    Args:
        transfer: it.
        words: what this member brings.
        deliver: ends it where the arrays travel with what is told.
        start: begins it in Gloo where they do not.
    """

    def __init__(
        self, transfer: Transfer, words: bytes, *, deliver: Deliver | None = None, start: Start | None = None
    ) -> None:
        self.transfer, self.words = transfer, words
        self.deliver, self.start = deliver, start
        self.told: dict[int, bytes] = {}
        self.error: TensorMismatchError | None = None
        """Set where a member brings something else."""


class Agreeing:
    """The collectives of a member that wait.

    Args:
        label: of the group, for errors.
        rank: this member.
        others: all other members.
    """

    def __init__(self, label: str, rank: int, others: Sequence[int]) -> None:
        self._label, self._rank, self._others = label, rank, others
        self._came: dict[int, deque[Frame]] = {peer: deque() for peer in others}
        """What has come of each, and was not compared."""
        self._open: deque[Pending] = deque()

    def add(self, pending: Pending) -> None:
        """Take a collective that has been called."""
        self._open.append(pending)

    def take(self, peer: int, frame: Frame) -> None:
        """Take what a member brings to its next collective."""
        self._came[peer].append(frame)

    def next(self) -> Pending | None:
        """Compare what has come. Return the first collective if it waits no more; it has an error, or all agree."""
        if not self._open:
            return None
        first = self._open[0]
        missing = [peer for peer in self._others if peer not in first.told]
        for peer in [peer for peer in missing if self._came[peer]]:
            frame = self._came[peer].popleft()
            words = frame.payload[: frame.address]
            if words != first.words:
                where, alike = f"{self._label}: {first.transfer.what}", [self._rank, *first.told]
                first.error = mismatch(where, {**dict.fromkeys(alike, first.words), peer: words})
                return self._open.popleft()
            first.told[peer] = frame.payload[frame.address :]
            missing.remove(peer)
        first.transfer.peers = missing or self._others
        return None if missing else self._open.popleft()

    def end_all(self, reason: TensorVineError) -> None:
        """End those that wait: nothing touches their memory."""
        for pending in self._open:
            pending.transfer.end(reason)
        self._open.clear()


class Announced:
    """What one peer announces, and what is to receive it.

    Args:
        where: which messages of which group.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._told: deque[Content] = deque()
        self._asked: deque[tuple[Transfer, Content]] = deque()

    def ask(self, transfer: Transfer, room: Content) -> TensorMismatchError | None:
        """Take a receive; gives the error where it is known not to fit."""
        if self._told:
            return unlike(self._where, self._told.popleft(), room)
        self._asked.append((transfer, room))
        return None

    def tell(self, sent: Content) -> tuple[Transfer, TensorMismatchError] | None:
        """Take an announcement; gives the receive that it does not fit, and the error."""
        if not self._asked:
            self._told.append(sent)
            return None
        transfer, room = self._asked.popleft()
        error = unlike(self._where, sent, room)
        return None if error is None else (transfer, error)
