"""What members of a group have in common whose bytes go by a foreign library: why the group broke, and by whom.

Rules
- Libraries say that a connection ended or that something took too long. The mesh says who died, who left and who gave
  up: after an error it has `GRACE_S` to do so.
- The first failure breaks the group: the others are told, and the connections are cut, so that those who wait for this
  member fail at once and for the same reason, not at the end of their time.
- A collective that took too long asks the others how far they are: those who have not begun it are named.
- A member that died or left harms nothing that goes on without it: what needs it fails, and nothing else.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError, TensorVineError
from .group import Group, even_bounds
from .mesh import Link, Loss, Mesh

GRACE_S = 1.0
"""How long the mesh has to tell who is behind an error."""
ASK_S = 0.5
"""How long the others have to tell how far they are."""
_TOLD = {kind.__name__: kind for kind in (OperationTimeoutError, PeerLostError, TensorMismatchError)}


class TimedOutError(Exception):
    """A library's wait ended before its operation did."""


class Member(Group):
    """One member's end of a group that a library carries. Subclasses start operations between `_enter` and `wait`.

    Args:
        name: of the group.
        epoch: of the group.
        rank: this member.
        size: how many there are.
        timeout: seconds; see `Group.timeout`.
        links: to all others, from `mesh.Door`.
    """

    def __init__(self, name: str, epoch: int, rank: int, size: int, timeout: float, links: Mapping[int, Link]) -> None:
        self.name = name
        self.epoch = epoch
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.label = label_of(name, epoch)
        self._changed = threading.Condition()
        self._reason: TensorVineError | None = None
        """Why the group is broken; the first reason stays."""
        self._lost: dict[int, Loss] = {}
        self._gave_up: dict[int, TensorVineError] = {}
        self._begun = 0
        """Collectives."""
        self._far: dict[int, int] = {}
        """Rank -> collectives that it has begun; the answers to a question."""
        self._mesh = Mesh(links, self._told, self._gone)

    @abstractmethod
    def _cut(self) -> None:
        """End all connections, so that whoever waits here or there fails; called once, when the group breaks."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the library holds; called once, by `close`."""

    def close(self) -> None:
        """Leave."""
        with self._changed:
            if isinstance(self._reason, _LeftError):
                return
            broken = self._reason is not None
            self._reason = _LeftError(str(self._reason) if broken else f"{self.label}: this member has left")
            self._changed.notify_all()
        self._mesh.close()
        if not broken:
            self._cut()
        self._release()

    # ---- before an operation --------------------------------------------------------------------------------

    def _peer(self, rank: int) -> int:
        """Check the other rank of a message."""
        if not 0 <= rank < self.size or rank == self.rank:
            found = "this rank" if rank == self.rank else "it"
            raise ValueError(f"{self.label}: expected another rank from 0 to {self.size - 1}; found {found}, {rank}")
        return rank

    def _root(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.label}: expected a root from 0 to {self.size - 1}; found {rank}")
        return rank

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else timeout
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise ValueError(f"{self.label}: expected a timeout above 0 s that ends; found {seconds}")
        return seconds

    def _bounds(self, length: int, bounds: Sequence[int] | None) -> list[int]:
        """Check where the parts of an all-gather begin and end."""
        edges = even_bounds(length, self.size) if bounds is None else list(bounds)
        if len(edges) != self.size + 1 or sorted(edges) != edges or edges[0] < 0 or edges[-1] > length:
            expected = f"{self.size + 1} rising bounds from 0 to {length}"
            raise ValueError(f"{self.label}: all_gather: expected {expected}; found {edges}")
        return edges

    def _enter(self, what: str, peers: Collection[int]) -> None:
        """Refuse an operation of a broken group, and one that needs who is lost."""
        with self._changed:
            if self._reason is not None:
                raise again(self._reason)
            known = self._known(peers)
        if known:
            raise self.failed(what, peers, None, RuntimeError("lost"))

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    # ---- after one failed -----------------------------------------------------------------------------------

    def failed(self, what: str, peers: Collection[int], begun: int | None, cause: Exception) -> TensorVineError:
        """Break the group because of an operation, and give the error to raise.

        Args:
            what: the operation, in words.
            peers: ranks that it needs.
            begun: which collective it was; None: it was none.
            cause: what the library said; `TimedOutError`: nothing. An error of ours is the reason itself.
        """
        if isinstance(cause, TensorVineError):
            return self._break(cause)
        late = isinstance(cause, TimedOutError)
        with self._changed:
            if not late:
                self._changed.wait_for(lambda: self._reason is not None or self._known(peers), GRACE_S)
            if self._reason is not None:
                return again(self._reason)
            error = self._blame(what, peers)
        if error is None and late:
            waited = self._behind(begun) if begun is not None else list(peers)
            error = OperationTimeoutError(
                f"{self.label}: {what}: expected {_ranks(waited)} to take part in time; found none"
            )
        elif error is None:
            error = PeerLostError(f"{self.label}: {what}: the connection to {_ranks(peers)} ended ({cause})")
        return self._break(error)

    @property
    def broken(self) -> bool:
        """Whether it refuses all that comes."""
        return self._reason is not None

    def lacks(self, peers: Collection[int]) -> bool:
        """Tell whether one of these died, left or gave up."""
        with self._changed:
            return self._known(peers)

    def await_news(self, reached: Callable[[], bool], timeout: float) -> bool:
        """Wait until `reached` is true; it is asked after each piece of news, and holds up others meanwhile."""
        with self._changed:
            return self._changed.wait_for(reached, max(timeout, 0.0))

    def _known(self, peers: Collection[int]) -> bool:
        return any(peer in self._lost or peer in self._gave_up for peer in peers)

    def _blame(self, what: str, peers: Collection[int]) -> TensorVineError | None:
        """Name who is behind it: who died comes first, then the reason of who gave up, then who left."""
        found = [peer for peer in self._lost if peer in peers and peer not in self._gave_up]
        died = [peer for peer in found if self._lost[peer] == "died"]
        gave_up = [peer for peer in self._gave_up if peer in peers]
        if gave_up and not died:
            theirs = self._gave_up[gave_up[0]]
            return type(theirs)(f"{theirs} (told by rank {gave_up[0]})")
        if not found:
            return None
        peer = (died or found)[0]
        return PeerLostError(f"{self.label}: {what}: rank {peer} {self._lost[peer]}")

    def _behind(self, begun: int) -> list[int]:
        """Find out which members have not begun a collective."""
        with self._changed:
            self._far = {}
        self._mesh.tell_all({"asked": True})
        others = self._others()
        with self._changed:
            self._changed.wait_for(lambda: all(peer in self._far for peer in others), ASK_S)
            return [peer for peer in others if self._far.get(peer, 0) < begun] or others

    def _break(self, error: TensorVineError) -> TensorVineError:
        """Break the group, unless it is; give the reason that stands."""
        with self._changed:
            if self._reason is not None:
                return again(self._reason)
            self._reason = error
            self._changed.notify_all()
        self._mesh.tell_all({"gave_up": type(error).__name__, "text": str(error)})
        self._cut()
        return error

    # ---- what the mesh tells --------------------------------------------------------------------------------

    def _told(self, peer: int, message: Mapping[str, Any]) -> None:
        if "asked" in message:
            self._mesh.tell(peer, {"begun": self._begun})
            return
        with self._changed:
            if "begun" in message:
                self._far[peer] = int(message["begun"])
            elif "gave_up" in message:
                kind = _TOLD.get(str(message["gave_up"]), PeerLostError)
                self._gave_up.setdefault(peer, kind(str(message["text"])))
            self._changed.notify_all()

    def _gone(self, peer: int, loss: Loss) -> None:
        with self._changed:
            self._lost[peer] = loss
            self._changed.notify_all()


class Operation(ABC):
    """An operation under way; it is a `Work`.

    Args:
        member: who takes part in it.
        what: it, in words.
        peers: ranks that it needs.
        seconds: how long it may take, from now.
        begun: which collective it is; None: it is none.
    """

    def __init__(
        self, member: Member, what: str, peers: Collection[int], seconds: float, begun: int | None = None
    ) -> None:
        self._member = member
        self._what = what
        self._peers = peers
        self._deadline = time.monotonic() + seconds
        self._begun = begun
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: TensorVineError | None = None
        self._asked = threading.Lock()
        """Taken for good by the first who asks a question that only a wait can answer."""

    @abstractmethod
    def _finish(self, deadline: float) -> None:
        """Wait for its end; called once.

        Raises:
            TimedOutError: the deadline (of `time.monotonic`) has passed.
            RuntimeError: it failed.
        """

    @abstractmethod
    def _complete(self) -> bool | None:
        """Tell whether it has ended, well or not; None: only a wait can tell."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; see `Work`."""
        if not self._ended.is_set():
            self._settle(self._deadline if timeout is None else time.monotonic() + timeout)
        if self._error is not None:
            raise again(self._error)

    def done(self) -> bool:
        """Tell whether it has ended. Where only a wait can tell, a thread waits from the first question on."""
        if self._ended.is_set():
            return True
        complete = self._complete()
        if complete is None and not self._asked.locked() and self._asked.acquire(blocking=False):
            threading.Thread(target=self._settle, args=(self._deadline,), name="collective-wait", daemon=True).start()
        return bool(complete) or self._ended.is_set()

    def _settle(self, deadline: float) -> None:
        """Let it end, well or not; one thread at a time does this."""
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            self._error = self._failed(TimedOutError())
            return
        try:
            if not self._ended.is_set():
                try:
                    self._finish(deadline)
                except (TimedOutError, RuntimeError) as exc:
                    self._error = self._failed(exc)
                self._ended.set()
        finally:
            self._lock.release()

    def _failed(self, cause: Exception) -> TensorVineError:
        return self._member.failed(self._what, self._peers, self._begun, cause)


class _LeftError(PeerLostError):
    """This member has left."""


def label_of(name: str, epoch: int) -> str:
    """Write a group's name for messages."""
    return f"group {name!r}, epoch {epoch}"


def again(error: TensorVineError) -> TensorVineError:
    """Return an error that can be raised once more; raised twice, one would show the traces of both."""
    kind = PeerLostError if isinstance(error, _LeftError) else type(error)
    return kind(str(error))


def _ranks(ranks: Sequence[int] | Collection[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
