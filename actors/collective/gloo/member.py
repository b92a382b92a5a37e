"""Groups over TCP by Gloo.

Rules
- Gloo moves the bytes in a thread of its own, without Python's lock. Messages go whole: pieces were never faster.
- Gloo compares nothing: wrong numbers come, or the process ends. So all that could differ is compared here
  (`agreeing`). Gloo begins a collective when all ranks have told that they bring the same; those of small arrays, and
  barriers, end with that. A message that does not fit is not received, and both ends hear of it.
- An all-gather is a message from each rank to each other one, straight from and into the array.
- Dtypes that Gloo does not reduce (small and unsigned integers, booleans, complex numbers, float8) are gathered from
  all ranks and combined here, in the order of the ranks (`reduction`); n ranks need n times the memory for it.
- A mean is the sum, divided at the end, in `wait`; integers have none.
- What is under way is kept by the group until it has ended, whether or not somebody waits for it.
- In the middle of a long message Gloo notices neither that its connection ended nor that it was cut: who waits then
  hears who died, or gave up, at the end of the operation's time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from ....store.arrays import Array, dtype_name
from ....store.errors import TensorMismatchError, TensorVineError
from ....store.waiting import Deadline
from ..brought import Brought, Content, code_of
from ..buffers import Bytes, flat, typed
from ..links import Frame, Link
from ..member import Member, Seat, TimedOutError
from ..operation import Operation
from ..reduction import Numbers, Reduction
from . import library as gloo_library
from .agreeing import Agreeing, Announced, Deliver, Pending, Start, Told, travels
from .library import NATIVE, Handle, Library
from .store import VALUE, Values
from .transfer import Kept, Transfer

BROUGHT, SENT = VALUE + 1, VALUE + 2
"""Kinds of frames: what the sender brings to a collective; size and dtype of a message."""


class GlooGroup(Member[Array]):
    """One member's end of a group over Gloo; `GlooBackend.join` makes it."""

    backend: ClassVar[str] = "gloo"

    def __init__(self, seat: Seat, timeout: float, links: Mapping[int, Link]) -> None:
        super().__init__(seat, timeout, links)
        self._library: Library | None = None
        self._values: Values | None = Values(self.standing, self.others, self._connections.post_all)
        """What Gloo's ends must know of each other, until they are connected."""
        self._posting = threading.Lock()
        """Keeps the order of the calls; what is done under it waits for nobody."""
        self._lanes: dict[tuple[bool, int], Kept] = {}
        """(Sends, peer) -> messages."""
        self._announced = {
            peer: Announced(f"{self.label}: message from rank {peer} to rank {self.rank}") for peer in self.others
        }
        self._collectives = Kept(ordered=False)
        self._agreeing = Agreeing(self.label, self.rank, self.others)

    def attach(self, host: str, deadline: Deadline) -> None:
        """Make Gloo connect the members; arguments as of `library.connected`.

        Raises:
            OperationTimeoutError: some did not come in time.
            PeerLostError: one died meanwhile.
        """
        values = self._values
        if not self.others or values is None:
            return
        try:
            self._library = gloo_library.connected(self.rank, self.size, host, values, deadline)
        except (RuntimeError, ConnectionError, TimedOutError) as exc:
            joining = Operation(self, "connect", self.others, deadline.left())
            if not isinstance(exc, TimedOutError) and not gloo_library.late(exc):
                raise self.fail(joining, exc) from exc
            self.late(joining)
            self.standing.check()
        finally:
            self._values = None

    def _memory(self, array: object, where: str, *, writes: bool) -> Array:
        return typed(array, where) if writes else flat(array, where)

    def _numbers(self, memory: Array) -> Numbers:
        return Numbers(memory.dtype, memory.size)

    # ---- messages -------------------------------------------------------------------------------------------

    def _send(self, memory: Array, to: int, seconds: float) -> Transfer:
        return self._message(memory, to, seconds, sends=True)

    def _receive(self, memory: Array, source: int, seconds: float) -> Transfer:
        return self._message(memory, source, seconds, sends=False)

    def _message(self, memory: Array, peer: int, seconds: float, *, sends: bool) -> Transfer:
        content = Content(memory.nbytes, code_of(dtype_name(memory.dtype)))
        what = f"{'send' if sends else 'recv'} of {content.nbytes} bytes"
        self._enter(what, [peer])
        start = gloo_library.send if sends else gloo_library.receive
        transfer = Transfer(self, what, [peer], seconds)
        try:
            with self._posting:
                lane = self._lanes.setdefault((sends, peer), Kept(ordered=True))
                if sends:
                    self._connections.post(peer, Frame(SENT, lane.number, content.nbytes, code=content.code))
                else:
                    self._expect(peer, transfer, content)
                raw = memory.view(np.uint8)
                transfer.handles = [start(self._running(), raw, peer, lane.number, code=content.code)]
                lane.add(transfer)
        except (RuntimeError, TensorMismatchError) as exc:
            raise self.fail(transfer, exc) from exc
        return transfer

    def _expect(self, peer: int, transfer: Transfer, room: Content) -> None:
        with self._changed:
            error = self._announced[peer].ask(transfer, room)
        if error is not None:
            raise error

    # ---- collectives ----------------------------------------------------------------------------------------

    def _broadcast(self, memory: Array, root: int, words: Brought, seconds: float) -> Transfer:
        raw = memory.view(np.uint8)

        def deliver(told: Told) -> None:
            if root != self.rank:
                raw[:] = np.frombuffer(told[root], np.uint8)

        if self._travels(raw):
            return self._ended_by_telling(words, seconds, deliver, raw if root == self.rank else None)
        return self._carried(words, seconds, lambda library, _: [gloo_library.broadcast(library, raw, root, seconds)])

    def _all_gather(self, memory: Array, bounds: Sequence[int], words: Brought, seconds: float) -> Transfer:
        parts = [memory[first:end].view(np.uint8) for first, end in pairwise(bounds)]

        def deliver(told: Told) -> None:
            for peer, content in told.items():
                parts[peer][:] = np.frombuffer(content, np.uint8)

        if self._travels(memory[bounds[0] : bounds[-1]]):
            return self._ended_by_telling(words, seconds, deliver, parts[self.rank])
        return self._exchanged(words, seconds, parts[self.rank], parts)

    def _all_reduce(self, memory: Array, reduction: Reduction, words: Brought, seconds: float) -> Transfer:
        dtype, raw = reduction.name, memory.view(np.uint8)
        if self._travels(memory):

            def deliver(told: Told) -> None:
                rows = [
                    memory if rank == self.rank else np.frombuffer(told[rank], memory.dtype)
                    for rank in range(self.size)
                ]
                reduction.blocks(memory.size).combine(rows, memory)

            return self._ended_by_telling(words, seconds, deliver, raw)
        if dtype not in NATIVE:
            return self._combined(memory, reduction, words, seconds)

        def start(library: Library, _: int) -> list[Handle]:
            return [gloo_library.all_reduce(library, raw, dtype, reduction.op, seconds)]

        def divide() -> None:
            gloo_library.divide(raw, dtype, self.size)

        return self._carried(words, seconds, start, divide if reduction.op == "mean" else None)

    def _combined(self, memory: Array, reduction: Reduction, words: Brought, seconds: float) -> Transfer:
        """Reduce what Gloo does not: get all arrays, and combine them here."""
        arrays = np.empty((self.size, memory.size), memory.dtype)
        blocks = reduction.blocks(memory.size)

        def combine() -> None:
            blocks.combine([memory if rank == self.rank else row for rank, row in enumerate(arrays)], memory)

        return self._exchanged(words, seconds, memory.view(np.uint8), [row.view(np.uint8) for row in arrays], combine)

    def _barrier(self, words: Brought, seconds: float) -> Transfer:
        return self._ended_by_telling(words, seconds, lambda _: None, None)

    def _exchanged(
        self, words: Brought, seconds: float, own: Bytes, parts: Sequence[Bytes], then: Callable[[], None] | None = None
    ) -> Transfer:
        others = {peer: parts[peer] for peer in self.others}
        return self._carried(
            words, seconds, lambda library, number: gloo_library.exchange(library, own, others, number), then
        )

    def _travels(self, array: Array) -> bool:
        return travels(array.nbytes, len(self.others))

    def _ended_by_telling(self, words: Brought, seconds: float, deliver: Deliver, own: Bytes | None) -> Transfer:
        """Start a collective whose arrays travel with what is told; `own` is what this member has to give."""
        transfer = Transfer(self, words.verb, self.others, seconds, 0)
        content = b"" if own is None or not self.others else own.tobytes()
        return self._collective(Pending(transfer, words.words, deliver=deliver), content)

    def _carried(
        self, words: Brought, seconds: float, start: Start, then: Callable[[], None] | None = None
    ) -> Transfer:
        """Start a collective that Gloo carries; `then` is done when it is done."""
        transfer = Transfer(self, words.verb, self.others, seconds, 0, then)
        return self._collective(Pending(transfer, words.words, start=start), b"")

    def _collective(self, pending: Pending, content: bytes) -> Transfer:
        """Tell the others what this member brings to a collective; it begins when they have told the same."""
        transfer, words = pending.transfer, pending.words
        self._enter(transfer.what, self.others)
        with self._posting:
            with self._changed:
                self.standing.check()
                self._begun += 1
                transfer.number = self._begun
                self._agreeing.add(pending)
            self._collectives.add(transfer)
            self._connections.post_all(Frame(BROUGHT, self._begun, len(content), len(words), payload=words + content))
            differing = self._advance()
        self._fail_all(differing)
        return transfer

    def _advance(self) -> list[Pending]:
        """Begin, or end, what waits no more. Return those that differ, for `_fail_all`; the lock of posting is held."""
        while True:
            with self._changed:
                pending = self._agreeing.next() if self.standing.reason is None else None
                if pending is None:
                    return []
                if pending.error is not None:
                    return [pending]
                if pending.deliver is not None:
                    pending.deliver(pending.told)
                    pending.transfer.end()
            if pending.start is not None:
                self._begin(pending.transfer, pending.start)
            with self._changed:
                self._changed.notify_all()

    def _begin(self, transfer: Transfer, start: Start) -> None:
        try:
            transfer.handles = start(self._running(), transfer.number or 0)
        except RuntimeError as exc:  # told to who waits: this thread may be the one that hears why
            transfer.trouble = exc

    def _fail_all(self, differing: Sequence[Pending]) -> None:
        for pending in differing:
            if pending.error is not None:
                self.fail(pending.transfer, pending.error)

    # ---- what the connections tell --------------------------------------------------------------------------

    def _take(self, peer: int, frame: Frame) -> None:
        values = self._values
        if frame.kind == BROUGHT:
            with self._posting:
                with self._changed:
                    self._agreeing.take(peer, frame)
                differing = self._advance()
            self._fail_all(differing)
        elif frame.kind == SENT:
            with self._changed:
                found = self._announced[peer].tell(Content(frame.nbytes, frame.code))
            if found is not None:
                self.fail(*found)
        elif values is not None and frame.kind == VALUE:
            values.take(peer, frame)

    # ---- the end --------------------------------------------------------------------------------------------

    def _running(self) -> Library:
        if self._library is None:
            raise RuntimeError("it is closed")
        return self._library

    def _end_all(self, reason: TensorVineError) -> None:
        self._agreeing.end_all(reason)

    def _cut(self) -> None:
        with self._posting:  # what is being begun is ended as well
            library = self._library
            if library is not None:
                gloo_library.cut(library, self.others)

    def _release(self) -> None:
        with self._posting:
            self._library = None
            self._lanes.clear()
            self._collectives.clear()
