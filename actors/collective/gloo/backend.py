"""Groups over TCP by Gloo: one `ProcessGroupGloo` per (name, epoch), so that groups may overlap.

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

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np

from ....store.arrays import dtype_name
from ..buffers import readable, typed, writable
from ..group import Op
from ..member import Member, Operation, TimedOutError, label_of
from ..mesh import Door, Link, address
from ..reduction import Reduction
from . import library as gloo_library
from .library import NATIVE, Bytes, Handle, Library
from .works import Kept, Transfer


class GlooOffer:
    """What a member has opened; its `card` tells the others how to connect.

    Args:
        host: address of this machine.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.door = Door(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.store = socket.create_server((host, 0), family=family, backlog=256)
        self.card: dict[str, Any] = {"door": self.door.card, "store": list(self.store.getsockname()[:2])}

    def close(self) -> None:
        """Close what is not in use; a second call does nothing."""
        self.door.close()
        self.store.close()


class GlooBackend:
    """Makes groups over Gloo.

    Args:
        host: address of this machine, as the others reach it; None: that of its default route.
    """

    name = "gloo"

    def __init__(self, host: str | None = None) -> None:
        self._host = host

    def offer(self) -> GlooOffer:
        """Open what the others will connect to.

        Raises:
            ImportError: PyTorch is not installed.
            OSError: the host is no address of this machine.
        """
        gloo_library.load()
        return GlooOffer(self._host or address())

    def join(
        self,
        offer: GlooOffer,
        name: str,
        *,
        epoch: int,
        rank: int,
        size: int,
        cards: Sequence[Mapping[str, Any]],
        timeout: float,
        rendezvous: object = None,
    ) -> GlooGroup:
        """Connect to all others.

        Args:
            offer: this member's; it is closed.
            name: of the group.
            epoch: of the group.
            rank: this member.
            size: how many there are.
            cards: all members', by rank.
            timeout: seconds for this, and later the group's.
            rendezvous: not needed.

        Raises:
            OperationTimeoutError: some did not come in time.
            PeerLostError: one died meanwhile.
        """
        deadline = time.monotonic() + timeout
        try:
            links = offer.door.meet(label_of(name, epoch), rank, [card["door"] for card in cards], deadline)
            group = GlooGroup(name, epoch, rank, size, timeout, links)
            try:
                group.attach(offer, cards[0]["store"], deadline)
            except BaseException:
                group.close()
                raise
        finally:
            offer.close()
        return group


class GlooGroup(Member):
    """One member's end of a group over Gloo; `GlooBackend.join` makes it."""

    backend: ClassVar[str] = "gloo"

    def __init__(self, name: str, epoch: int, rank: int, size: int, timeout: float, links: Mapping[int, Link]) -> None:
        self._library: Library | None = None
        self._posting = threading.Lock()
        """Keeps the order of the calls; what is done under it waits for nobody."""
        self._lanes: dict[tuple[str, int], Kept] = {}
        self._collectives = Kept(ordered=False)
        super().__init__(name, epoch, rank, size, timeout, links)

    def attach(self, offer: GlooOffer, store: Sequence[Any], deadline: float) -> None:
        """Make Gloo connect the members.

        Args:
            offer: this member's.
            store: host and port of rank 0's.
            deadline: of `time.monotonic`.

        Raises:
            OperationTimeoutError: some did not come in time.
            PeerLostError: one died meanwhile.
        """
        if self.size == 1:
            return
        what, others = "connect", self._others()
        try:
            self._library = gloo_library.connected(
                self.label, self.rank, self.size, offer.host, offer.store, store, deadline
            )
        except RuntimeError as exc:
            cause = TimedOutError() if gloo_library.late(exc) else exc
            raise self.failed(what, others, None, cause) from exc
        # Rank 0 has the store that others may still need to find each other.
        self.barrier(timeout=max(deadline - time.monotonic(), 0.001))

    # ---- messages -------------------------------------------------------------------------------------------

    def isend(self, array: Any, to: int, *, timeout: float | None = None) -> Operation:
        """Start to send; see `Group`."""
        return self._message("send", self._peer(to), readable(array, f"{self.label}: send"), timeout)

    def irecv(self, array: Any, source: int, *, timeout: float | None = None) -> Operation:
        """Start to receive; see `Group`."""
        return self._message("recv", self._peer(source), writable(array, f"{self.label}: recv"), timeout)

    def _message(self, way: str, peer: int, memory: Bytes, timeout: float | None) -> Operation:
        seconds = self._seconds(timeout)
        what = f"{way} of {memory.nbytes} bytes"
        self._enter(what, [peer])
        start = gloo_library.send if way == "send" else gloo_library.receive
        try:
            with self._posting:
                lane = self._lanes.setdefault((way, peer), Kept(ordered=True))
                handle = start(self._running(), memory, peer, lane.number)
                transfer = Transfer(self, what, [peer], seconds, None, [handle])
                lane.add(transfer)
        except RuntimeError as exc:
            raise self.failed(what, [peer], None, exc) from exc
        return transfer

    # ---- collectives ----------------------------------------------------------------------------------------

    def ibroadcast(self, array: Any, root: int = 0, *, timeout: float | None = None) -> Operation:
        """Start to give all what the root has; see `Group`."""
        where = f"{self.label}: broadcast"
        memory = readable(array, where) if self._root(root) == self.rank else writable(array, where)
        seconds = self._seconds(timeout)
        if not memory.size:
            return self._collective("broadcast", seconds)
        return self._collective(
            "broadcast", seconds, lambda library, _: gloo_library.broadcast(library, memory, root, seconds)
        )

    def iall_gather(
        self, array: Any, bounds: Sequence[int] | None = None, *, timeout: float | None = None
    ) -> Operation:
        """Start to give all ranks all parts; see `Group`."""
        flat = typed(array, f"{self.label}: all_gather")
        edges = self._bounds(flat.size, bounds)
        parts = [flat[first:end].view(np.uint8) for first, end in pairwise(edges)]
        return self._gathered("all_gather", self._seconds(timeout), parts[self.rank], parts)

    def iall_reduce(self, array: Any, op: Op = "sum", *, timeout: float | None = None) -> Operation:
        """Start to combine the ranks' arrays; see `Group`."""
        seconds = self._seconds(timeout)
        flat = typed(array, f"{self.label}: all_reduce")
        dtype = dtype_name(flat.dtype)
        reduction = Reduction(op, flat.dtype, 0 if dtype in NATIVE else flat.size, f"{self.label}: all_reduce")
        if not flat.size:
            return self._collective("all_reduce", seconds)
        if dtype not in NATIVE:
            return self._combined(flat, reduction, seconds)

        def start(library: Library, _: int) -> Handle:
            return gloo_library.all_reduce(library, flat.view(np.uint8), dtype, op, seconds)

        def divide() -> None:
            gloo_library.divide(flat.view(np.uint8), dtype, self.size)

        return self._collective("all_reduce", seconds, start, divide if op == "mean" else None)

    def _combined(self, flat: np.ndarray[Any, Any], reduction: Reduction, seconds: float) -> Operation:
        """Reduce what Gloo does not: get all arrays, and combine them here."""
        arrays = np.empty((self.size, flat.size), flat.dtype)
        parts = [row.view(np.uint8) for row in arrays]

        def combine() -> None:
            rows = [flat if rank == self.rank else row for rank, row in enumerate(arrays)]
            reduction.combine(rows, flat)

        return self._gathered("all_reduce", seconds, flat.view(np.uint8), parts, combine)

    def ibarrier(self, *, timeout: float | None = None) -> Operation:
        """Start to wait for all; see `Group`."""
        seconds = self._seconds(timeout)
        return self._collective("barrier", seconds, lambda library, _: gloo_library.barrier(library, seconds))

    def _gathered(
        self, what: str, seconds: float, own: Bytes, parts: Sequence[Bytes], then: Callable[[], None] | None = None
    ) -> Operation:
        others = {peer: parts[peer] for peer in self._others()}
        return self._collective(
            what, seconds, lambda library, number: gloo_library.exchange(library, own, others, number), then
        )

    def _collective(
        self,
        what: str,
        seconds: float,
        start: Callable[[Library, int], Handle | list[Handle]] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Operation:
        """Start a collective.

        Args:
            what: it, in words.
            seconds: how long it may take.
            start: starts it, given the library and its number; None: there is nothing to do.
            then: what is to be done when Gloo is done.
        """
        others = self._others()
        self._enter(what, others)
        number = None
        try:
            with self._posting:
                number = self._begun = self._begun + 1
                found = start(self._running(), number) if start is not None and others else []
                handles = cast("list[Handle]", found) if isinstance(found, list) else [found]
                transfer = Transfer(self, what, others, seconds, number, handles, then)
                self._collectives.add(transfer)
        except RuntimeError as exc:
            raise self.failed(what, others, number, exc) from exc
        return transfer

    # ---- the end --------------------------------------------------------------------------------------------

    def _running(self) -> Library:
        if self._library is None:
            raise RuntimeError("it is closed")
        return self._library

    def _cut(self) -> None:
        library = self._library
        if library is not None:
            gloo_library.cut(library, self._others())

    def _release(self) -> None:
        with self._posting:
            self._library = None
            self._lanes.clear()
            self._collectives.clear()
