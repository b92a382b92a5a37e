"""What two members know of the messages between them.

Rules
- A sender tells size and dtype of each message. Small messages travel with that; the sender's part has ended when the
  receiver has taken them. Up to `UNREAD` are on their way at once; more wait at the sender.
- Others travel in Gloo at the same time, and nobody waits for them to be compared: what does not fit meets nobody there
  (`library`).
- All here is guarded by the member's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ....store.arrays import Array, dtype_name
from ....store.errors import TensorMismatchError, TensorVineError
from ..brought import Content, code_of, unlike
from ..links import OWN, Frame
from .agreeing import SMALL_BYTES
from .transfer import Transfer

SENT, TOOK = range(OWN + 2, OWN + 4)
"""Kinds of frames: size and dtype of a message, and a small one itself; so a small one was taken."""
UNREAD = 32
"""Small messages that were told and not taken, at most."""


def content_of(memory: Array) -> Content:
    """Say what a message holds."""
    return Content(memory.nbytes, code_of(dtype_name(memory.dtype)))


def is_small(content: Content) -> bool:
    """Tell whether a message travels with what is told of it."""
    return content.nbytes <= SMALL_BYTES


class Messages:
    """The messages between this member and a peer.

    Args:
        where: those from the peer, for errors.
        post: sends the peer a frame.
    """

    def __init__(self, where: str, post: Callable[[Frame], None]) -> None:
        self._where = where
        self._post = post
        self._told: deque[Frame] = deque()
        """Of messages that nobody asked for yet."""
        self._asked: deque[tuple[Transfer, Array]] = deque()
        """Receives of which nothing was told yet."""
        self._unread: deque[Transfer] = deque()
        """Small messages that were told and not taken."""
        self._waiting: deque[tuple[Transfer, Array, int]] = deque()
        """Small messages that were not told, and their numbers."""

    def send(self, transfer: Transfer, memory: Array, number: int) -> None:
        """Tell of a message; a small one may wait."""
        content = content_of(memory)
        if not is_small(content):
            self._drain(len(self._waiting))  # what is told keeps the order of the calls
            self._post(Frame(SENT, number, content.nbytes, code=content.code))
        else:
            self._waiting.append((transfer, memory, number))
            self._drain(UNREAD - len(self._unread))

    def _drain(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            transfer, memory, number = self._waiting.popleft()
            content = content_of(memory)
            self._unread.append(transfer)
            self._post(Frame(SENT, number, content.nbytes, code=content.code, payload=memory.tobytes()))

    def took(self) -> None:
        """Take note that the peer took a small message."""
        self._unread.popleft().end()
        self._drain(UNREAD - len(self._unread))

    def receive(self, transfer: Transfer, memory: Array) -> TensorMismatchError | None:
        """Ask for a message; gives the error if it is known not to fit."""
        if self._told:
            return self._matched(transfer, memory, self._told.popleft())
        self._asked.append((transfer, memory))
        return None

    def tell(self, frame: Frame) -> tuple[Transfer, TensorMismatchError] | None:
        """Take what is told of a message; gives the receive that it does not fit, and the error."""
        if not self._asked:
            self._told.append(frame)
            return None
        transfer, memory = self._asked.popleft()
        error = self._matched(transfer, memory, frame)
        return None if error is None else (transfer, error)

    def _matched(self, transfer: Transfer, memory: Array, frame: Frame) -> TensorMismatchError | None:
        content = content_of(memory)
        error = unlike(self._where, Content(frame.nbytes, frame.code), content)
        if error is None and is_small(content) and not transfer.ended:
            memory.view(np.uint8)[:] = np.frombuffer(frame.payload, np.uint8)
            self._post(Frame(TOOK, frame.number))
            transfer.end()
        return error

    def end_all(self, reason: TensorVineError) -> None:
        """End those whose memory nothing touches, and forget all."""
        small = [transfer for transfer, memory in self._asked if is_small(content_of(memory))]
        for transfer in (*small, *self._unread, *(waiting[0] for waiting in self._waiting)):
            transfer.end(reason)
        for each in (self._told, self._asked, self._unread, self._waiting):
            each.clear()
