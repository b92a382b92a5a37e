"""Carry out the consequences of a change of a shard's state.

Rules
- The state decides what to free, compact, write and delete, and lists it; `Settling` has it carried out.
- Last, callers that wait for room check again.
"""

from __future__ import annotations

from collections.abc import Callable

from .context import Change, ShardContext


class Settling:
    """Carries out the consequences of changes of one shard's state.

    Args:
        context: the shard's.
    """

    def __init__(self, context: ShardContext) -> None:
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._notifier = context.notifier
        self._tidy: list[Callable[[], None]] = []

    def also(self, tidy: Callable[[], None]) -> None:
        """Add a function that each `settle` calls with the lock held."""
        self._tidy.append(tidy)

    def settle(self) -> None:
        """Carry out the consequences of the last changes. Call it without the lock; it waits for nothing."""
        with self._lock:
            self._segment_memory.settle()
            for tidy in self._tidy:
                tidy()
        self._notifier.tell(Change.ROOM)
