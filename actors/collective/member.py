"""One member's end of a group, whatever carries the bytes: what it checks, who is told, and how it breaks.

Rules
- A back end knows how the bytes of one operation move, and nothing else: it gives the methods at the end of `Member`.
- The first failure breaks the group: what may still be read here is made unreadable first, then the others are told,
  then the connections of the back end are cut. So those who wait for this member fail at once and for the same reason.
- Libraries say that a connection ended or that something took too long. The connections say who died, who left and who
  gave up: after an error they have `Timeouts.grace` to do so.
- A collective of a library that took too long asks the others how far they are: those who have not begun it are named.
- A member that died or left harms nothing that goes on without it: what needs it fails, and nothing else.
- What the members bring to an operation is compared before memory is written to, by each member (`brought`). A back end
  has all members of a collective hear all others' words first, by the connections, whatever the collective is: so those
  that do different things meet. Messages and collectives are compared among themselves, not with each other.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...store.errors import OperationTimeoutError, PeerLostError, TensorVineError
from ..engine.opened import Opened
from .brought import Brought, brought
from .brought import array as words_of
from .connections import Connections, Loss
from .group import Group, Op, Work, even_bounds
from .links import ASKED, BEGUN, GAVE_UP, OWN, PAYLOAD_BYTES, Frame, Link
from .operation import Operation
from .reduction import Numbers, Reduction
from .standing import Standing, again, label_of, ranks, told
from .timeouts import TIMEOUTS

Memory = TypeVar("Memory")
"""What a back end sees an array as."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which member of which group somebody is."""

    name: str
    epoch: int
    rank: int
    size: int

    @property
    def label(self) -> str:
        """The group's name for messages."""
        return label_of(self.name, self.epoch)


class TimedOutError(Exception):
    """A library's wait ended before its operation did."""


class Member(Group, Generic[Memory]):
    """One member's end of a group; its subclasses are those of the back ends.

    Args:
        seat: which member it is.
        timeout: seconds; see `Group.timeout`.
        links: to all others, from `Listener.meet`.
    """

    def __init__(self, seat: Seat, timeout: float, links: Mapping[int, Link]) -> None:
        self.name, self.epoch, self.rank, self.size = seat.name, seat.epoch, seat.rank, seat.size
        self.timeout = timeout
        self.label = seat.label
        self._opened = Opened(seat.label)
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.standing = Standing(self.label)
        self._changed = self.standing.changed
        self._begun = 0
        """Collectives."""
        self._far: dict[int, int] = {}
        """Rank -> collectives that it has begun; the answers to a question."""
        self._connections = Connections(links, self._told, self._lost)

    def start(self) -> None:
        """Listen to the others; called once, when the member is whole."""
        self._connections.start()

    def close(self) -> None:
        """Leave. Does nothing in a forked child."""
        if self._opened.inherited:
            return
        with self._changed:
            if self.standing.left:
                return
            self.standing.left = True
            self._freeze()
            first = self.standing.reason is None
            if first:
                self.standing.reason = PeerLostError(f"{self.label}: this member has left")
                self._end_all(self.standing.reason)
                self._changed.notify_all()
        self._connections.close()
        if first:
            self._cut()
        self._release()

    # ---- operations -----------------------------------------------------------------------------------

    def check(self, array: object, what: str, *, writes: bool) -> None:
        """Refuse what operations would refuse; see `Group`."""
        self._memory(array, f"{self.label}: {what}", writes=writes)

    def isend(self, array: object, to: int, *, timeout: float | None = None) -> Work:
        """Start to send; see `Group`."""
        self._check_peer(to)
        return self._send(self._memory(array, f"{self.label}: send", writes=False), to, self._seconds(timeout))

    def irecv(self, array: object, source: int, *, timeout: float | None = None) -> Work:
        """Start to receive; see `Group`."""
        self._check_peer(source)
        return self._receive(self._memory(array, f"{self.label}: recv", writes=True), source, self._seconds(timeout))

    def ibroadcast(self, array: object, root: int = 0, *, timeout: float | None = None) -> Work:
        """Start to give all what the root has; see `Group`."""
        where = f"{self.label}: broadcast"
        if not 0 <= root < self.size:
            raise ValueError(f"{where}: expected a root from 0 to {self.size - 1}; found {root}")
        memory = self._memory(array, where, writes=root != self.rank)
        words = brought("broadcast", f"of rank {root}", words_of(array, self._numbers(memory)))
        return self._broadcast(memory, root, words, self._seconds(timeout))

    def iall_gather(self, array: object, bounds: Sequence[int] | None = None, *, timeout: float | None = None) -> Work:
        """Start to give all ranks all parts; see `Group`."""
        where = f"{self.label}: all_gather"
        memory = self._memory(array, where, writes=True)
        numbers = self._numbers(memory)
        length = numbers.size
        edges = even_bounds(length, self.size) if bounds is None else [int(edge) for edge in bounds]
        if len(edges) != self.size + 1 or sorted(edges) != edges or edges[0] < 0 or edges[-1] > length:
            expected = f"{self.size + 1} rising bounds from 0 to {length}"
            raise ValueError(f"{where}: expected {expected}; found {edges}")
        parts = f"of parts from {', '.join(map(str, edges))}"
        return self._all_gather(
            memory, edges, brought("all_gather", parts, words_of(array, numbers)), self._seconds(timeout)
        )

    def iall_reduce(self, array: object, op: Op = "sum", *, timeout: float | None = None) -> Work:
        """Start to combine the ranks' arrays; see `Group`."""
        where = f"{self.label}: all_reduce"
        memory = self._memory(array, where, writes=True)
        numbers = self._numbers(memory)
        reduction = Reduction(op, numbers.dtype, where)
        words = brought("all_reduce", f"({op})", words_of(array, numbers))
        return self._all_reduce(memory, reduction, words, self._seconds(timeout))

    def ibarrier(self, *, timeout: float | None = None) -> Work:
        """Start to wait for all; see `Group`."""
        return self._barrier(brought("barrier"), self._seconds(timeout))

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            found = "this rank, " if rank == self.rank else ""
            raise ValueError(f"{self.label}: expected another rank from 0 to {self.size - 1}; found {found}{rank}")

    def check_process(self) -> None:
        """Refuse to go on in a forked child of this member's process.

        Raises:
            ClosedError: this is one.
        """
        self._opened.check_process()

    def _seconds(self, timeout: float | None) -> float:
        """Return how long an operation that begins now may take; errors as in `check_process`."""
        self.check_process()
        seconds = self.timeout if timeout is None else timeout
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError(f"{self.label}: expected a finite timeout above 0 s; found {seconds}")
        return seconds

    def _enter(self, what: str, peers: Collection[int]) -> None:
        """Refuse an operation of a broken group, and one that needs who is lost."""
        with self._changed:
            self.standing.check()
            error = self.standing.blame(what, peers)
        if error is not None:
            raise self._break(error)

    # ---- failures -------------------------------------------------------------------------------------

    def late(self, operation: Operation) -> None:
        """Break the group because of an operation that takes too long."""
        silent = operation.peers if operation.number is None else self._behind(operation.number, operation.peers)
        with self._changed:
            if operation.ended:
                return
            error = self.standing.blame(operation.what, operation.peers) or OperationTimeoutError(
                f"{self.label}: {operation.what}: expected {ranks(silent)} to take part in time; found none"
            )
        self._break(error)

    def finish(self, operation: Operation) -> None:
        """End an operation that nothing touches any more: well, unless the group broke meanwhile."""
        with self._changed:
            operation.end(self.standing.reason)

    def fail(self, operation: Operation, cause: Exception) -> TensorVineError:
        """End an operation that nothing touches any more, and break the group because of it.

        Args:
            operation: what failed.
            cause: an error of ours is the reason itself; otherwise what the library, or the system, said.

        Returns:
            The reason that stands.
        """
        with self._changed:
            error = cause if isinstance(cause, TensorVineError) else self._explained(operation, cause)
        reason = self._break(error)
        with self._changed:
            operation.end(reason)
        return reason

    def _explained(self, operation: Operation, cause: Exception) -> TensorVineError:
        """Say who is behind an error, as soon as that is known; the lock is held."""
        standing, peers = self.standing, operation.peers
        self._changed.wait_for(lambda: standing.reason is not None or standing.lacks(peers), TIMEOUTS.grace)
        text = f"{self.label}: {operation.what}: lost {ranks(peers)} ({cause})"
        return standing.blame(operation.what, peers) or PeerLostError(text)

    def _behind(self, number: int, peers: Sequence[int]) -> Sequence[int]:
        """Find out which members have not begun a collective."""
        standing = self.standing
        with self._changed:
            if standing.reason is not None or standing.lacks(peers):
                return peers
            self._far = {}
        self._connections.post_all(Frame(ASKED))
        with self._changed:
            self._changed.wait_for(lambda: all(peer in self._far for peer in peers), TIMEOUTS.ask)
            return [peer for peer in peers if self._far.get(peer, 0) < number] or peers

    def _break(self, error: TensorVineError) -> TensorVineError:
        """Break the group, unless it is; gives the reason that stands."""
        with self._changed:
            first = self.standing.reason is None
            reason = self._broken(error)
        if first:
            self._cut()
        return reason

    def _broken(self, error: TensorVineError) -> TensorVineError:
        """Do all of `_break` but to cut; the lock is held."""
        standing = self.standing
        if standing.reason is None:
            standing.reason = error
            self._freeze()
            self._connections.post_all(Frame(GAVE_UP, payload=told(error)[:PAYLOAD_BYTES]))
            self._end_all(error)
            self._changed.notify_all()
        return again(standing.reason)

    # ---- what the connections tell, in their thread ---------------------------------------------------

    def _told(self, peer: int, frame: Frame) -> None:
        if frame.kind >= OWN:
            self._take(peer, frame)
        elif frame.kind == ASKED:
            self._connections.post(peer, Frame(BEGUN, self._begun))
        elif frame.kind == BEGUN:
            with self._changed:
                self._far[peer] = frame.number
                self._changed.notify_all()
        elif frame.kind == GAVE_UP:
            with self._changed:
                self.standing.give_up(peer, frame.payload)
                self._without(peer)

    def _lost(self, peer: int, loss: Loss) -> None:
        with self._changed:
            self.standing.lose(peer, loss)
            self._without(peer)

    # ---- what a back end gives ------------------------------------------------------------------------

    @abstractmethod
    def _memory(self, array: object, where: str, *, writes: bool) -> Memory:
        """View an array, which is to be written to or not.

        Raises:
            TensorMismatchError: it is none, or none such; `where` says what it is.
        """

    @abstractmethod
    def _numbers(self, memory: Memory) -> Numbers:
        """Say what numbers an array holds, and how many."""

    @abstractmethod
    def _send(self, memory: Memory, to: int, seconds: float) -> Work:
        """Start to send to a rank."""

    @abstractmethod
    def _receive(self, memory: Memory, source: int, seconds: float) -> Work:
        """Start to receive from a rank."""

    @abstractmethod
    def _broadcast(self, memory: Memory, root: int, words: Brought, seconds: float) -> Work:
        """Start to give all what the root has."""

    @abstractmethod
    def _all_gather(self, memory: Memory, bounds: Sequence[int], words: Brought, seconds: float) -> Work:
        """Start to give all ranks all parts."""

    @abstractmethod
    def _all_reduce(self, memory: Memory, reduction: Reduction, words: Brought, seconds: float) -> Work:
        """Start to combine the ranks' arrays."""

    @abstractmethod
    def _barrier(self, words: Brought, seconds: float) -> Work:
        """Start to wait for all."""

    def _take(self, peer: int, frame: Frame) -> None:
        """Take a frame of the back end's own, in the thread of the connections."""

    def _without(self, peer: int) -> None:
        """Fail at once what needs a member that is gone, where no library does; the lock is held."""

    def _freeze(self) -> None:
        """Let nobody read memory of this process any more; the lock is held."""

    def _end_all(self, reason: TensorVineError) -> None:
        """End what nothing touches any more, for the group is broken; the lock is held."""

    def _cut(self) -> None:
        """End all connections of a library, so that whoever waits here or there fails; called once."""

    def _release(self) -> None:
        """Give back what the back end holds; called once, by `close`."""
