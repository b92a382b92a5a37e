"""Groups within one machine: a receiver copies straight out of the sender's memory.

Rules
- A sender says where the bytes lie; the receiver copies them, once, and says so. The sender does nothing else. Small
  messages go with what is said: they are sent when they are posted, up to `UNREAD` that nobody asked for yet.
- Up to `HERE_BYTES` are copied by whoever notices that both ends are there, more by a thread of its own, so that
  neither the caller nor other messages wait. Collectives have one thread, in the order of the calls.
- Who breaks a group breaks its seal first, so that nobody takes bytes that may change now.
- Messages carry addresses: members trust each other as threads of one process do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np

from ....store.arrays import Array, dtype_name
from ....store.errors import TensorMismatchError, TensorVineError
from ..backend import Endpoint
from ..brought import Brought, Content, code_of, mismatch, unlike
from ..buffers import Bytes, flat, typed
from ..links import OWN, PAYLOAD_BYTES, Frame, Link
from ..member import Member, Seat, TimedOutError
from ..operation import Operation
from ..reduction import Numbers, Reduction
from . import pulling
from .crossmemory import CHUNK, Memory, Seal, Sealed, UnreadableError

HERE_BYTES = 1 << 20
UNREAD = 64
"""Small messages to one rank that it has not asked for; further ones wait until it does."""
INLINE, AT, TOOK, REFUSED, PART = range(OWN, OWN + 5)
"""Kinds of frames: a small message; where one lies; it was taken; it does not fit; a turn of a collective."""


class Peer:
    """What is under way with another member."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.memory = Memory(cast("Sealed", endpoint))
        self.sent = 0
        """Messages."""
        self.unread = 0
        """Small ones that it has not asked for."""
        self.sends: dict[int, Operation] = {}
        """Number -> what waits for it."""
        self.receives: deque[Operation] = deque()
        """What waits for its next messages."""
        self.early: deque[Frame] = deque()
        """Its messages that wait to be asked for."""
        self.parts: deque[Frame] = deque()
        """What it told in collectives."""


class SharedGroup(Member[Array]):
    """One member's end of a group within one machine; `SharedBackend.join` makes it.

    Args:
        seat: as in `Member`.
        timeout: as in `Member`.
        links: as in `Member`.
        seal: this member's.
        endpoints: all members', by rank.
    """

    backend: ClassVar[str] = "shared"

    def __init__(
        self, seat: Seat, timeout: float, links: Mapping[int, Link], seal: Seal, endpoints: Sequence[Endpoint]
    ) -> None:
        super().__init__(seat, timeout, links)
        self._seal = seal
        self._peers = {peer: Peer(endpoints[peer]) for peer in self.others}
        self._queue: deque[tuple[Operation, Callable[[], None]]] = deque()
        """Collectives that have not begun."""
        self._collector: threading.Thread | None = None
        self._copiers = ThreadPoolExecutor(max(self.size - 1, 1), "collective-copy")

    def _memory(self, array: object, where: str, *, writes: bool) -> Array:
        return typed(array, where) if writes else flat(array, where)

    def _numbers(self, memory: Array) -> Numbers:
        return Numbers(memory.dtype, memory.size)

    # ---- messages -------------------------------------------------------------------------------------

    def _send(self, memory: Array, to: int, seconds: float) -> Operation:
        nbytes, code, peer = memory.nbytes, code_of(dtype_name(memory.dtype)), self._peers[to]
        work = Operation(self, f"send of {nbytes} bytes to rank {to}", (to,), seconds, memory=memory)
        with self._changed:
            self._admit(work)
            number, peer.sent = peer.sent, peer.sent + 1
            if nbytes <= PAYLOAD_BYTES and peer.unread < UNREAD:
                peer.unread += 1
                self._connections.post(to, Frame(INLINE, number, nbytes, code=code, payload=memory.tobytes()))
                work.end()
            else:
                peer.sends[number] = work
                self._connections.post(to, Frame(AT, number, nbytes, memory.ctypes.data, code))
        return work

    def _receive(self, memory: Array, source: int, seconds: float) -> Operation:
        peer, what = self._peers[source], f"recv of {memory.nbytes} bytes from rank {source}"
        work = Operation(self, what, (source,), seconds, memory=memory)
        with self._changed:
            if not peer.early:
                self._admit(work)
                peer.receives.append(work)
                return work
            self.standing.check()
            frame = peer.early.popleft()
        self._deliver(source, frame, work, memory)
        return work

    def _admit(self, work: Operation) -> None:
        """Refuse an operation of a broken group, and one that needs who is lost; the lock is held."""
        self.standing.check()
        error = self.standing.blame(work.what, work.peers)
        if error is not None:
            raise self._broken(error)

    def _deliver(self, source: int, frame: Frame, work: Operation, memory: Array) -> None:
        """Receive a message that both ends are there for."""
        into = memory.view(np.uint8)
        sent, room = Content(frame.nbytes, frame.code), Content(into.nbytes, code_of(dtype_name(memory.dtype)))
        error = unlike(f"{self.label}: message from rank {source} to rank {self.rank}", sent, room)
        if error is not None:
            self._connections.post(source, Frame(REFUSED, frame.number, payload=str(error).encode()))
            self.fail(work, error)
        elif frame.kind == INLINE:
            into[:] = np.frombuffer(frame.payload, np.uint8)
            self._delivered(source, frame, work)
        elif frame.nbytes <= HERE_BYTES:
            self._copy(source, frame, work, into)
        else:
            self._copied_apart(work, lambda: self._copy(source, frame, work, into))

    def _copy(self, source: int, frame: Frame, work: Operation, into: Bytes) -> None:
        try:
            self._pull(source, frame.address, into)
        except UnreadableError as exc:
            reason = exc  # kept: Python forgets `exc` at the end of this block
            self._copied_apart(work, lambda: self.fail(work, reason))
        except TensorVineError as exc:
            self.fail(work, exc)
        else:
            self._delivered(source, frame, work)

    def _copied_apart(self, work: Operation, job: Callable[[], object]) -> None:
        """Have a thread of its own do what ends an operation."""
        with self._changed:
            if self.standing.reason is None:
                self._copiers.submit(job)
            else:
                work.end(self.standing.reason)

    def _delivered(self, source: int, frame: Frame, work: Operation) -> None:
        with self._changed:
            if self.standing.reason is None:
                self._connections.post(source, Frame(TOOK, frame.number))
            work.end(self.standing.reason)

    def _pull(self, source: int, address: int, into: Bytes) -> None:
        """Copy from a peer's memory.

        Raises:
            UnreadableError: the peer ended, or broke its seal; its connection tells why, soon.
            TensorVineError: why this group is broken.
        """
        memory = self._peers[source].memory
        for at in range(0, into.nbytes, CHUNK):
            self.standing.check()
            memory.read(address + at, into[at : at + CHUNK])

    # ---- collectives ----------------------------------------------------------------------------------

    def _broadcast(self, memory: Array, root: int, words: Brought, seconds: float) -> Operation:
        return self._collective(words, pulling.broadcast(memory.view(np.uint8), root), seconds, memory)

    def _all_gather(self, memory: Array, bounds: Sequence[int], words: Brought, seconds: float) -> Operation:
        parts = [memory[first:end].view(np.uint8) for first, end in pairwise(bounds)]
        return self._collective(words, pulling.all_gather(parts), seconds, memory)

    def _all_reduce(self, memory: Array, reduction: Reduction, words: Brought, seconds: float) -> Operation:
        return self._collective(words, pulling.all_reduce(memory, reduction), seconds, memory)

    def _barrier(self, words: Brought, seconds: float) -> Operation:
        return self._collective(words, pulling.barrier, seconds, None)

    def _collective(self, words: Brought, run: pulling.Collective, seconds: float, memory: Array | None) -> Operation:
        work = Operation(self, words.verb, self.others, seconds, memory=memory)
        with self._changed:
            self.standing.check()
            turn = _Turn(self, work, self._begun, words.words)
            self._begun += 1
            if not self.others:
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
        standing = self.standing
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or standing.reason is not None)
                if standing.reason is not None:
                    return
                work, run = self._queue.popleft()
            try:
                run()
            except TimedOutError:
                self.late(work)
            except (UnreadableError, TensorVineError) as exc:
                self.fail(work, exc)
            except Exception as exc:  # noqa: BLE001  such as a lack of memory: who waits is told
                self.fail(work, TensorVineError(f"{self.label}: {work.what}: {exc!r}"))
            self.finish(work)

    def _coming(self, work: Operation, peers: Iterable[int], number: int, words: bytes) -> Iterator[tuple[int, Frame]]:
        """Wait for what peers tell in a collective; see `pulling.Turn`."""
        standing, missing = self.standing, list(peers)

        def ready() -> list[int]:
            return [peer for peer in missing if self._peers[peer].parts]

        while missing:
            with self._changed:
                work.peers = list(missing)
                self._changed.wait_for(
                    lambda: ready() or standing.reason is not None or standing.lacks(missing), work.deadline.left()
                )
                found = [(peer, self._peers[peer].parts.popleft()) for peer in ready()]
                if not found:
                    standing.check()
                    raise standing.blame(work.what, missing) or TimedOutError
            for peer, frame in found:
                if (frame.number, frame.payload) != (number, words):
                    raise mismatch(f"{self.label}: {work.what}", {self.rank: words, peer: frame.payload})
                missing.remove(peer)
                yield peer, frame

    # ---- what the connections tell --------------------------------------------------------------------

    def _take(self, peer: int, frame: Frame) -> None:
        with self._changed:
            known = self._peers[peer]
            if frame.kind not in (INLINE, AT):
                self._answered(peer, known, frame)
                return
            if not known.receives:
                known.early.append(frame)
                return
            work = known.receives.popleft()
            memory: Array = work.memory
        self._deliver(peer, frame, work, memory)

    def _answered(self, source: int, peer: Peer, frame: Frame) -> None:
        """Take note of what is no message; the lock is held."""
        if frame.kind == PART:
            peer.parts.append(frame)
            self._changed.notify_all()
        elif frame.kind == TOOK:
            work = peer.sends.pop(frame.number, None)
            if work is not None:
                work.end()
            else:
                peer.unread -= 1
        elif frame.kind == REFUSED:
            self._broken(TensorMismatchError(frame.payload.decode()))

    def _without(self, peer: int) -> None:
        needed = [*self._peers[peer].sends.values(), *self._peers[peer].receives]
        error = self.standing.blame(needed[0].what, [peer]) if needed else None
        if error is not None:
            self._broken(error)

    # ---- the end --------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        self._seal.break_()

    def _end_all(self, reason: TensorVineError) -> None:
        """End what waits for its peers; what copies ends itself. The lock is held."""
        for peer in self._peers.values():
            for work in [*peer.sends.values(), *peer.receives]:
                work.end(reason)
            peer.sends.clear()
            peer.receives.clear()
        for work, _ in self._queue:
            work.end(reason)
        self._queue.clear()

    def _release(self) -> None:
        self._copiers.shutdown()
        if self._collector is not None:
            self._collector.join()


class _Turn:
    """This member's part in one collective; a `pulling.Turn`."""

    def __init__(self, group: SharedGroup, work: Operation, number: int, words: bytes) -> None:
        self.rank = group.rank
        self.others: Sequence[int] = group.others
        self._group, self._work, self._number, self._words = group, work, number, words

    def tell(self, peers: Iterable[int], memory: Array | None = None) -> None:
        """Tell members where memory lies."""
        address, nbytes = (0, 0) if memory is None else (memory.ctypes.data, memory.nbytes)
        frame = Frame(PART, self._number, nbytes, address, payload=self._words)
        for peer in peers:
            self._group._connections.post(peer, frame)

    def coming(self, peers: Iterable[int]) -> Iterator[tuple[int, Frame]]:
        """Wait for what members tell."""
        return self._group._coming(self._work, peers, self._number, self._words)

    def pull(self, peer: int, address: int, into: Bytes) -> None:
        """Copy from a member's memory."""
        self._work.peers = [peer]
        self._group._pull(peer, address, into)
