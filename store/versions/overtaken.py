"""What was asked first and comes last, after what ends it: it must not stay for ever.

Rules
- Who asks a shard to hold what a version names, and gives that up, has the holder released. The two messages may go by
  different ways; so the release may come first, and what it ends comes after it.
- A version that is released before it held anything is remembered, and refused once, when it comes. A version's number
  is never used twice: nobody else is refused.
- A save that ended, well or not, and a query that was aborted are remembered, and refused whatever is asked for them
  from then on: their client does not wait for that, and would give nothing back.
- Most of what is remembered never comes. The oldest goes when there are too many.
"""

from __future__ import annotations

from cachetools import LRUCache

from ..errors import OperationTimeoutError
from ..holders import Query, Save
from ..refs import ModelRef

LIMIT = 1024


class Overtaken:
    """Versions that were released before they held anything.

    >>> overtaken = Overtaken()
    >>> overtaken.released(ModelRef("m", 1))
    >>> overtaken.check(ModelRef("m", 2))
    >>> overtaken.check(ModelRef("m", 1))
    Traceback (most recent call last):
    tensorvine.store.errors.OperationTimeoutError: m@1: expected it to be held before its release; it was released
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._released: LRUCache[ModelRef, None] = LRUCache(limit)

    def released(self, ref: ModelRef) -> None:
        """Remember a version that holds nothing."""
        self._released[ref] = None

    def check(self, ref: ModelRef) -> None:
        """Let a version pass that is to hold something now.

        Raises:
            OperationTimeoutError: it was released before.
        """
        if ref in self._released:
            del self._released[ref]
            raise OperationTimeoutError(f"{ref}: expected it to be held before its release; it was released")


class Ended:
    """Saves that ended, and queries that were aborted.

    >>> ended = Ended()
    >>> ended.check(Save("client", 1))
    >>> ended.end(Save("client", 1))
    >>> ended.check(Save("client", 1))
    Traceback (most recent call last):
    tensorvine.store.errors.OperationTimeoutError: save client/s1: expected to be in progress; it has ended
    """

    def __init__(self) -> None:
        self._ended: LRUCache[Save | Query, None] = LRUCache(LIMIT)

    def end(self, operation: Save | Query) -> None:
        """Remember an operation."""
        self._ended[operation] = None

    def check(self, operation: Save | Query) -> None:
        """Let an operation pass that is under way.

        Raises:
            OperationTimeoutError: it ended before.
        """
        if operation in self._ended:
            raise OperationTimeoutError(
                f"{type(operation).__name__.lower()} {operation}: expected to be in progress; it has ended"
            )
