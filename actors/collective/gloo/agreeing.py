"""What the other members bring to collectives, until it has been compared with what this one does.

Rules
- Each member tells all others what it brings to a collective as soon as it is called, in one frame, whatever the
  collective is. Collectives go on in the order of the calls, each when all have told the same.
- Small arrays travel in that frame: Gloo has no part in such a collective, and takes longer. Large ones wait until all
  have told, but between two ranks: there one that is the next may begin, as Gloo would not match it with another.
- All here is guarded by the member's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ....store.errors import TensorMismatchError, TensorVineError
from ..brought import mismatch
from ..links import Frame
from .library import Handle, Library
from .transfer import Transfer

SMALL_BYTES = 256 << 10
"""Most bytes of a message, or of a collective's array, that travel with what is told."""
ALL_BYTES = 1 << 20
"""Most bytes that a member so sends to all others together: to many, Gloo sends less."""

Told = Mapping[int, bytes]
"""Rank -> the bytes that it had to give."""
Start = Callable[[Library, int], list[Handle]]
"""Has Gloo begin a collective, given its number."""
Deliver = Callable[[Told], None]
"""Writes the result of a collective of small arrays."""


def travels(nbytes: int, others: int) -> bool:
    """Tell whether an array travels with what is told; all that bring the same say the same.

    >>> travels(1 << 10, 3), travels(1 << 20, 1)
    (True, False)
    """
    return not others or (nbytes <= SMALL_BYTES and nbytes * others <= ALL_BYTES)


class Pending:
    """A collective that waits until all bring the same.

    Args:
        transfer: it.
        words: what this member brings.
        content: what travels with them.
        deliver: ends it, given all that travelled so.
        start: begins it in Gloo where nothing does.
        tagged: nobody could be met in Gloo who brings something else: it need not wait, if nothing is before it.
    """

    def __init__(
        self,
        transfer: Transfer,
        words: bytes,
        *,
        content: bytes = b"",
        deliver: Deliver | None = None,
        start: Start | None = None,
        tagged: bool = False,
    ) -> None:
        self.transfer, self.words, self.content = transfer, words, content
        self.deliver, self.start, self.tagged = deliver, start, tagged
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

    def add(self, pending: Pending) -> Start | None:
        """Take a collective that has been called. Return what begins it where that is to be done at once."""
        start = None
        if pending.tagged and not self._open:
            start, pending.start = pending.start, None
        self._open.append(pending)
        return start

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
        """End all: nothing touches their memory."""
        for pending in self._open:
            pending.transfer.end(reason)
        self._open.clear()
