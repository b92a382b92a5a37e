"""How many do something just now."""

from __future__ import annotations

import threading


class Busy:
    """How many do something now: `with busy:` around it.

    >>> busy = Busy()
    >>> with busy:
    ...     bool(busy)
    True
    >>> bool(busy)
    False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    def __bool__(self) -> bool:
        return self._count > 0
