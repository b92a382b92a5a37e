"""Requests of clients, and the pins and the memory that belong to them.

Rules
- A client numbers its saves, queries and retirements with one counter, from 1: a number means one request for good. One
  that is over is refused from then on (`store.requests`).
- A `Request` and a `Filling` are never equal: clients have identifiers of 16 hexadecimal digits.
- What is looked up most is made, hashed and compared in C: hence named tuples.
"""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """A numbered request of a client: a save, a prefix query, or a retirement.

    As a save it owns memory that its client fills, and the segments that it brings until its commit. As a save or a
    query it owns pins.

    >>> str(Request("client", 7))
    'client/7'
    """

    client: str
    number: int

    def __str__(self) -> str:
        return f"{self.client}/{self.number}"


class Lease(NamedTuple):
    """A pin on a version: it keeps the version's tensors until it is removed, or its request is over.

    >>> str(Lease(Request("client", 9), 2))
    'client/9.2'
    """

    request: Request
    position: int = 0
    """Tells the pins of one query apart: the position of its graph."""

    @property
    def client(self) -> str:
        """The client whose session it belongs to."""
        return self.request.client

    def __str__(self) -> str:
        return f"{self.request}.{self.position}"


class Filling(NamedTuple):
    """A shard that fills memory of its own: it loads, copies, compacts.

    >>> str(Filling("load", 3)), str(Filling("compaction"))
    ('load 3', 'compaction')
    """

    purpose: str
    serial: int = 0
    """Tells those of one purpose apart."""

    def __str__(self) -> str:
        return f"{self.purpose} {self.serial}" if self.serial else self.purpose


Owner = Request | Filling
"""Whose a part of a shard's memory is, as long as no segment lies in it."""
