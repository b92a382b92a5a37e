"""What one clone receives in a fork: its share of each tensor from the ranks, the rest from the other clones.

Rules
- What comes is written into the memory of the clone's training, or, where pieces travel together, copied there once.
- A clone receives from each rank in the plan's order. Meanwhile, tensors that were cut are gathered among the clones:
  the first clone says what comes next, which is what it has its part of, in the order of the next forward pass. A
  training may begin its step when all parts have come, and waits for each tensor it reads.
- A clone is whole or it is nothing: any failure fails all waits, and the caller of `fork` ends the clone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ....planner.runs.forking import ForkPlan, Message
from ....store.bounds import jsontext
from ....store.bounds.allowance import SPARE_BYTES, within
from ....store.errors import ForkError, OperationTimeoutError, PeerLostError
from ....store.waiting import Deadline
from ...collective.buffers import writable
from ...collective.group import Group, Work
from ..training import Training
from .order import CLONE, RANK, ForkOrder, PeerGoneError
from .sender import Connect

AHEAD = 4
"""Messages of a stream that are asked for ahead."""


class ForkReceiver:
    """Receives the state of one clone.

    Args:
        order: the fork.
        clone: this clone, of those of all groups.
        training: what is filled.
        connect: joins a group.
    """

    def __init__(self, order: ForkOrder, clone: int, training: Training, connect: Connect) -> None:
        self._order, self._clone, self._training = order, clone, training
        self._where = f"fork {order.id}: clone {clone} of {order.run!r}"
        order.check(training.specs(), self._where)
        self._connect = connect
        self._deadline = Deadline.after(order.timeout)
        self._changed = threading.Condition()
        self._index = {spec.name: tensor for tensor, spec in enumerate(order.specs)}
        self._whole: set[int] = set()
        self._error: BaseException | None = None
        self._groups: set[Group] = set()
        self._plan: ForkPlan = order.plan()
        self._incoming = {source: self._plan.incoming(clone).get(source, []) for source in self._sources()}
        self._missing = [0] * len(order.specs)
        for messages in self._incoming.values():
            for piece in (piece for message in messages for piece in message.pieces):
                self._missing[piece.tensor] += 1
        self._open = len(self._incoming)
        self._memory = [_flat(training.memory(spec.name), spec.name) for spec in order.specs]
        for source, messages in self._incoming.items():
            self._start(self._receive, source, messages)
        self._start(self._gather)

    def received(self, timeout: float | None = None) -> None:
        """Wait until all that the ranks send has come, and the facts are restored: the next step may begin.

        Args:
            timeout: seconds; None: as long as the fork may take.

        Raises:
            ForkError: the fork failed.
            OperationTimeoutError: it did not come in time.
        """
        left = self._deadline.left() if timeout is None else timeout
        self._wait(lambda: self._open == 0, left, "the ranks' share of the state")

    def whole(self, timeout: float) -> None:
        """Wait until every tensor is whole; errors as in `received`."""
        self._wait(lambda: self._open == 0 and len(self._whole) == len(self._memory), timeout, "the whole state")

    def wait(self, name: str) -> None:
        """Wait until one tensor is whole; errors as in `received`."""
        tensor = self._index[name]
        if tensor not in self._whole or self._error is not None:
            left = self._deadline.left()
            self._wait(lambda: tensor in self._whole, left, f"tensor {name!r}")

    def fail(self, error: BaseException) -> None:
        """Give up, with the first reason given."""
        with self._changed:
            if self._error is None:
                self._error = error
            groups = list(self._groups)
            self._changed.notify_all()
        for group in groups:
            group.close()

    def _wait(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or ready(), timeout)
            if self._error is not None:
                kind = PeerGoneError if isinstance(self._error, PeerLostError) else ForkError
                raise kind(f"{self._where}: {self._error}") from self._error
            if not ready():
                raise OperationTimeoutError(
                    f"{self._where}: expected {what} within {timeout:.1f} s; it was not received"
                )

    def _sources(self) -> list[int]:
        return [source for source, clone in self._plan.pairs() if clone == self._clone]

    def _start(self, target: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            except BaseException as exc:  # noqa: BLE001  handed to all who wait
                self.fail(exc)

        threading.Thread(target=run, name="tensorvine-clone", daemon=True).start()

    def _joined(self, name: str, rank: int, size: int) -> Group:
        left = self._deadline.left()
        group = self._connect(name, rank, size, backend=self._order.transport, timeout=left)
        with self._changed:
            failed = self._error is not None
            self._groups.add(group)
        if failed:
            group.close()
        return group

    def _receive(self, source: int, messages: Sequence[Message]) -> None:
        """Receive what one rank sends."""
        with self._joined(self._order.group_name(source, self._clone), CLONE, 2) as group:
            asked: list[tuple[Work, np.ndarray]] = []
            for place, message in enumerate(messages):
                while len(asked) < AHEAD and place + len(asked) < len(messages):
                    coming = messages[place + len(asked)]
                    buffer = self._buffer(coming)
                    asked.append((group.irecv(buffer, RANK, timeout=self._deadline.left()), buffer))
                work, buffer = asked.pop(0)
                work.wait()
                self._take(message, buffer)
            if source == self._plan.counterparts[self._clone]:
                self._take_facts(group)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _buffer(self, message: Message) -> np.ndarray:
        piece, *others = message.pieces
        if others:
            return np.empty(message.nbytes, np.uint8)
        return self._memory[piece.tensor][piece.begin : piece.end]

    def _take(self, message: Message, buffer: np.ndarray) -> None:
        """Note what has come; pieces that came together go to their places."""
        if len(message.pieces) > 1:
            at = 0
            for piece in message.pieces:
                self._memory[piece.tensor][piece.begin : piece.end] = buffer[at : at + piece.nbytes]
                at += piece.nbytes
        done: list[int] = []
        with self._changed:
            for piece in message.pieces:
                self._missing[piece.tensor] -= 1
                if not self._missing[piece.tensor]:
                    done.append(piece.tensor)
        self._fill([tensor for tensor in done if tensor not in self._plan.gathered])

    def _take_facts(self, group: Group) -> None:
        length = np.zeros(1, np.int64)
        group.recv(length, RANK, timeout=self._deadline.left())
        facts = np.zeros(within(int(length[0]), SPARE_BYTES, f"{self._where}: facts"), np.uint8)
        group.recv(facts, RANK, timeout=self._deadline.left())
        self._training.restore(jsontext.mapping(facts.tobytes(), f"{self._where}: facts"))

    def _gather(self) -> None:
        """Gather the tensors that were cut."""
        forward = [self._index[name] for name in self._order.forward]
        left = [tensor for tensor in [*forward, *range(len(self._memory))] if tensor in self._plan.gathered]
        left = list(dict.fromkeys(left))
        with self._joined(f"fork/{self._order.id}/clones", self._clone, self._order.clones) as group:
            while left:
                for tensor in (chosen := self._chosen(group, left)):
                    self._await_part([tensor])
                    bounds, timeout = self._plan.gathered[tensor], self._deadline.left()
                    group.all_gather(self._memory[tensor], bounds, timeout=timeout)
                    self._fill([tensor])
                left = [tensor for tensor in left if tensor not in chosen]

    def _chosen(self, group: Group, left: Sequence[int]) -> list[int]:
        """Choose what is gathered next, of tensors in the order of the forward pass: the first clone says it to all."""
        words = np.zeros(len(left) + 1, np.int64)
        if not self._clone:
            self._await_part(left)
            ready = [tensor for tensor in left if not self._missing[tensor]]
            words[: len(ready) + 1] = [len(ready), *ready]
        group.broadcast(words, timeout=self._deadline.left())
        return words[1 : words[0] + 1].tolist()

    def _await_part(self, tensors: Sequence[int]) -> None:
        """Wait until this clone's own part of one of some tensors is there."""
        name, timeout = self._order.specs[tensors[0]].name, self._deadline.left()
        self._wait(lambda: not all(self._missing[tensor] for tensor in tensors), timeout, f"a part of tensor {name!r}")

    def _fill(self, tensors: Sequence[int]) -> None:
        """Note that tensors are whole; the caller that waits is woken once for all of them."""
        for tensor in tensors:
            self._training.filled(self._order.specs[tensor].name)
        with self._changed:
            self._whole.update(tensors)
            self._changed.notify_all()


def _flat(memory: object, name: str) -> np.ndarray:
    return writable(memory, f"memory of tensor {name!r}")
