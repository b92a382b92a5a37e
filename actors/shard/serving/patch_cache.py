"""The patches that a shard has made lately.

Rules
- A patch is made once for each pair of contents, also when several readers ask at the same time: the others wait.
- Patches stay while readers ask for them: the least recently used go above `CACHE_BYTES`, and all after `IDLE_S`.
- If a patch would be too long, this is kept instead, so it is not made again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ....store.codecs.blocks import Bytes
from ....store.errors import OperationTimeoutError, without_frames

CACHE_BYTES = 256 << 20
IDLE_S = 60.0

Made = Bytes | str
"""A patch, or the reason for its absence."""
Key = tuple[str, str, str, tuple[int, ...]]
"""Content hashes of base and tensor, dtype and shape."""


@dataclass(slots=True, eq=False)
class _Entry:
    used: float
    """When it was asked for last, by `time.monotonic`."""
    future: Future[Made] = field(default_factory=Future[Made])

    @property
    def nbytes(self) -> int:
        """Length of the patch, if it is made."""
        made = self.future.result() if self.future.done() else ""
        return 0 if isinstance(made, str) else made.nbytes


class PatchCache:
    """Keeps patches; used by several threads.

    >>> cache = PatchCache()
    >>> [cache.get(("a", "b", "int8", (1,)), lambda: "too long", timeout=1.0) for _ in range(2)], cache.made
    (['too long', 'too long'], 1)
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        """In the order in which they were asked for last."""
        self._lock = threading.Lock()
        self.made = 0
        """How often a patch was made, or found to be too long."""

    @property
    def nbytes(self) -> int:
        """Bytes of all patches that are kept."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values())

    def get(self, key: Key, make: Callable[[], Made], timeout: float) -> Made:
        """Return a patch; the first caller makes it.

        Args:
            key: of the patch.
            make: makes it.
            timeout: seconds to wait for another caller that makes it.

        Raises:
            OperationTimeoutError: that took longer.
            TensorVineError: what `make` raised, here or there. It is made again when it is asked for next.
        """
        with self._lock:
            known = self._entries.pop(key, None)
            entry = known or _Entry(time.monotonic())
            entry.used = time.monotonic()
            self._entries[key] = entry
        if known is None:
            self._make(key, entry, make)
        try:
            return entry.future.result(timeout)
        except TimeoutError as exc:
            raise OperationTimeoutError(f"patch: expected it within {timeout:.1f} s; it is still being made") from exc

    def drop_idle(self) -> None:
        """Free the patches that no reader asked for lately."""
        idle = time.monotonic() - IDLE_S
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.used < idle and entry.future.done()]:
                del self._entries[key]

    def _make(self, key: Key, entry: _Entry, make: Callable[[], Made]) -> None:
        try:
            made = make()
        except BaseException as exc:
            with self._lock:
                del self._entries[key]
            entry.future.set_exception(without_frames(exc))
            raise
        with self._lock:
            self.made += 1
            entry.future.set_result(made)
            kept = sum(each.nbytes for each in self._entries.values())
            for oldest in [each for each, old in self._entries.items() if old.nbytes and old is not entry]:
                if kept <= CACHE_BYTES:
                    break
                kept -= self._entries.pop(oldest).nbytes
