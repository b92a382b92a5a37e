"""The numbers of one client's requests: saves, queries, retirements (docs/design/catalog.md, *numbered*, *declared*).

Rules
- A number is open as long as its `Numbered` is referred to and was not ended. So no exception, at whatever point,
  leaves one open: what is declared next ends it, with its pins, its memory and what it staged.
- A `Numbered` may become garbage at any moment. The callback is a deque's `append`, which is C code: no exception of a
  signal handler interrupts it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from ...store.holders import Lease, Request
from ..rpc.catalog_messages import Declared


class Numbered:
    """A request that is open."""

    __slots__ = ("__weakref__", "leases", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.leases: set[Lease] = set()
        """Its pins, as long as `Pins` holds them."""


class _Reference(weakref.ref[Numbered]):
    __eq__, __hash__ = object.__eq__, object.__hash__
    request: Request


class Requests:
    """The requests of one client.

    >>> requests = Requests("client")
    >>> first, second = requests.begin(), requests.begin()
    >>> requests.end(first)
    >>> requests.declared()
    Declared(open=(2,), highest=2)
    >>> del second
    >>> requests.given_up(), requests.declared()
    ([Request(client='client', number=2)], Declared(open=(), highest=2))
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._highest = 0
        self._open: dict[int, _Reference] = {}
        self._garbage: deque[_Reference] = deque()
        self._lock = threading.Lock()

    def begin(self) -> Numbered:
        """Number a request."""
        with self._lock:
            number = self._highest = self._highest + 1  # first: no exception has a number used twice
            made = Numbered(Request(self._client, number))
            reference = _Reference(made, self._garbage.append)
            reference.request = made.request
            self._open[number] = reference
        return made

    def end(self, numbered: Numbered) -> None:
        """Note that a request is over; a second call is no error."""
        with self._lock:
            self._open.pop(numbered.request.number, None)

    def given_up(self) -> list[Request]:
        """Return the requests that nobody refers to any more, and that were not ended: they are over now."""
        found: list[Request] = []
        with self._lock:
            while self._garbage:
                request = self._garbage.popleft().request
                if self._open.pop(request.number, None) is not None:
                    found.append(request)
        return found

    def declared(self) -> Declared:
        """Say which requests are open."""
        with self._lock:
            gone = {reference.request.number for reference in list(self._garbage)}
            return Declared(tuple(number for number in self._open if number not in gone), self._highest)
