"""Who keeps what from going, each as a type of its own.

Rules
- All are frozen, made in C, and hashed and compared there: names are looked up in every step of every save.
- They travel inside messages, and stand in no file.
"""

from __future__ import annotations

from typing import NamedTuple


class Lease(NamedTuple):
    """A client's pin on a version, which keeps its tensors until it is let go of or the client's session ends.

    The home of the version gives it, and it moves with the name from home to home.

    >>> str(Lease("client", 2, "5fe7c1d2", 7))
    'client/2.5fe7c1d2.7'
    """

    client: str
    shard: int
    """Which gave it."""
    life: str
    """Of that shard: a lease of an earlier one must not let go of another's pin."""
    serial: int

    def __str__(self) -> str:
        return f"{self.client}/{self.shard}.{self.life}.{self.serial}"
