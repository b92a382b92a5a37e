"""An operation under way: one `Work` for all back ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ...store.errors import TensorVineError
from ...store.waiting import Deadline
from .standing import again

_FOR_EVER = Deadline(threading.TIMEOUT_MAX)
"""Of an operation that was given up: its memory is in use until it ends, and a lock waits for no longer."""


class Owner(Protocol):
    """The member whose operation it is, which decides what becomes of it; see `Member`."""

    def check_process(self) -> None:
        """Refuse to go on in a forked child of the member's process."""
        ...

    def late(self, operation: Operation) -> None:
        """Break the group because of an operation that takes too long; what nothing touches ends by that."""
        ...

    def fail(self, operation: Operation, cause: Exception) -> TensorVineError:
        """Break the group because of an operation that failed, and end it; gives the reason that stands."""
        ...

    def finish(self, operation: Operation) -> None:
        """End an operation that nothing touches any more: well, unless the group broke meanwhile."""
        ...


class Operation:
    """An operation; it ends when nothing touches its memory any more.

    Args:
        member: whose it is.
        what: it, in words.
        peers: ranks that it waits for.
        seconds: how long it may take, from now.
        number: which collective it is, where the others can be asked how far they are; None: it is none such.
        memory: what it keeps until the end.
    """

    def __init__(
        self,
        member: Owner,
        what: str,
        peers: Sequence[int],
        seconds: float,
        number: int | None = None,
        memory: object = None,
    ) -> None:
        self.what = what
        self.peers = peers
        self.number = number
        self.deadline = Deadline.after(seconds)
        self._member = member
        self.memory: Any = memory
        self._error: TensorVineError | None = None
        self._over = threading.Event()

    def end(self, error: TensorVineError | None = None) -> None:
        """Take note that it has ended, well or not; only the first call counts. The member's lock is held."""
        if not self._over.is_set():
            self._error = error
            self.memory = None
            self._over.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end; see `Work`."""
        self._member.check_process()
        deadline = self.deadline if timeout is None else Deadline.after(timeout)
        if not self._over.is_set() and not self._finished(deadline):
            self._member.late(self)
            self._finished(_FOR_EVER)
        if self._error is not None:
            raise again(self._error)

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        self._member.check_process()
        if not self._over.is_set() and self.deadline.passed:
            self._member.late(self)
        return self._over.is_set()

    @property
    def ended(self) -> bool:
        """Whether it has ended; unlike `done`, this does not look at the time."""
        return self._over.is_set()

    def _finished(self, deadline: Deadline) -> bool:
        """Wait for its end; tell whether it came in time."""
        return self._over.wait(deadline.left(threading.TIMEOUT_MAX))
