"""Groups over TCP by Gloo.

Rules
- Gloo moves the bytes in a thread of its own, without Python's lock. Messages go whole: pieces were never faster.
- Gloo compares nothing: wrong numbers come, or the process ends. So all that could differ is compared here
  (`agreeing`). Gloo begins a collective of large arrays when all ranks have told that they bring the same; barriers and
  those of small arrays end with that. A message that does not fit is not received, and both ends hear of it.
- An all-gather of large arrays is a message from each rank to each other one, straight from and into the array.
- All large collectives of two ranks are such messages: as many bytes travel as in a ring. Their tags are made of what
  is brought, so where that differs none is received, but by a chance of one in a billion. So they begin at once, if all
  before them agreed.
- Dtypes that Gloo does not reduce (small and unsigned integers, booleans, complex numbers, float8) are gathered from
  all ranks and combined here, in the order of the ranks (`reduction`), as small arrays and those of two ranks are; n
  ranks need n times the memory for it.
- A mean is the sum, divided at the end, in `wait`; integers have none.
- What is under way is kept by the group until it has ended, whether or not somebody waits for it.
- In the middle of a long message Gloo notices neither that its connection ended nor that it was cut: who waits then
  hears who died, or gave up, at the end of the operation's time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar
from zlib import crc32

import numpy as np

from ....store.arrays import Array
from ....store.errors import TensorMismatchError, TensorVineError
from ....store.waiting import Deadline
from ..brought import Brought
from ..buffers import Bytes, flat, typed
from ..links import Frame, Link
from ..member import Member, Seat, TimedOutError
from ..operation import Operation
from ..reduction import Numbers, Reduction
from . import library as gloo_library
from .agreeing import Agreeing, Deliver, Pending, Start, Told, travels
from .library import NATIVE, Handle, Library, exchange
from .messages import SENT, TOOK, Messages, content_of, is_small
from .store import VALUE, Values
from .transfer import Kept, Transfer

BROUGHT = VALUE + 1
"""A frame with what its sender brings to a collective."""


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
        self._messages = {
            peer: Messages(
                f"{self.label}: message from rank {peer} to rank {self.rank}", partial(self._connections.post, peer)
            )
            for peer in self.others
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
        content = content_of(memory)
        what = f"{'send' if sends else 'recv'} of {content.nbytes} bytes"
        self._enter(what, [peer])
        transfer = Transfer(self, what, [peer], seconds, agreed=not is_small(content))
        try:
            with self._posting:
                lane = self._lanes.setdefault((sends, peer), Kept(ordered=True))
                self._tell(transfer, memory, peer, lane.number, sends=sends)
                if is_small(content):
                    lane.number += 1
                    return transfer
                start = gloo_library.send if sends else gloo_library.receive
                raw = memory.view(np.uint8)
                transfer.handles = [start(self._running(), raw, peer, lane.number, code=content.code)]
                lane.add(transfer)
        except (RuntimeError, TensorMismatchError) as exc:
            raise self.fail(transfer, exc) from exc
        return transfer

    def _tell(self, transfer: Transfer, memory: Array, peer: int, number: int, *, sends: bool) -> None:
        with self._changed:
            self.standing.check()
            messages = self._messages[peer]
            error = messages.send(transfer, memory, number) if sends else messages.receive(transfer, memory)
        if error is not None:
            raise error

    # ---- collectives ----------------------------------------------------------------------------------------

    def _broadcast(self, memory: Array, root: int, words: Brought, seconds: float) -> Transfer:
        raw = memory.view(np.uint8)

        def deliver(told: Told) -> None:
            if root != self.rank:
                raw[:] = np.frombuffer(told[root], np.uint8)

        if self._travels(memory):
            return self._told_all(words, seconds, raw if root == self.rank else raw[:0], deliver)
        if self.size == 2:
            empty, other = raw[:0], self.others[0]
            own, row = (raw, empty) if root == self.rank else (empty, raw)
            return self._exchanged(words, seconds, own, {other: row})
        return self._carried(words, seconds, lambda library, _: [gloo_library.broadcast(library, raw, root, seconds)])

    def _all_gather(self, memory: Array, bounds: Sequence[int], words: Brought, seconds: float) -> Transfer:
        parts = [memory[first:end].view(np.uint8) for first, end in pairwise(bounds)]
        own, others = parts[self.rank], {peer: parts[peer] for peer in self.others}

        def deliver(told: Told) -> None:
            for peer, part in others.items():
                part[:] = np.frombuffer(told[peer], np.uint8)

        if self._travels(memory[bounds[0] : bounds[-1]]):
            return self._told_all(words, seconds, own, deliver)
        return self._exchanged(words, seconds, own, others)

    def _all_reduce(self, memory: Array, reduction: Reduction, words: Brought, seconds: float) -> Transfer:
        dtype, raw = reduction.name, memory.view(np.uint8)

        def combine(told: Mapping[int, bytes | Bytes]) -> None:
            rows = {rank: np.frombuffer(content, memory.dtype) for rank, content in told.items()}
            arrays = [memory if rank == self.rank else rows[rank] for rank in range(self.size)]
            reduction.combine(arrays, memory)

        if self._travels(memory):
            return self._told_all(words, seconds, raw, combine)
        if dtype not in NATIVE or self.size == 2:
            rows = {peer: np.empty(raw.size, np.uint8) for peer in self.others}
            return self._exchanged(words, seconds, raw, rows, lambda: combine(rows))

        def start(library: Library, _: int) -> list[Handle]:
            return [gloo_library.all_reduce(library, raw, dtype, reduction.op, seconds)]

        def divide() -> None:
            gloo_library.divide(raw, dtype, self.size)

        return self._carried(words, seconds, start, divide if reduction.op == "mean" else None)

    def _barrier(self, words: Brought, seconds: float) -> Transfer:
        return self._told_all(words, seconds, np.empty(0, np.uint8), lambda _: None)

    def _travels(self, array: Array) -> bool:
        return travels(array.nbytes, len(self.others))

    def _told_all(self, words: Brought, seconds: float, own: Bytes, deliver: Deliver) -> Transfer:
        """Start a collective whose arrays travel with what is told; `own` is what this member has to give."""
        transfer = Transfer(self, words.verb, self.others, seconds, 0)
        content = own.tobytes() if self.others else b""
        return self._collective(Pending(transfer, words.words, content=content, deliver=deliver))

    def _exchanged(
        self,
        words: Brought,
        seconds: float,
        own: Bytes,
        rows: Mapping[int, Bytes],
        then: Callable[[], None] | None = None,
    ) -> Transfer:
        """Start a collective that is a message to and from each other rank; arguments as of `exchange`."""
        code = crc32(words.words)
        transfer = Transfer(self, words.verb, self.others, seconds, 0, then)

        def start(library: Library, number: int) -> list[Handle]:
            return exchange(library, own, rows, number, code)

        return self._collective(Pending(transfer, words.words, start=start, tagged=len(self.others) == 1))

    def _carried(
        self, words: Brought, seconds: float, start: Start, then: Callable[[], None] | None = None
    ) -> Transfer:
        """Start a collective that Gloo begins when all bring the same; `then` is done when it is done."""
        transfer = Transfer(self, words.verb, self.others, seconds, 0, then)
        return self._collective(Pending(transfer, words.words, start=start))

    def _collective(self, pending: Pending) -> Transfer:
        """Tell the others what this member brings to a collective."""
        transfer, words, content = pending.transfer, pending.words, pending.content
        self._enter(transfer.what, self.others)
        with self._posting:
            with self._changed:
                self.standing.check()
                self._begun += 1
                transfer.number = self._begun
                start = self._agreeing.add(pending)
            self._collectives.add(transfer)
            self._connections.post_all(Frame(BROUGHT, self._begun, len(content), len(words), payload=words + content))
            if start is not None:
                self._begin(transfer, start)
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
                pending.transfer.agreed = True
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
                found = self._messages[peer].tell(frame)
                self._changed.notify_all()
            if found is not None:
                self.fail(*found)
        elif frame.kind == TOOK:
            with self._changed:
                if self.standing.reason is None:
                    self._messages[peer].took()
                self._changed.notify_all()
        elif values is not None and frame.kind == VALUE:
            values.take(peer, frame)

    # ---- the end --------------------------------------------------------------------------------------------

    def _running(self) -> Library:
        if self._library is None:
            raise RuntimeError("the group is closed")
        return self._library

    def _end_all(self, reason: TensorVineError) -> None:
        self._agreeing.end_all(reason)
        for messages in self._messages.values():
            messages.end_all(reason)

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
