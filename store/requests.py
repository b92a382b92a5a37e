"""The sessions of clients and the numbers of their requests: which are open, and which are over for good.

Rules
- A client uses its numbers in ascending order. What it declares (`declare`) is the truth about all numbers up to the
  highest: those that are not open are over.
- A request that ended by itself (`end`) is over, too, whatever is declared later.
- A client that ended is refused for good; the last `GONE` of them are remembered. A session that only ran out leaves
  its numbers as they are: the client may have been stopped for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cachetools import LRUCache

from .errors import OperationTimeoutError
from .holders import Request

GONE = 16_384


@dataclass(slots=True)
class _Session:
    expires: float = 0.0
    """0.0: it has run out."""
    highest: int = 0
    open: frozenset[int] = frozenset()
    """Of those up to `highest`."""
    ended: set[int] = field(default_factory=set[int])
    """Above `highest`, or in `open`."""


class Requests:
    """The requests of all clients, as one actor knows them.

    Args:
        session_s: seconds that a session lasts without a sign of life.

    >>> requests = Requests(60.0)
    >>> requests.open("client", now=0.0)
    True
    >>> requests.declare("client", open_numbers=[3], highest=4, now=0.0)
    >>> requests.is_over(Request("client", 2)), requests.is_over(Request("client", 3))
    (True, False)
    >>> requests.end(Request("client", 5))
    >>> requests.check(Request("client", 5))
    Traceback (most recent call last):
    tensorvine.store.errors.OperationTimeoutError: request client/5: expected to be in progress; it has ended
    """

    def __init__(self, session_s: float) -> None:
        self.session_s = session_s
        self._sessions: dict[str, _Session] = {}
        self._gone: LRUCache[str, None] = LRUCache(GONE)

    # ---- sessions -------------------------------------------------------------------------------------

    def open(self, client: str, now: float) -> bool:
        """Start or renew a session; return whether it is new, or had run out.

        Raises:
            OperationTimeoutError: the client has ended.
        """
        if client in self._gone:
            raise OperationTimeoutError(f"client {client}: expected a client that runs; it has ended")
        session = self._sessions.setdefault(client, _Session())
        fresh = not session.expires
        session.expires = now + self.session_s
        return fresh

    def lives(self, client: str) -> bool:
        """Tell whether a client has a session that has not run out."""
        session = self._sessions.get(client)
        return session is not None and session.expires > 0.0

    def clients(self) -> list[str]:
        """List the clients whose sessions have not run out."""
        return [client for client, session in self._sessions.items() if session.expires]

    def expired(self, now: float) -> list[str]:
        """Name the clients whose sessions have run out since this was asked last."""
        found = [client for client, session in self._sessions.items() if 0.0 < session.expires <= now]
        for client in found:
            self._sessions[client].expires = 0.0
        return found

    def gone(self, client: str) -> None:
        """Note that a client has ended: all of its requests are over."""
        self._sessions.pop(client, None)
        self._gone[client] = None

    # ---- numbers --------------------------------------------------------------------------------------

    def declare(self, client: str, open_numbers: Collection[int], highest: int, now: float) -> None:
        """Take what a client says of its numbers. What was said later counts; errors as in `open`."""
        self.open(client, now)
        session = self._sessions[client]
        if highest < session.highest:  # said before what is known
            return
        session.highest, session.open = highest, frozenset(open_numbers)
        session.ended = {number for number in session.ended if number > highest or number in session.open}

    def end(self, request: Request) -> None:
        """Note that a request is over."""
        if request.client not in self._gone:
            self._sessions.setdefault(request.client, _Session()).ended.add(request.number)

    def is_over(self, request: Request) -> bool:
        """Tell whether a request is over."""
        if request.client in self._gone:
            return True
        session = self._sessions.get(request.client)
        if session is None:
            return False
        number = request.number
        return number in session.ended or (number <= session.highest and number not in session.open)

    def check(self, request: Request) -> None:
        """Refuse a request that is over.

        Raises:
            OperationTimeoutError: it is.
        """
        if self.is_over(request):
            raise OperationTimeoutError(f"request {request}: expected to be in progress; it has ended")

    def over(self, requests: Iterable[Request]) -> list[Request]:
        """Return those that are over."""
        return [request for request in requests if self.is_over(request)]
