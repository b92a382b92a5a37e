"""Groups within one machine: a receiver copies straight out of the sender's memory.

Rules
- A sender says where the bytes lie; the receiver copies them, once, and says so. The sender does nothing else. Small
  messages go with what is said: they are sent when they are posted, up to `UNREAD` that nobody asked for yet.
- Up to `HERE_BYTES` are copied by whoever notices that both ends are there, more by a thread of its own, so that
  neither the caller nor other messages wait. Collectives have one thread, in the order of the calls.
- Messages carry addresses: members trust each other as threads of one process do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar
from zlib import crc32

import numpy as np

from ....store.arrays import dtype_name
from ....store.errors import TensorMismatchError, TensorVineError
from ..buffers import Bytes, readable, typed, writable
from ..group import Op, even_bounds
from ..member import label_of
from ..reduction import Reduction
from ..rendezvous import Rendezvous
from . import pulling
from .crossmemory import Seal, UnreadableError, trouble
from .member import SharedMember
from .wires import AT, INLINE, INLINE_BYTES, PART, REFUSED, TOOK, Door, Frame
from .works import SharedWork

HERE_BYTES = 1 << 20
UNREAD = 64
"""Small messages to one rank that it has not asked for; further ones wait until it does."""


class SharedBackend:
    """Makes groups within this machine."""

    name = "shared"

    def offer(self) -> SharedOffer:
        """Open what the others will connect to.

        Raises:
            OSError: this system has no such sockets.
        """
        return SharedOffer()

    def join(
        self,
        offer: SharedOffer,
        name: str,
        *,
        epoch: int,
        rank: int,
        size: int,
        cards: Sequence[Mapping[str, Any]],
        timeout: float,
        rendezvous: Rendezvous | None = None,
    ) -> SharedGroup:
        """Connect to all others; arguments and errors as in `connect`.

        Raises:
            ValueError: the members cannot read each other's memory; says why.
        """
        deadline, label = time.monotonic() + timeout, label_of(name, epoch)
        found = trouble(offer.card, cards)
        if found is not None:
            raise ValueError(f"{label}: expected members that can read each other's memory; {found}")
        sockets = offer.door.meet(label, rank, cards, deadline)
        group = SharedGroup(
            name, epoch, rank=rank, size=size, timeout=timeout, seal=offer.seal, sockets=sockets, cards=cards
        )
        try:  # who returns from here knows that all do, or fail
            group.barrier(timeout=max(deadline - time.monotonic(), 1e-3))
        except BaseException:
            group.close()
            raise
        return group


class SharedOffer:
    """What a member has opened; its `card` tells the others how to connect."""

    def __init__(self) -> None:
        self.seal = Seal()
        self.door = Door()
        self.card: dict[str, Any] = {**self.seal.card, **self.door.card}

    def close(self) -> None:
        """Listen no more; a second call does nothing."""
        self.door.close()


class SharedGroup(SharedMember):
    """One member's end of a group within one machine; `SharedBackend.join` makes it."""

    backend: ClassVar[str] = "shared"

    # ---- messages -------------------------------------------------------------------------------------------

    def isend(self, array: Any, to: int, *, timeout: float | None = None) -> SharedWork:
        """Start to send; see `Group`."""
        peer, seconds = self._peer(to), self._seconds(timeout)
        memory = readable(array, f"{self.label}: send")
        what = f"send of {memory.nbytes} bytes to rank {to}"
        work = SharedWork(what, (to,), seconds, self._late, memory)
        with self._changed:
            self._check(work, peer.gone)
            number, peer.sent = peer.sent, peer.sent + 1
            if memory.nbytes <= INLINE_BYTES and peer.unread < UNREAD:
                peer.unread += 1
                self._wires.post(to, Frame(INLINE, number, memory.nbytes, payload=memory.tobytes()))
                work.end()
            else:
                peer.sends[number] = work
                self._wires.post(to, Frame(AT, number, memory.nbytes, memory.ctypes.data))
        return work

    def irecv(self, array: Any, source: int, *, timeout: float | None = None) -> SharedWork:
        """Start to receive; see `Group`."""
        peer, seconds = self._peer(source), self._seconds(timeout)
        memory = writable(array, f"{self.label}: recv")
        what = f"recv of {memory.nbytes} bytes from rank {source}"
        work = SharedWork(what, (source,), seconds, self._late, memory)
        with self._changed:
            self._check(work, peer.gone and not peer.early)
            if not peer.early:
                peer.receives.append(work)
                return work
            frame = peer.early.popleft()
        self._deliver(source, frame, work)
        return work

    def _deliver(self, source: int, frame: Frame, work: SharedWork) -> None:
        """Receive a message that both ends are there for."""
        if frame.nbytes != work.memory.nbytes:
            told = f"expected as many bytes there as the {frame.nbytes} sent; found room for {work.memory.nbytes}"
            self._wires.post(source, Frame(REFUSED, frame.number, payload=told.encode()))
            text = f"{self.label}: {work.what}: expected as many from it; found {frame.nbytes} bytes"
            self._fail(work, TensorMismatchError(text))
        elif frame.kind == INLINE:
            work.memory[:] = np.frombuffer(frame.payload, np.uint8)
            self._delivered(source, frame, work)
        elif frame.nbytes <= HERE_BYTES:
            self._copy(source, frame, work)
        else:
            self._copied_apart(work, lambda: self._copy(source, frame, work))

    def _copy(self, source: int, frame: Frame, work: SharedWork) -> None:
        try:
            self._pull(source, frame.address, work.memory)
        except UnreadableError as exc:
            reason = exc  # kept: Python forgets `exc` at the end of this block
            self._copied_apart(work, lambda: self._unread(work, reason))
        except TensorVineError as exc:
            self._fail(work, exc)
        else:
            self._delivered(source, frame, work)

    def _copied_apart(self, work: SharedWork, job: Callable[[], None]) -> None:
        """Have a thread of its own do what ends an operation."""
        with self._changed:
            if self._reason is None:
                self._copiers.submit(job)
                return
        self._fail(work, self._reason)

    def _delivered(self, source: int, frame: Frame, work: SharedWork) -> None:
        with self._changed:
            if self._reason is None:
                self._wires.post(source, Frame(TOOK, frame.number))
            work.end(self._reason)

    # ---- collectives ----------------------------------------------------------------------------------------

    def ibroadcast(self, array: Any, root: int = 0, *, timeout: float | None = None) -> SharedWork:
        """Start to give all what the root has; see `Group`."""
        where = f"{self.label}: broadcast"
        if not 0 <= root < self.size:
            raise ValueError(f"{where}: expected a root from 0 to {self.size - 1}; found {root}")
        memory = readable(array, where) if root == self.rank else writable(array, where)
        return self._collective(f"broadcast of rank {root}", pulling.broadcast(memory, root), timeout, memory)

    def iall_gather(
        self, array: Any, bounds: Sequence[int] | None = None, *, timeout: float | None = None
    ) -> SharedWork:
        """Start to give all ranks all parts; see `Group`."""
        where = f"{self.label}: all_gather"
        flat = typed(array, where)
        edges = even_bounds(flat.size, self.size) if bounds is None else list(bounds)
        if len(edges) != self.size + 1 or sorted(edges) != edges or edges[0] < 0 or edges[-1] > flat.size:
            expected = f"{self.size + 1} rising bounds from 0 to {flat.size}"
            raise ValueError(f"{where}: expected {expected}; found {edges}")
        parts = [flat[first:end].view(np.uint8) for first, end in pairwise(edges)]
        return self._collective("all_gather", pulling.all_gather(parts), timeout, flat)

    def iall_reduce(self, array: Any, op: Op = "sum", *, timeout: float | None = None) -> SharedWork:
        """Start to combine the ranks' arrays; see `Group`."""
        where = f"{self.label}: all_reduce"
        flat = typed(array, where)
        Reduction(op, flat.dtype, 0, where)  # wrong arguments are an error of the call
        run = pulling.all_reduce(flat, lambda length: Reduction(op, flat.dtype, length, where))
        return self._collective(f"all_reduce ({op} of {dtype_name(flat.dtype)})", run, timeout, flat)

    def ibarrier(self, *, timeout: float | None = None) -> SharedWork:
        """Start to wait for all; see `Group`."""
        return self._collective("barrier", pulling.barrier, timeout)

    def _collective(self, what: str, run: pulling.Collective, timeout: float | None, memory: Any = None) -> SharedWork:
        work = SharedWork(what, list(self._peers), self._seconds(timeout), self._late, memory)
        with self._changed:
            self._check(work, False)
            turn = _Turn(self, work, self._begun)
            self._begun += 1
            if not self._peers:
                run(turn)
                work.end()
                return work
            self._queue.append((work, lambda: run(turn)))
            if self._collector is None:
                self._collector = threading.Thread(target=self._collect, name="collective-work", daemon=True)
                self._collector.start()
            self._changed.notify_all()
        return work

    def _collect(self) -> None:
        """Carry out collectives, until the group is broken."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._reason is not None)
                if self._reason is not None:
                    return
                work, run = self._queue.popleft()
            try:
                run()
                with self._changed:
                    work.end(self._reason)
            except UnreadableError as exc:
                self._unread(work, exc)
            except TensorVineError as exc:
                self._fail(work, exc)
            except Exception as exc:  # noqa: BLE001  such as a lack of memory: who waits is told
                self._fail(work, TensorVineError(f"{self.label}: {work.what}: {exc!r}"))


class _Turn:
    """This member's part in one collective; a `pulling.Turn`."""

    def __init__(self, group: SharedGroup, work: SharedWork, number: int) -> None:
        self.rank = group.rank
        self.others: Sequence[int] = list(group._peers)
        self.where = f"{group.label}: {work.what}"
        self._group, self._work, self._number = group, work, number
        self._signature = crc32(work.what.encode())

    def tell(self, peers: Iterable[int], memory: Any = None) -> None:
        """Tell members where memory lies."""
        address, nbytes = (0, 0) if memory is None else (memory.ctypes.data, memory.nbytes)
        frame = Frame(PART, self._number, nbytes, address, self._signature)
        for peer in peers:
            self._group._wires.post(peer, frame)

    def coming(self, peers: Iterable[int]) -> Iterator[tuple[int, Frame]]:
        """Wait for what members tell."""
        return self._group.coming(self._work, peers, self._number, self._signature)

    def pull(self, peer: int, address: int, into: Bytes) -> None:
        """Copy from a member's memory."""
        self._work.peers = [peer]
        self._group._pull(peer, address, into)
