"""A save under way: the two waits that training needs, and its end where its caller does not go on waiting.

Rules
- A save counts for its caller until the call that asked for it returns. Where that call ends by an exception, the save
  is given up: it commits nothing afterwards. One that another thread is committing just then is waited for; the
  caller's own thread asks what became of it (`Saver`).
- A timeout of `staged` or `committed` ends only the wait.
- No waiting thread can block the thread that carries the save out, whatever a signal handler raises in it. So there is
  no `threading.Event` here: an exception in the middle of its `wait` can leave its lock taken for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....store.errors import OperationTimeoutError, without_frames
from ....store.waiting import Deadline
from ...engine.opened import Opened
from ..requests import Numbered
from .request import Saved

LATE_S = 30.0
"""How much longer than its timeout a save that has begun is waited for: its own steps end by the timeout, and know why
it ran out."""


class PendingSave:
    """A save started by `Repository.save_async`.

    `staged` waits until the caller can change the tensors. `committed` waits until the version is committed. If the
    client, or a shard that holds data of the save, dies before the commit, the version is not created.

    Args:
        name: Name of the model.
        deadline: Deadline of the save.
        give_up: Function that ends a request at the catalog and the shards, without waiting for answers.
    """

    def __init__(self, name: str, deadline: Deadline, give_up: Callable[[Numbered], None]) -> None:
        self._name = name
        self._opened = Opened(f"save of {name!r}")
        self._deadline = deadline
        self._end = give_up
        self._lock = threading.Lock()
        """Guards what a save may still become: given up, or committed."""
        self._begun = self._given_up = self._here = False
        self.commits = False
        """The commit has begun: it cannot be given up any more."""
        self._staged, self._ended = _Mark(), _Mark()
        self._is_staged = False
        self.numbered: Numbered | None = None
        """Its number, as soon as anybody may have been asked for something."""
        self.ended_at = 0.0
        """When it ended, by `time.perf_counter`; 0 before that."""
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self.done():
            return f"PendingSave({self._name!r}, {'staged' if self._is_staged else 'copying'})"
        return f"PendingSave({self._name!r}, {self._saved.ref if self._saved is not None else repr(self._error)})"

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors are copied, so that the caller can change them.

        This method does not wait for the commit of the version. If the wait ends early, because of a timeout or an
        exception such as `KeyboardInterrupt`, the save continues.

        Args:
            timeout: Seconds to wait. None waits until the save's own timeout.

        Raises:
            OperationTimeoutError: if the tensors are not copied in time.
            ClosedError: if this process is a forked child of the process that started the save.
            TensorVineError: the error of the save, if the save failed before the tensors were copied.
        """
        self._wait(self._staged, timeout, "staged")
        if self._error is not None and not self._is_staged:
            raise self._error

    def committed(self, timeout: float | None = None) -> Saved:
        """Wait until the version is committed, and thus visible to all clients.

        If the wait ends early, because of a timeout or an exception such as `KeyboardInterrupt`, the save continues.

        Args:
            timeout: Seconds to wait. None waits until the save's own timeout.

        Returns:
            The new version, and the numbers of bytes written and inherited.

        Raises:
            OperationTimeoutError: if the version is not committed in time.
            ClosedError: if this process is a forked child of the process that started the save.
            TensorVineError: the error of the save, if the save failed.
        """
        self._wait(self._ended, timeout, "committed")
        if self._saved is None:
            raise self._error or OperationTimeoutError(f"save of {self._name!r}: ended without a result")
        return self._saved

    def done(self) -> bool:
        """Return whether the save has ended, with or without success."""
        return self._ended.is_set()

    def give_up(self) -> None:
        """Cancel the save. If the commit has already begun, wait until the save has ended instead."""
        with self._lock:
            self._given_up = True
            waits = self.commits and not self._here
        if waits:
            self._ended.wait(self._deadline.left() + LATE_S)
        elif self.numbered is not None and not self.done():
            self._end(self.numbered)

    # ---- for the thread that carries the save out -----------------------------------------------------

    def ended(self, deadline: Deadline) -> bool:
        """Wait until the save has ended. Return False if it has not by then."""
        return self._ended.wait(deadline.left())

    def run(self, work: Callable[[], Saved], here: bool = False) -> None:
        """Run the save in this thread, and pass the result or error to the callers of `staged` and `committed`.

        Args:
            work: Function that performs the save.
            here: Whether this is the thread that requested the save.
        """
        self._here = here
        self._begun = True
        try:
            self._saved = work()
        except BaseException as exc:  # noqa: BLE001  handed to the caller that waits
            self._error = without_frames(exc)
        finally:
            del work  # the error keeps this frame
            self.ended_at = time.perf_counter()
            self._staged.set()
            self._ended.set()

    def mark_staged(self) -> None:
        """Record that the tensors are copied and the caller can change the tensors."""
        self._is_staged = True
        self._staged.set()

    def check(self) -> None:
        """Check that the save was not canceled.

        Raises:
            OperationTimeoutError: if the save was canceled.
        """
        if self._given_up:
            raise OperationTimeoutError(
                f"save of {self._name!r}: canceled, because the call that requested it has ended"
            )

    def commit(self) -> None:
        """Record that the commit begins. After this call, the save cannot be canceled.

        Raises:
            OperationTimeoutError: if the save was canceled.
        """
        with self._lock:
            self.check()
            self.commits = True

    def _wait(self, mark: _Mark, timeout: float | None, what: str) -> None:
        self._opened.check_process()
        if mark.wait((self._deadline if timeout is None else Deadline.after(timeout)).left()):
            return
        if timeout is not None:
            raise OperationTimeoutError(
                f"save of {self._name!r}: expected it to be {what} within {timeout} s; it is not"
            )
        if not (self._begun and mark.wait(LATE_S)):
            found = "it is still running" if self._begun else "earlier saves are still running"
            raise OperationTimeoutError(f"save of {self._name!r}: expected it to be {what} within its timeout; {found}")


class _Mark:
    """Something that happens once, for threads to wait for. To set it never blocks."""

    def __init__(self) -> None:
        self._set = False
        self._turn = threading.Lock()
        self._turn.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._turn.release()

    def wait(self, timeout: float) -> bool:
        if not self._set and self._turn.acquire(timeout=timeout):
            self._turn.release()  # the next one's turn; where an exception comes before this, that one sees `_set`
        return self._set
