"""What was asked first and comes last, after what ends it: it must not stay for ever.

Rules
- Who asks a shard to hold what a version names, and gives that up, has the holder released. The two messages may go by
  different ways; so the release may come first, and what it ends comes after it.
- A holder that is released before it held anything is remembered, and refused once, when it comes. A version's number
  is never used twice: nobody else is refused.
- A save that ended, well or not, is remembered, and refused whatever is asked for it from then on: its client does not
  wait for that any more, and would give nothing back.
- Most of what is remembered never comes. The oldest goes when there are too many.
"""

from __future__ import annotations

from cachetools import LRUCache

from ..errors import OperationTimeoutError

LIMIT = 1024


class Overtaken:
    """Holders that were released before they held anything.

    >>> overtaken = Overtaken()
    >>> overtaken.released("m@1")
    >>> overtaken.check("m@2")
    >>> overtaken.check("m@1")
    Traceback (most recent call last):
    tensorvine.store.errors.OperationTimeoutError: m@1: expected to be held before it was given up; it was released
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._holders: LRUCache[str, None] = LRUCache(limit)

    def released(self, holder: str) -> None:
        """Remember a holder that holds nothing."""
        self._holders[holder] = None

    def check(self, holder: str) -> None:
        """Let a holder pass that is to hold something now.

        Raises:
            OperationTimeoutError: it was released before.
        """
        if holder in self._holders:
            del self._holders[holder]
            raise OperationTimeoutError(f"{holder}: expected to be held before it was given up; it was released")


class Ended:
    """Saves that ended.

    >>> ended = Ended()
    >>> ended.check("client/s1")
    >>> ended.end("client/s1")
    >>> ended.check("client/s1")
    Traceback (most recent call last):
    tensorvine.store.errors.OperationTimeoutError: save client/s1: expected to be under way; it has ended
    """

    def __init__(self) -> None:
        self._saves: LRUCache[str, None] = LRUCache(LIMIT)

    def end(self, save_id: str) -> None:
        """Remember a save."""
        self._saves[save_id] = None

    def check(self, save_id: str) -> None:
        """Let a save pass that is under way.

        Raises:
            OperationTimeoutError: it ended before.
        """
        if save_id in self._saves:
            raise OperationTimeoutError(f"save {save_id}: expected to be under way; it has ended")
