"""What does a communicator's operations: a thread, one operation after the other.

Rules
- NCCL's calls may block; nobody waits for them but this thread. What takes too long, or lacks a member, is aborted.
  Making a communicator cannot be: a thread that waits for who has died then is left behind.
- The communicator is made with the first operation: its rank 0 makes the id that the others need, and tells them.
- NCCL notices few deaths: `GRACE_S` after the mesh called a member lost, what needs it has failed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from ....store.errors import TensorVineError
from ..member import GRACE_S, Member, Operation, TimedOutError
from .cuda import Cuda, Memory

POLL_S = 20e-6
"""Between two looks at an event, at first."""
POLL_MOST_S = 1e-3
LOOK_S = 0.05
"""Who waits for an operation looks this often whether its thread can still end it."""
COLLECTIVE = (-1, -1)
"""The route of collectives; all others are (sender, receiver)."""

Tell = Callable[[Collection[int], Mapping[str, Any]], None]
"""Sends a message to some members."""
Act = Callable[["Lane", "Call"], None]
"""Does an operation, in the lane's thread."""


class Lane:
    """One communicator and its thread, which both begin with the first operation.

    Args:
        member: this process in the group that it belongs to.
        cuda: the device.
        tell: sends a message to other members.
        route: names it: (sender, receiver), or `COLLECTIVE`.
        peers: the other members.
        rank: this one, in the communicator.
    """

    def __init__(
        self, member: Member, cuda: Cuda, tell: Tell, route: tuple[int, int], peers: Sequence[int], rank: int
    ) -> None:
        self._member = member
        self._cuda = cuda
        self._send = tell
        self._route = route
        self._peers = peers
        self._rank = rank
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="collective-nccl", daemon=True)
        self._shared: bytes | None = None
        """The communicator's id."""
        self._sizes: deque[int] = deque()
        """Of messages that their sender has begun."""
        self._channel: Any = None
        self._aborted = False
        self._lock = threading.Lock()

    def put(self, call: Call) -> None:
        """Let the thread do an operation after those before."""
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put(call)

    def close(self) -> threading.Thread:
        """Let the thread end; gives it."""
        self._calls.put(None)
        return self._thread

    def abort(self) -> None:
        """End what is under way; any thread may."""
        with self._lock:
            self._aborted = True
            if self._channel is not None:
                self._channel.abort()

    def told(self, message: Mapping[str, Any]) -> None:
        """Take what the other members say."""
        if "id" in message:
            self._shared = bytes.fromhex(message["id"])
        else:
            self._sizes.append(int(message["nbytes"]))

    def announce(self, nbytes: int) -> None:
        """Tell the receiver a message's size."""
        self._tell({"nbytes": nbytes})

    def announced(self, call: Call) -> int:
        """Return the size of the sender's next message; waits for it."""
        self._await(lambda: bool(self._sizes), call)
        return self._sizes.popleft()

    def channel(self, call: Call) -> Any:
        """Return the communicator; the first time this waits for the other members."""
        if self._channel is None:
            if self._rank == 0:
                self._shared = shared = self._cuda.new_id()
                self._tell({"id": shared.hex()})
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
        launch: Callable[[Any, int], None],
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

    def _poll(self, channel: Any, call: Call) -> None:
        event = channel.mark()
        pause, lost_at = POLL_S, None
        while not event.done:
            now = time.monotonic()
            if now >= call.deadline:
                raise TimedOutError
            if self._member.broken:
                raise RuntimeError("the group is broken")
            channel.check()
            if self._member.lacks(call.peers):
                lost_at = lost_at or now
                if now - lost_at > GRACE_S:
                    raise RuntimeError("a member is lost")
            time.sleep(pause)
            pause = min(2 * pause, POLL_MOST_S)

    def _await(self, reached: Callable[[], bool], call: Call) -> None:
        """Wait for what the mesh brings; what a member said comes before the news that it is lost."""
        member, left = self._member, call.deadline - time.monotonic()
        member.await_news(lambda: reached() or member.broken or member.lacks(call.peers), left)
        if not reached():
            late = not (member.broken or member.lacks(call.peers))
            raise TimedOutError if late else RuntimeError("a member is lost")

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._send(self._peers, {"lane": self._route, **message})

    def _main(self) -> None:
        self._cuda.bind()
        while (call := self._calls.get()) is not None:
            call.run(self)
            del call  # what it keeps is not to live until the next comes


class Call(Operation):
    """An operation of a lane.

    Args:
        act: does it, in the lane's thread.
        others: as in `Operation`.
    """

    def __init__(
        self, member: Member, what: str, peers: Collection[int], seconds: float, begun: int | None, act: Act
    ) -> None:
        super().__init__(member, what, peers, seconds, begun)
        self._act = act
        self._over = threading.Event()
        self._trouble: Exception | None = None

    def run(self, lane: Lane) -> None:
        """Do it; a failure breaks the group at once."""
        try:
            self._act(lane, self)
        except (RuntimeError, TimedOutError, TensorVineError, OSError, MemoryError) as exc:
            self._trouble = self._failed(exc)
        self._over.set()

    def _finish(self, deadline: float) -> None:
        lost_at = None
        while not self._over.wait(min(max(deadline - time.monotonic(), 0.0), LOOK_S)):
            now = time.monotonic()
            if now >= deadline:
                raise TimedOutError
            if self._member.broken:
                raise RuntimeError("the group is broken")
            if self._member.lacks(self._peers):
                lost_at = lost_at or now
                if now - lost_at > GRACE_S + LOOK_S:
                    raise RuntimeError("a member is lost, and NCCL does not return")
        if self._trouble is not None:
            raise RuntimeError from self._trouble

    def _complete(self) -> bool:
        return self._over.is_set()

    @property
    def deadline(self) -> float:
        """Of `time.monotonic`."""
        return self._deadline

    @property
    def peers(self) -> Collection[int]:
        """Ranks that it needs."""
        return self._peers
