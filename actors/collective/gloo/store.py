"""What the ends of Gloo must know of each other to connect: PyTorch has them look it up in a store.

Rules
- What one member sets goes to all others at once, by the connections that the members have already. So nobody else
  reads it or writes it; PyTorch's own store would listen at a port, for as long as the group lives, to whoever comes.
- It is for the time until Gloo has connected all members. A value is waited for until the join's deadline, or until
  somebody is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ....store.waiting import Deadline
from ..links import OWN, PAYLOAD_BYTES, Frame
from ..member import TimedOutError
from ..standing import Standing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VALUE = OWN
"""A frame with a piece of a key and its value; it tells the length of both."""
_END = b"\0"
"""Stands behind the key."""


class Values:
    """What the members have set, as one of them knows.

    Args:
        standing: the group's, which tells who is lost.
        others: the other members.
        post_all: sends all of them a frame.

    >>> sent: list[Frame] = []
    >>> here, there = (Values(Standing("g"), [rank], sent.append) for rank in (1, 0))
    >>> here.set("a key", b"a value")
    >>> for frame in sent:
    ...     there.take(0, frame)
    >>> there.get("a key", Deadline.after(0.0))
    b'a value'
    """

    def __init__(self, standing: Standing, others: Sequence[int], post_all: Callable[[Frame], None]) -> None:
        self._standing = standing
        self._others = others
        self._post_all = post_all
        self._values: dict[str, bytes] = {}
        self._pieces: dict[int, bytearray] = {}
        """Rank -> what has come of the value that it is sending."""

    def set(self, key: str, value: bytes) -> None:
        """Tell all."""
        content = key.encode() + _END + value
        for start in range(0, len(content), PAYLOAD_BYTES):
            self._post_all(Frame(VALUE, nbytes=len(content), payload=content[start : start + PAYLOAD_BYTES]))
        self._put(key, value)

    def take(self, peer: int, frame: Frame) -> None:
        """Take what another has told, in the thread of the connections."""
        content = self._pieces.setdefault(peer, bytearray())
        content += frame.payload
        if len(content) >= frame.nbytes:
            key, _, value = bytes(self._pieces.pop(peer)).partition(_END)
            self._put(key.decode(errors="replace"), value)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Wait for a value.

        Raises:
            TimedOutError: it did not come in time.
            ConnectionError: a member was lost, or the group broke.
        """
        standing = self._standing
        with standing.changed:
            standing.changed.wait_for(
                lambda: key in self._values or standing.reason is not None or standing.lacks(self._others),
                deadline.left(),
            )
            if key in self._values:
                return self._values[key]
            if standing.reason is not None or standing.lacks(self._others):
                raise ConnectionError(f"expected {key!r} from a member; a member was lost")
        raise TimedOutError(f"expected {key!r} from a member in time; found none")

    def _put(self, key: str, value: bytes) -> None:
        with self._standing.changed:
            self._values[key] = value
            self._standing.changed.notify_all()


def store_of(values: Values, deadline: Deadline) -> Store:
    """Make values PyTorch's store; it must be kept as long as PyTorch asks it."""
    from torch._C._distributed_c10d import Store

    class _Store(Store):
        """What Gloo calls of a store while it connects."""

        def set(self, key: str, value: str | bytes) -> None:
            values.set(key, value.encode() if isinstance(value, str) else value)

        def get(self, key: str) -> bytes:
            return values.get(key, deadline)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                values.get(key, deadline)

    return _Store()
