"""Where the members of a group meet before they are one: each brings an endpoint, and gets the endpoints of all.

Rules
- A meeting is a key. It ends when all have their answer, or when those who wait have given up; then it is forgotten.
- Who does not come within the time is named. Two who come as the same rank are refused, and so are two sizes.
- An endpoint is JSON-like. It says how its bringer is reached.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol

from ...store.errors import OperationTimeoutError
from ...store.waiting import Deadline
from ..engine.engine import Engine
from ..rpc.calls import answers, remote
from ..rpc.channel import Channel
from .timeouts import TIMEOUTS

ACTOR = "rendezvous"

Endpoint = Mapping[str, Any]
"""Tells the others how a member is reached; JSON-like."""
Endpoints = list[dict[str, Any]]
"""Those of all members, by rank."""


class Rendezvous(Protocol):
    """A place to meet."""

    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Bring an endpoint, and wait for those of all ranks.

        Args:
            key: names the meeting, and stands at the beginning of errors: "group 'g', epoch 2".
            rank: who comes, 0 to size - 1.
            size: how many come.
            endpoint: what the others are to know.
            timeout: seconds.

        Returns:
            The endpoints, by rank.

        Raises:
            OperationTimeoutError: not all came; names the missing ranks.
            ValueError: somebody came as this rank, or for another size; or there is no such rank.
        """
        ...


class Meeting:
    """Who has come to one meeting; whoever uses it keeps others away meanwhile.

    >>> meeting = Meeting("group 'g'", 2)
    >>> meeting.come(1, 2, {"port": 7}), meeting.missing
    (False, [0])
    >>> meeting.come(0, 2, {"port": 8}), meeting.endpoints
    (True, [{'port': 8}, {'port': 7}])
    """

    def __init__(self, key: str, size: int) -> None:
        self._key, self._size = key, size
        self._came: dict[int, dict[str, Any]] = {}
        self._gave_up: set[int] = set()

    def come(self, rank: int, size: int, endpoint: Endpoint) -> bool:
        """Take note of who comes; gives whether all have come.

        Raises:
            ValueError: as in `Rendezvous.exchange`.
        """
        if size != self._size:
            raise ValueError(f"{self._key}: expected a group of {self._size}; found rank {rank} of {size}")
        if not 0 <= rank < size:
            raise ValueError(f"{self._key}: expected a rank from 0 to {size - 1}; found {rank}")
        if rank in self._came:
            raise ValueError(f"{self._key}: expected one member of rank {rank}; found a second one")
        self._came[rank] = dict(endpoint)
        return not self.missing

    def leave(self, rank: int) -> bool:
        """Take note of who waits no longer; gives whether nobody does."""
        del self._came[rank]
        self._gave_up.add(rank)
        return not self._came

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self._size) if rank not in self._came]

    @property
    def endpoints(self) -> Endpoints:
        """The endpoints, by rank."""
        return [self._came[rank] for rank in range(self._size)]

    def late(self, timeout: float) -> OperationTimeoutError:
        """Say who did not come, or who came and did not wait long enough."""
        never = [rank for rank in self.missing if rank not in self._gave_up]
        who = (
            f"{', '.join(map(str, never))} did not"
            if never
            else f"{', '.join(map(str, self.missing))} had stopped waiting"
        )
        expected = f"ranks 0 to {self._size - 1} to join within {timeout:.1f} s"
        return OperationTimeoutError(f"{self._key}: expected {expected}; {who}")


class LocalRendezvous:
    """A meeting point for a group whose members are threads or coroutines of one process.

    >>> LocalRendezvous().exchange("group 'g'", 0, 1, {"port": 7}, timeout=1.0)
    [{'port': 7}]
    """

    def __init__(self) -> None:
        self._meetings: dict[str, tuple[Meeting, Future[Endpoints]]] = {}
        self._lock = threading.Lock()

    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Send this member's endpoint (address) to all ranks, and return the endpoints of all ranks.

        Args:
            key: Name of the exchange, equal for all members. Error messages begin with this name.
            rank: Rank of this member.
            size: Number of members.
            endpoint: JSON-like description of how other members reach this member.
            timeout: Seconds to wait for all members.

        Returns:
            The endpoints of all members by rank.

        Raises:
            OperationTimeoutError: if a member is missing when the timeout expires. The message names the missing ranks.
            ValueError: if another member passed the same `rank` or a different `size`, or `rank` is not from 0 to
                size - 1.
        """
        deadline = Deadline.after(timeout)
        meeting, complete = self._come(key, rank, size, endpoint)
        wait([complete], deadline.left())
        return self._left(key, rank, meeting, complete, timeout)

    async def met(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Exchange endpoints without blocking the event loop. Arguments, result and errors are as in `exchange`."""
        meeting, complete = self._come(key, rank, size, endpoint)
        await asyncio.wait([asyncio.wrap_future(complete)], timeout=max(timeout, 0.0))
        return self._left(key, rank, meeting, complete, timeout)

    def _come(self, key: str, rank: int, size: int, endpoint: Endpoint) -> tuple[Meeting, Future[Endpoints]]:
        with self._lock:
            meeting, complete = self._meetings.get(key) or (Meeting(key, size), Future[Endpoints]())
            if meeting.come(rank, size, endpoint):
                self._meetings.pop(key, None)
                complete.set_result(meeting.endpoints)
            else:
                self._meetings[key] = meeting, complete
        return meeting, complete

    def _left(self, key: str, rank: int, meeting: Meeting, complete: Future[Endpoints], timeout: float) -> Endpoints:
        with self._lock:
            if complete.done():
                return complete.result()
            error = meeting.late(timeout)
            if meeting.leave(rank):
                del self._meetings[key]
        raise error


class RendezvousCalls:
    """Calls of the cluster's rendezvous."""

    @remote("watch")
    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Meet; see `Rendezvous.exchange`."""
        ...


class RendezvousActor:
    """Where the processes of a cluster meet: a service."""

    def __init__(self) -> None:
        self._place = LocalRendezvous()

    @answers(RendezvousCalls.exchange)
    async def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        return await self._place.met(key, rank, size, endpoint, timeout)


class ActorRendezvous:
    """A client's end of the cluster's rendezvous, which is started where there is none.

    Args:
        engine: what runs actors.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def exchange(self, key: str, rank: int, size: int, endpoint: Endpoint, timeout: float) -> Endpoints:
        """Meet; see `Rendezvous.exchange`.

        Raises:
            ShardUnavailableError: the rendezvous died meanwhile.
        """
        try:
            actor = self._engine.find(ACTOR)
        except LookupError:
            actor = self._engine.spawn(RendezvousActor, ACTOR, {})
        request = RendezvousCalls.exchange(key, rank, size, dict(endpoint), timeout)
        try:
            return Channel(self._engine, f"{key}: rendezvous", actor=actor).call(request, timeout + TIMEOUTS.answer)
        except ValueError as exc:  # the engine's tells how it came here, too
            raise ValueError(str(getattr(exc, "cause", exc))) from None
