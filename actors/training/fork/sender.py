"""What one rank sends in a fork: messages go out while the step that is captured is still under way.

Rules
- A message goes when all that it carries has its final value, and those before it in the plan have gone.
- Nothing is copied but small pieces, which are put together. What has not gone when its tensor is about to change is
  set aside first: one copy of it, at most this rank's share of the state.
- Only messages that are on their way must be waited for before their tensors change; they are few and of bounded size.
  A clone that does not take them in `SETTLE_S` ends the fork: the training goes on.
- Each stream to a clone has a thread of its own: a clone that is slow or dead holds up no other.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ....planner.runs.forking import Message, Piece
from ....store.errors import ForkError, OperationTimeoutError
from ....store.waiting import Deadline
from ...collective.buffers import readable
from ...collective.group import Group, Work
from ..training import Facts
from .order import CLONE, RANK, ForkOrder

log = logging.getLogger(__name__)

UNDER_WAY = 2
"""Messages of a stream that are on their way at once."""
SETTLE_S = 5.0
"""How long a training waits at most for messages on their way, before it changes what they carry."""
AGREE_S = 10.0
"""How long a training stands still, before a step after which it may be forked, until all ranks have agreed to that."""


class Connect(Protocol):
    """Joins a group; `collective.connect.connect` is one."""

    def __call__(self, name: str, rank: int, size: int, *, backend: str, timeout: float) -> Group:
        """Join, or raise what `connect` does."""
        ...


class ForkSender:
    """Sends one rank's share of a state.

    Args:
        order: the fork.
        step: after which it takes place.
        rank: this rank.
        connect: joins a group.
        deadline: until when the fork may take.
    """

    def __init__(self, order: ForkOrder, step: int, rank: int, connect: Connect, deadline: Deadline) -> None:
        self._order = order
        self._deadline = deadline
        self._step = step
        self._agreed = False
        self._where = f"fork {order.id}: rank {rank} of {order.run!r}"
        self._changed = threading.Condition()
        self._arrays: dict[int, tuple[int, np.ndarray]] = {}
        """Tensor -> bytes, and which byte of the tensor is their first."""
        self._unstable: set[int] = set()
        self._facts: bytes | None = None
        self._error: BaseException | None = None
        self._open = 0
        plan = order.plan()
        outgoing = plan.outgoing(rank)
        self._streams = [
            _Stream(clone, plan.counterparts[clone] == rank, [m for m in outgoing if m.clone == clone])
            for source, clone in plan.pairs()
            if source == rank
        ]
        self._open = len(self._streams)
        for stream in self._streams:
            args = (stream, order.group_name(rank, stream.clone), connect)
            threading.Thread(target=self._serve, args=args, name="tensorvine-fork", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to send, or the fork failed."""
        with self._changed:
            return self._error is not None or self._open == 0

    @property
    def error(self) -> BaseException | None:
        """Why the fork failed."""
        return self._error

    @property
    def step(self) -> int:
        """After which the fork takes place; as long as that has not begun, another may be ordered."""
        return self._step

    @property
    def agreed(self) -> bool:
        """Whether the fork takes place after this step at all ranks."""
        return self._agreed

    def order(self, step: int) -> None:
        """Take another step, to which the ranks have yet to agree."""
        with self._changed:
            self._step, self._agreed = step, False
            self._changed.notify_all()

    def agree(self) -> None:
        """Learn that all ranks have taken the step."""
        with self._changed:
            self._agreed = True
            self._changed.notify_all()

    def await_agreement(self, begins: int) -> None:
        """Wait until it is known whether the fork takes place before or in a step that is about to begin.

        That takes `AGREE_S` at most; then the fork fails, and the step may begin.

        Args:
            begins: that step.
        """
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._error is not None or self._agreed or self._step > begins, AGREE_S
            )
        if not known:
            expected = f"within {AGREE_S} s that all ranks agree on step {self._step}"
            self.fail(ForkError(f"{self._where}: expected {expected}; they did not"))

    def offer(self, tensor: int, array: object, stable: bool) -> None:
        """Tell that a tensor has its final value.

        Args:
            tensor: its place in the order's specs.
            array: all of it, contiguous.
            stable: its memory is not written to as long as somebody holds it.
        """
        view = readable(array, f"{self._where}: tensor {self._order.specs[tensor].name!r}")
        with self._changed:
            if tensor not in self._arrays:
                self._arrays[tensor] = (0, view)
                if not stable:
                    self._unstable.add(tensor)
                complete = [stream.came(tensor) for stream in self._streams]
                if any(complete):
                    self._changed.notify_all()

    def missing(self) -> list[int]:
        """List the tensors that were not offered."""
        with self._changed:
            return [tensor for tensor in range(len(self._order.specs)) if tensor not in self._arrays]

    def complete(self, facts: Facts) -> None:
        """Tell that all was offered, and what is no tensor."""
        with self._changed:
            self._facts = json.dumps(facts).encode()
            self._changed.notify_all()

    def settle(self) -> float:
        """Make all tensors free to be changed: wait for what is on its way, set the rest aside.

        Returns:
            Seconds that it took.
        """
        began = time.monotonic()
        try:
            with self._changed:
                for tensor in self._unstable:
                    self._set_aside(tensor)
                self._unstable.clear()
                deadline = self._deadline.sooner(SETTLE_S)
                while self._error is None and any(stream.borrows for stream in self._streams):
                    if not self._changed.wait(deadline.left()):
                        late = [stream.clone for stream in self._streams if stream.borrows]
                        raise ForkError(
                            f"{self._where}: expected clones {late} to receive the state in time; they are too slow"
                        )
        except ForkError as exc:
            self.fail(exc)
        return time.monotonic() - began

    def fail(self, error: BaseException) -> None:
        """End the fork here, with the first reason given; what is on its way is given up."""
        with self._changed:
            if self._error is not None or self._open == 0:
                return
            self._error = error
            self._arrays.clear()
            groups = [stream.group for stream in self._streams if stream.group is not None]
            self._changed.notify_all()
        for group in groups:
            group.close()

    def wait(self, timeout: float) -> bool:
        """Wait for the end, good or bad; tells whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or self._open == 0, timeout)

    def _serve(self, stream: _Stream, name: str, connect: Connect) -> None:
        try:
            left = self._deadline.left()
            with connect(name, RANK, 2, backend=self._order.transport, timeout=left) as group:
                with self._changed:
                    if self._error is not None:
                        return
                    stream.group = group
                for place, message in enumerate(stream.messages):
                    self._send(stream, group, place, message)
                while stream.works:
                    self._retire(stream)
                if stream.counterpart:
                    self._send_facts(group)
        except BaseException as exc:  # noqa: BLE001  the training goes on; the caller of `fork` is told
            error = ForkError(f"{self._where}: sending to clone {stream.clone}: {exc}")
            error.__cause__ = exc
            self.fail(error)
            return
        finally:
            with self._changed:  # a training that settles waits for none of it
                stream.unsent.clear()
                stream.works.clear()
                self._changed.notify_all()
        with self._changed:
            self._open -= 1
            if not self._open:
                self._arrays.clear()
            self._changed.notify_all()

    def _send(self, stream: _Stream, group: Group, place: int, message: Message) -> None:
        """Wait until a message is ready, and start to send it."""
        while len(stream.works) >= UNDER_WAY:
            self._retire(stream)
        with self._changed:
            stream.next = place
            self._await(lambda: not stream.lacking[place])
            if len(message.pieces) == 1:
                piece = message.pieces[0]
                payload = self._bytes(piece)
                borrowed = piece.tensor if piece.tensor in self._unstable else None
            else:
                payload = np.concatenate([self._bytes(piece) for piece in message.pieces])
                borrowed = None
            left = self._deadline.left()
            stream.works.append((group.isend(payload, CLONE, timeout=left), payload, borrowed))
            for piece in message.pieces:
                stream.unsent[piece.tensor].remove(piece)

    def _bytes(self, piece: Piece) -> np.ndarray:
        first, array = self._arrays[piece.tensor]
        return array[piece.begin - first : piece.end - first]

    def _set_aside(self, tensor: int) -> None:
        """Copy what has not been sent of a tensor; the lock is held."""
        unsent = [piece for stream in self._streams for piece in stream.unsent.get(tensor, ())]
        if unsent:
            begin, end = min(piece.begin for piece in unsent), max(piece.end for piece in unsent)
            first, array = self._arrays[tensor]
            self._arrays[tensor] = (begin, array[begin - first : end - first].copy())

    def _retire(self, stream: _Stream) -> None:
        """Wait for the oldest message that is on its way."""
        work, _, _ = stream.works[0]
        work.wait()
        with self._changed:
            stream.works.popleft()
            self._changed.notify_all()

    def _send_facts(self, group: Group) -> None:
        with self._changed:
            self._await(lambda: self._facts is not None)
            facts = self._facts or b""
        left = self._deadline.left()
        group.send(np.array([len(facts)], np.int64), CLONE, timeout=left)
        group.send(np.frombuffer(facts, np.uint8), CLONE, timeout=left)

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds; the lock is held.

        Raises:
            ForkError: the fork failed elsewhere.
            OperationTimeoutError: the step did not come in time.
        """
        came = self._changed.wait_for(lambda: self._error is not None or ready(), self._deadline.left())
        if self._error is not None:
            raise ForkError(str(self._error))
        if not came:
            raise OperationTimeoutError(f"expected step {self._step} to end within {self._order.timeout} s; it did not")


class _Stream:
    """What goes to one clone."""

    def __init__(self, clone: int, is_counterpart: bool, messages: Sequence[Message]) -> None:
        self.clone = clone
        self.counterpart = is_counterpart
        self.messages = messages
        self.group: Group | None = None
        self.works: deque[tuple[Work, np.ndarray, int | None]] = deque()
        """Under way, with the bytes, and the tensor that they are a part of if it may change."""
        self.unsent: dict[int, list[Piece]] = {}
        """Tensor -> what of it has not been started."""
        self.next = 0
        """Place of the message that is to go next."""
        self.lacking = [len({piece.tensor for piece in message.pieces}) for message in messages]
        """Tensors of each message that were not offered."""
        self._places: dict[int, set[int]] = {}
        """Tensor -> the messages that carry it."""
        for place, message in enumerate(messages):
            for piece in message.pieces:
                self.unsent.setdefault(piece.tensor, []).append(piece)
                self._places.setdefault(piece.tensor, set()).add(place)

    def came(self, tensor: int) -> bool:
        """Note that a tensor was offered; tells whether the message that is to go next has become complete by it.

        Who serves the stream is woken for that alone: to wake a thread costs the training more than what it is woken
        for.
        """
        places = self._places.get(tensor, ())
        for place in places:
            self.lacking[place] -= 1
        return self.next in places and not self.lacking[self.next]

    @property
    def borrows(self) -> bool:
        """Whether a message that is on its way lies in memory that may change."""
        return any(tensor is not None for _, _, tensor in self.works)
