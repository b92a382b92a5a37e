"""How many do something just now."""

from __future__ import annotations

import threading


class Busy:
    """How many do something now: `with busy:` around it.

    >>> busy = Busy()
    >>> with busy:
    ...     bool(busy)
    True
    >>> bool(busy), busy.count
    (False, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        """How many."""

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1

    def __bool__(self) -> bool:
        return self.count > 0
