"""One member's standing in a group on one machine: what is under way with whom, and why the group broke.

Rules
- The first failure breaks the group: its seal first, so that nobody takes bytes that may change now, and then the
  others are told. Who died or left harms nothing that goes on without it.
- An operation ends when nothing touches its memory any more.
- What is shared by threads is guarded by one lock, held for moments only.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ....store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError, TensorVineError
from ..buffers import Bytes
from ..group import Group
from ..member import again, label_of
from .crossmemory import CHUNK, Memory, Seal, UnreadableError
from .wires import AT, GAVE_UP, INLINE, INLINE_BYTES, PART, REFUSED, TOOK, Frame, Loss, Wires
from .works import SharedWork

GRACE_S = 1.0
"""How long a peer's end may take to be known after its memory could not be read."""
_ERRORS = {kind.__name__: kind for kind in (OperationTimeoutError, PeerLostError, TensorMismatchError)}


class Peer:
    """What is under way with another member."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self.memory = Memory(card)
        self.sent = 0
        """Messages."""
        self.unread = 0
        """Small ones that it has not asked for."""
        self.sends: dict[int, SharedWork] = {}
        """Number -> what waits for it."""
        self.receives: deque[SharedWork] = deque()
        """What waits for its next messages."""
        self.early: deque[Frame] = deque()
        """Its messages that wait to be asked for."""
        self.parts: deque[Frame] = deque()
        """What it told in collectives."""
        self.gave_up: TensorVineError | None = None
        self.loss: Loss | None = None

    @property
    def gone(self) -> bool:
        """Whether nothing can come of it any more."""
        return self.loss is not None or self.gave_up is not None


class SharedMember(Group):
    """A group on one machine, without its operations.

    Args:
        name: of the group.
        epoch: of the group.
        rank: this member.
        size: how many there are.
        timeout: seconds; see `Group.timeout`.
        seal: this member's.
        sockets: to all others, from `wires.Door`.
        cards: all members', by rank.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        *,
        rank: int,
        size: int,
        timeout: float,
        seal: Seal,
        sockets: Mapping[int, socket.socket],
        cards: Sequence[Mapping[str, Any]],
    ) -> None:
        self.name, self.epoch, self.rank, self.size, self.timeout = name, epoch, rank, size, timeout
        self.label = label_of(name, epoch)
        self._seal = seal
        self._peers = {peer: Peer(cards[peer]) for peer in range(size) if peer != rank}
        self._changed = threading.Condition(threading.Lock())
        """Guards all that follows, and what peers hold. Held for moments only."""
        self._reason: TensorVineError | None = None
        self._closed = False
        self._begun = 0
        """Collectives."""
        self._queue: deque[tuple[SharedWork, Callable[[], None]]] = deque()
        self._collector: threading.Thread | None = None
        self._copiers = ThreadPoolExecutor(max(size - 1, 1), "collective-copy")
        self._wires = Wires(sockets, [card["process"] for card in cards], self._told, self._lost)

    @abstractmethod
    def _deliver(self, source: int, frame: Frame, work: SharedWork) -> None:
        """Receive a message that both ends are there for."""

    def _peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            found = "this rank" if rank == self.rank else "it"
            raise ValueError(f"{self.label}: expected another rank from 0 to {self.size - 1}; found {found}, {rank}")
        return self._peers[rank]

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError(f"{self.label}: expected a timeout above 0 s that ends; found {seconds}")
        return seconds

    def _pull(self, source: int, address: int, into: Bytes) -> None:
        """Copy from a peer's memory.

        Raises:
            UnreadableError: the peer ended, or broke its seal; its wire tells why, soon.
            TensorVineError: why this group is broken.
        """
        memory = self._peers[source].memory
        for at in range(0, into.nbytes, CHUNK):
            if self._reason is not None:
                raise again(self._reason)
            memory.read(address + at, into[at : at + CHUNK])

    def coming(
        self, work: SharedWork, peers: Iterable[int], number: int, signature: int
    ) -> Iterator[tuple[int, Frame]]:
        """Wait for what peers tell in a collective; see `pulling.Turn`."""
        missing = list(peers)
        while missing:
            with self._changed:
                work.peers = list(missing)

                def ready() -> list[int]:
                    return [peer for peer in missing if self._peers[peer].parts]

                def stuck() -> bool:
                    return self._reason is not None or any(self._peers[peer].gone for peer in missing)

                self._changed.wait_for(lambda: ready() or stuck(), max(work.deadline - time.monotonic(), 0.0))
                found = [(peer, self._peers[peer].parts.popleft()) for peer in ready()]
                if not found:
                    raise again(self._reason) if self._reason is not None else self._blame(work)
            for peer, frame in found:
                if (frame.number, frame.signature) != (number, signature):
                    text = f"{self.label}: {work.what}: expected it at rank {peer}, too; it does something else"
                    raise TensorMismatchError(text)
                missing.remove(peer)
                yield peer, frame

    # ---- what the wires tell, in their thread ---------------------------------------------------------------

    def _told(self, source: int, frame: Frame) -> None:
        peer = self._peers[source]
        with self._changed:
            if frame.kind in (INLINE, AT):
                work = peer.receives.popleft() if peer.receives else None
                if work is None:
                    peer.early.append(frame)
                    return
            else:
                self._answered(source, peer, frame)
                return
        self._deliver(source, frame, work)

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
            self._break(TensorMismatchError(f"{self.label}: send to rank {source}: {frame.payload.decode()}"))
        elif frame.kind == GAVE_UP:
            kind, _, text = frame.payload.decode(errors="replace").partition(" ")
            peer.gave_up = _ERRORS.get(kind, PeerLostError)(text)
            self._without(peer)

    def _lost(self, source: int, loss: Loss) -> None:
        peer = self._peers[source]
        with self._changed:
            peer.loss = loss
            self._without(peer)

    def _without(self, peer: Peer) -> None:
        """Fail what needs a peer that is gone; the lock is held."""
        needed = [*peer.sends.values(), *peer.receives]
        if needed:
            self._break(self._blame(needed[0]))
        self._changed.notify_all()

    # ---- failures -------------------------------------------------------------------------------------------

    def _check(self, work: SharedWork, lost: bool) -> None:
        """Refuse an operation of a broken group, and one that needs who is lost; the lock is held."""
        if self._reason is not None:
            raise again(self._reason)
        if lost:
            raise self._break(self._blame(work))

    def _blame(self, work: SharedWork) -> TensorVineError:
        """Say why an operation fails: who died, who gave up, who left, or who is late; the lock is held."""
        gone = {rank: self._peers[rank] for rank in work.peers if self._peers[rank].gone}
        for rank, peer in gone.items():
            if peer.loss == "died" and peer.gave_up is None:
                return PeerLostError(f"{self.label}: {work.what}: rank {rank} died")
        for rank, peer in gone.items():
            if peer.gave_up is not None:
                text = str(peer.gave_up)
                return type(peer.gave_up)(text if "(told by" in text else f"{text} (told by rank {rank})")
        if gone:
            return PeerLostError(f"{self.label}: {work.what}: rank {next(iter(gone))} left")
        ranks = f"rank{'s' * (len(work.peers) > 1)} {', '.join(map(str, work.peers))}"
        return OperationTimeoutError(f"{self.label}: {work.what}: expected {ranks} to take part; not in time")

    def _unread(self, work: SharedWork, cause: UnreadableError) -> None:
        """Fail an operation whose bytes could not be read, with what the wires tell about the peer soon."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._reason is not None or any(self._peers[rank].gone for rank in work.peers), GRACE_S
            )
            known = any(self._peers[rank].gone for rank in work.peers)
            error = (
                self._blame(work)
                if known
                else PeerLostError(f"{self.label}: {work.what}: rank {work.peers[0]}, {cause}")
            )
        self._fail(work, error)

    def _fail(self, work: SharedWork, error: TensorVineError) -> None:
        """Break the group because of an operation that nothing touches any more."""
        with self._changed:
            work.end(self._break(error))

    def _late(self, work: SharedWork) -> None:
        """Break the group because of an operation that takes too long."""
        with self._changed:
            if not work.ended:
                self._break(self._blame(work))

    def _break(self, error: TensorVineError) -> TensorVineError:
        """Break the group, unless it is; gives the reason that stands. The lock is held."""
        if self._reason is None:
            self._reason = error
            self._seal.break_()
            self._wires.post_all(Frame(GAVE_UP, 0, payload=f"{type(error).__name__} {error}".encode()[:INLINE_BYTES]))
            self._end_all()
        return again(self._reason)

    def _end_all(self) -> None:
        """End what waits for its peers; what copies ends itself. The lock is held."""
        for peer in self._peers.values():
            for work in [*peer.sends.values(), *peer.receives]:
                work.end(self._reason)
            peer.sends.clear()
            peer.receives.clear()
        for work, _ in self._queue:
            work.end(self._reason)
        self._queue.clear()
        self._changed.notify_all()

    def close(self) -> None:
        """Leave."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._seal.break_()
            if self._reason is None:
                self._reason = PeerLostError(f"{self.label}: this member has left")
                self._end_all()
        self._wires.close()
        self._copiers.shutdown()
        if self._collector is not None:
            self._collector.join()
