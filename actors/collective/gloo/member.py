"""Groups over TCP by Gloo.

Rules
- Gloo moves the bytes in a thread of its own, without Python's lock. Messages go whole: pieces were never faster.
- A message that is not as long as what is to receive it is waited for in vain. What Gloo does collectively (broadcast,
  all-reduce) must have one size on all ranks; of this there is no check.
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

from ....store.arrays import Array
from ....store.waiting import Deadline
from ..buffers import Bytes, flat, typed
from ..links import Frame, Link
from ..member import Member, Seat, TimedOutError
from ..operation import Operation
from ..reduction import Numbers, Reduction
from . import library as gloo_library
from .library import NATIVE, Handle, Library
from .store import VALUE, Values
from .transfer import Kept, Transfer

Start = Callable[[Library, int], list[Handle]]
"""Starts a collective, given its number."""


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
        self._collectives = Kept(ordered=False)

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
        what = f"{'send' if sends else 'recv'} of {memory.nbytes} bytes"
        self._enter(what, [peer])
        start = gloo_library.send if sends else gloo_library.receive
        transfer = Transfer(self, what, [peer], seconds)
        try:
            with self._posting:
                lane = self._lanes.setdefault((sends, peer), Kept(ordered=True))
                transfer.handles = [start(self._running(), memory.view(np.uint8), peer, lane.number)]
                lane.add(transfer)
        except RuntimeError as exc:
            raise self.fail(transfer, exc) from exc
        return transfer

    # ---- collectives ----------------------------------------------------------------------------------------

    def _broadcast(self, memory: Array, root: int, seconds: float) -> Transfer:
        if not memory.size:
            return self._collective("broadcast", seconds, _nothing)
        return self._collective(
            "broadcast",
            seconds,
            lambda library, _: [gloo_library.broadcast(library, memory.view(np.uint8), root, seconds)],
        )

    def _all_gather(self, memory: Array, bounds: Sequence[int], seconds: float) -> Transfer:
        parts = [memory[first:end].view(np.uint8) for first, end in pairwise(bounds)]
        return self._gathered("all_gather", seconds, parts[self.rank], parts)

    def _all_reduce(self, memory: Array, reduction: Reduction, seconds: float) -> Transfer:
        if not memory.size:
            return self._collective("all_reduce", seconds, _nothing)
        dtype, raw = reduction.name, memory.view(np.uint8)
        if dtype not in NATIVE:
            return self._combined(memory, reduction, seconds)

        def start(library: Library, _: int) -> list[Handle]:
            return [gloo_library.all_reduce(library, raw, dtype, reduction.op, seconds)]

        def divide() -> None:
            gloo_library.divide(raw, dtype, self.size)

        return self._collective("all_reduce", seconds, start, divide if reduction.op == "mean" else None)

    def _combined(self, memory: Array, reduction: Reduction, seconds: float) -> Transfer:
        """Reduce what Gloo does not: get all arrays, and combine them here."""
        arrays = np.empty((self.size, memory.size), memory.dtype)
        blocks = reduction.blocks(memory.size)

        def combine() -> None:
            blocks.combine([memory if rank == self.rank else row for rank, row in enumerate(arrays)], memory)

        parts = [row.view(np.uint8) for row in arrays]
        return self._gathered("all_reduce", seconds, memory.view(np.uint8), parts, combine)

    def _barrier(self, seconds: float) -> Transfer:
        return self._collective("barrier", seconds, lambda library, _: [gloo_library.barrier(library, seconds)])

    def _gathered(
        self, what: str, seconds: float, own: Bytes, parts: Sequence[Bytes], then: Callable[[], None] | None = None
    ) -> Transfer:
        others = {peer: parts[peer] for peer in self.others}
        return self._collective(
            what, seconds, lambda library, number: gloo_library.exchange(library, own, others, number), then
        )

    def _collective(self, what: str, seconds: float, start: Start, then: Callable[[], None] | None = None) -> Transfer:
        """Start a collective.

        Args:
            what: it, in words.
            seconds: how long it may take.
            start: starts it.
            then: what is to be done when Gloo is done.
        """
        self._enter(what, self.others)
        transfer = None
        with self._posting:
            self._begun += 1
            transfer = Transfer(self, what, self.others, seconds, self._begun, then)
            try:
                if self.others:
                    transfer.handles = start(self._running(), self._begun)
                self._collectives.add(transfer)
                return transfer
            except RuntimeError as exc:
                cause = exc
        raise self.fail(transfer, cause) from cause

    def _take(self, peer: int, frame: Frame) -> None:
        values = self._values
        if values is not None and frame.kind == VALUE:
            values.take(peer, frame)

    # ---- the end --------------------------------------------------------------------------------------------

    def _running(self) -> Library:
        if self._library is None:
            raise RuntimeError("it is closed")
        return self._library

    def _cut(self) -> None:
        library = self._library
        if library is not None:
            gloo_library.cut(library, self.others)

    def _release(self) -> None:
        with self._posting:
            self._library = None
            self._lanes.clear()
            self._collectives.clear()


def _nothing(_: Library, __: int) -> list[Handle]:
    return []
