"""What does a communicator's operations: a thread, one operation after the other.

Rules
- NCCL's calls may block; nobody waits for them but this thread. What takes too long, or lacks a member, is aborted.
  Making a communicator cannot be: a thread that waits for who has died then is left behind.
- An operation that has not been launched touches no memory: it ends when the group breaks. What has been launched is
  ended by its thread, or where NCCL keeps that, by who waits.
- The communicator is made with the first operation: its rank 0 makes the id that the others need, and tells them.
- NCCL compares nothing: where bytes differ it waits for ever, or brings wrong ones. So an operation is launched when
  the others have told that they bring the same (`brought`).
- NCCL notices few deaths: `Timeouts.grace` after a member was lost, what needs it has failed.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ....store.errors import TensorVineError
from ....store.waiting import Backoff, Deadline
from ..brought import Content, mismatch
from ..links import OWN, Frame
from ..member import TimedOutError
from ..operation import Operation, Owner
from ..standing import Standing
from ..timeouts import TIMEOUTS
from .device import Communicator, Device, Memory

POLL_S = 20e-6
"""Between two looks at an event, at first."""
POLL_MOST_S = 1e-3
ID, SENT, BROUGHT = range(OWN, OWN + 3)
"""Kinds of frames: a communicator's id; size and dtype of a message; what the sender brings to a collective. Their
payload begins with the route."""

Route = tuple[int, int]
COLLECTIVE: Route = (-1, -1)
"""The route of collectives; all others are (sender, receiver)."""
_ROUTE = struct.Struct("<ii")

Act = Callable[["Lane", "Call"], None]
"""Does an operation, in the lane's thread."""


class LaneOwner(Owner, Protocol):
    """The member whose lane it is."""

    standing: Standing

    def lacks(self, peers: Sequence[int]) -> bool:
        """Tell whether one of these died, left or gave up."""
        ...

    def tell(self, peers: Sequence[int], frame: Frame) -> None:
        """Send members a frame."""
        ...


def route_of(frame: Frame) -> Route:
    """Say which lane a frame is about."""
    sender, receiver = _ROUTE.unpack_from(frame.payload)
    return sender, receiver


class Lane:
    """One communicator and its thread, which both begin with the first operation.

    Args:
        member: this process in the group that it belongs to.
        cuda: the device.
        route: names it.
        peers: the other members.
        rank: this one, in the communicator.
    """

    def __init__(self, member: LaneOwner, cuda: Device, route: Route, peers: Sequence[int], rank: int) -> None:
        self._member = member
        self._cuda = cuda
        self._route = _ROUTE.pack(*route)
        self._peers = peers
        self._rank = rank
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._open: deque[Call] = deque()
        """Those that have not ended."""
        self._thread = threading.Thread(target=self._main, name="collective-nccl", daemon=True)
        self._shared: bytes | None = None
        """The communicator's id."""
        self._sent: deque[Content] = deque()
        """Messages that their sender has begun."""
        self._brought: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        """Rank -> what it brings to the collectives that were not compared, in words."""
        self._channel: Communicator | None = None
        self._aborted = False
        self._lock = threading.Lock()

    def put(self, call: Call) -> None:
        """Let the thread do an operation after those before; the member's lock is held."""
        if self._thread.ident is None:
            self._thread.start()
        self._open.append(call)
        self._calls.put(call)

    def close(self) -> threading.Thread:
        """Let the thread end; gives it."""
        self._calls.put(None)
        return self._thread

    def end_all(self, reason: TensorVineError) -> None:
        """End what has not been launched; the member's lock is held."""
        for call in self._open:
            if not call.launched:
                call.end(reason)

    def abort(self) -> None:
        """End what is under way; any thread may."""
        with self._lock:
            if self._channel is not None and not self._aborted:
                self._channel.abort()
            self._aborted = True

    def take(self, peer: int, frame: Frame) -> None:
        """Take what another member says; the member's lock is held."""
        content = frame.payload[_ROUTE.size :]
        if frame.kind == ID:
            self._shared = content
        elif frame.kind == SENT:
            self._sent.append(Content(frame.nbytes, frame.code))
        else:
            self._brought[peer].append(content)

    def announce(self, sent: Content) -> None:
        """Tell the receiver what a message holds."""
        self._member.tell(self._peers, Frame(SENT, nbytes=sent.nbytes, code=sent.code, payload=self._route))

    def announced(self, call: Call) -> Content:
        """Return what the sender's next message holds; waits for it."""
        self._await(lambda: bool(self._sent), call)
        return self._sent.popleft()

    def agree(self, call: Call, rank: int, words: bytes) -> None:
        """Tell the others what this member brings to a collective, and wait until all bring the same.

        Args:
            call: the collective.
            rank: this member, in the group.
            words: what it brings.

        Raises:
            TensorMismatchError: another brings something else.
        """
        self._member.tell(self._peers, Frame(BROUGHT, payload=self._route + words))
        missing = list(self._peers)
        while missing:
            call.peers = tuple(missing)
            self._await(lambda: any(self._brought[peer] for peer in missing), call)
            for peer in [peer for peer in missing if self._brought[peer]]:
                theirs = self._brought[peer].popleft()
                missing.remove(peer)
                if theirs != words:
                    where = f"{self._member.standing.label}: {call.what}"
                    alike = [rank, *(known for known in self._peers if known not in (peer, *missing))]
                    raise mismatch(where, {**dict.fromkeys(alike, words), peer: theirs})
        call.peers = self._peers

    def channel(self, call: Call) -> Communicator:
        """Return the communicator; the first time this waits for the other members."""
        if self._channel is None:
            if self._rank == 0:
                self._shared = shared = self._cuda.new_id()
                self._member.tell(self._peers, Frame(ID, payload=self._route + shared))
            self._await(lambda: self._shared is not None, call)
            made = self._cuda.channel(1 + len(self._peers), cast(bytes, self._shared), self._rank)
            with self._lock:
                self._channel = made
                if self._aborted:
                    made.abort()
        return self._channel

    def run(
        self,
        call: Call,
        memory: Memory,
        launch: Callable[[Communicator, int], None],
        *,
        reads: bool = False,
        writes: bool = False,
    ) -> None:
        """Do one thing with memory, and wait until it is done.

        Args:
            call: on whose behalf.
            memory: what is read or written.
            launch: asks the channel for it, given where in device memory that is.
            reads: memory of the host is to be brought there before.
            writes: and to be brought back after.
        """
        channel = self.channel(call)
        with self._member.standing.changed:
            self._member.standing.check()
            call.launched = True
        if memory.host is None:
            if memory.ready is not None:
                channel.after(memory.ready)
            launch(channel, memory.pointer)
            self._poll(channel, call)
            return
        staged = channel.scratch(memory.nbytes)
        if reads:
            channel.load(staged, memory.host)
        launch(channel, staged.pointer)
        self._poll(channel, call)
        if writes:
            channel.store(memory.host, staged)

    def _poll(self, channel: Communicator, call: Call) -> None:
        event = channel.mark()
        pauses, patience = Backoff(POLL_S, POLL_MOST_S), _Patience(self._member, call, TIMEOUTS.grace)
        while not event.done:
            self._member.standing.check()
            channel.check()
            if patience.over:
                raise RuntimeError("a member is lost")
            if not pauses.wait(call.deadline):
                raise TimedOutError

    def _await(self, reached: Callable[[], bool], call: Call) -> None:
        """Wait for what the connections bring; what a member said comes before the news that it is lost."""
        standing = self._member.standing
        with standing.changed:
            standing.changed.wait_for(
                lambda: reached() or standing.reason is not None or standing.lacks(call.peers), call.deadline.left()
            )
            if reached():
                return
            standing.check()
            raise standing.blame(call.what, call.peers) or TimedOutError

    def _main(self) -> None:
        self._cuda.bind()
        while (call := self._calls.get()) is not None:
            call.run(self)
            with self._member.standing.changed:
                self._open.remove(call)
            del call  # what it keeps is not to live until the next comes


class Call(Operation):
    """An operation of a lane.

    Args:
        member: as in `Operation`.
        what: as in `Operation`.
        peers: as in `Operation`.
        seconds: as in `Operation`.
        number: as in `Operation`.
        act: does it, in the lane's thread.
    """

    def __init__(
        self, member: LaneOwner, what: str, peers: Sequence[int], seconds: float, number: int | None, act: Act
    ) -> None:
        super().__init__(member, what, peers, seconds, number)
        self.launched = False
        """Whether NCCL may touch its memory; guarded by the member's lock."""
        self._owner = member
        self._act = act

    def run(self, lane: Lane) -> None:
        """Do it; a failure breaks the group at once."""
        try:
            if not self.ended:
                self._act(lane, self)
        except TimedOutError:
            self._owner.late(self)
        except (RuntimeError, TensorVineError, OSError, MemoryError) as exc:
            self._abandon(lane, exc)
        except Exception as exc:  # noqa: BLE001  a mistake of ours, or of CuPy's: who waits is told
            self._abandon(lane, TensorVineError(f"{self._owner.standing.label}: {self.what}: {exc!r}"))
        self._owner.finish(self)

    def _abandon(self, lane: Lane, cause: Exception) -> None:
        if self._owner.standing.reason is not None:
            lane.abort()  # who broke the group may not have come to it yet
        self._owner.fail(self, cause)

    def _finished(self, deadline: Deadline) -> bool:
        patience = _Patience(self._owner, self, TIMEOUTS.grace + TIMEOUTS.look)
        while not self._over.wait(deadline.left(TIMEOUTS.look)):
            if patience.over:
                self._owner.fail(self, RuntimeError("NCCL does not return"))
            elif deadline.passed:
                return False
        return True


class _Patience:
    """How much longer an operation may take whose group is broken, or that lacks a member."""

    def __init__(self, member: LaneOwner, call: Call, seconds: float) -> None:
        self._member, self._call, self._seconds = member, call, seconds
        self._end: Deadline | None = None

    @property
    def over(self) -> bool:
        """Whether it is at its end."""
        if self._end is None:
            if self._member.standing.reason is None and not self._member.lacks(self._call.peers):
                return False
            self._end = Deadline.after(self._seconds)
        return self._end.passed
