"""Restrict an open client to the process that opened it, until it is closed.

Rules
- A forked child has copies of its parent's sockets, and none of its threads. A call there could read the parent's
  answers, and a close could end what the parent uses. So in a child every call is refused, and closing does nothing.
- A check compares two flags: it may stand on a hot path. Forks are counted by a hook of Python's, so that no call asks
  the system for its process id.
"""

from __future__ import annotations

import os
import threading

from ...store.errors import ClosedError


class Opened:
    """Says whether a client, a connection or an engine may be used here and now.

    Args:
        what: names it in errors.

    >>> opened = Opened("doc")
    >>> opened.check()
    >>> opened.close(), opened.close()
    (True, False)
    >>> opened.check()
    Traceback (most recent call last):
    tensorvine.store.errors.ClosedError: doc: expected it to be open; it was closed
    """

    __slots__ = ("_closed", "_forks", "_lock", "_process", "_what")

    def __init__(self, what: str) -> None:
        _forks.count_from_here()
        self._what = what
        self._forks = _forks.count
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether it was closed; a forked child's copy counts as closed."""
        return self._closed or self.inherited

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that opened it."""
        return self._forks != _forks.count

    def check(self) -> None:
        """Refuse to go on if it was closed, or if this is a forked child.

        Raises:
            ClosedError: says which.
        """
        if self._closed or self._forks != _forks.count:
            self.check_process()
            raise ClosedError(f"{self._what}: expected it to be open; it was closed")

    def check_process(self) -> None:
        """Refuse to go on in a forked child, whether it was closed or not; errors as in `check`."""
        if self._forks != _forks.count:
            raise ClosedError(
                f"{self._what}: expected process {self._process}, which opened it; found its forked child "
                f"{os.getpid()}: connect in a process that is started by 'spawn' or 'forkserver'"
            )

    def close(self) -> bool:
        """Mark it as closed. Return False if there is nothing to close: it was closed before, or this is a child."""
        if self.inherited:  # the lock may be that of a thread which the child does not have
            return False
        with self._lock:
            first, self._closed = not self._closed, True
        return first


class _Forks:
    """Counts how many forks are between this process and the one that made the first `Opened`."""

    def __init__(self) -> None:
        self.count = 0
        self._registered = False

    def count_from_here(self) -> None:
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.count += 1


_forks = _Forks()
