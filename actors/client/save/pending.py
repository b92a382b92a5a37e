"""A save under way: the two waits that training needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....store.errors import OperationTimeoutError
from ....store.waiting import seconds_of
from ...engine.opened import Opened
from .request import Saved


class PendingSave:
    """What `Repository.save_async` gives: `staged`, then `committed`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened = Opened(f"save of {name!r}")
        self._staged = threading.Event()
        self._ended = threading.Event()
        self._is_staged = False
        self.ended_at = 0.0
        """When it ended, by `time.perf_counter`; 0 before that."""
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self.done():
            return f"PendingSave({self._name!r}, {'staged' if self._is_staged else 'copying'})"
        return f"PendingSave({self._name!r}, {self._saved.ref if self._saved is not None else repr(self._error)})"

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the caller may change its tensors.

        Args:
            timeout: seconds; None: as long as the save's own timeout lets it run.

        Raises:
            OperationTimeoutError: not staged in time.
            ClosedError: this is a forked child of the process that saves.
            TensorVineError: the save failed before it was staged.
        """
        self._wait(self._staged, timeout, "staged")
        if self._error is not None and not self._is_staged:
            raise self._error

    def committed(self, timeout: float | None = None) -> Saved:
        """Wait until the version exists; errors as in `staged`."""
        self._wait(self._ended, timeout, "committed")
        if self._saved is None:
            raise self._error or OperationTimeoutError(f"save of {self._name!r}: ended without a result")
        return self._saved

    def run(self, work: Callable[[], Saved]) -> None:
        """Carry the save out in this thread; the caller that waits gets its result or its error."""
        try:
            self._saved = work()
        except BaseException as exc:  # noqa: BLE001  handed to the caller that waits
            self._error = exc
        finally:
            self.ended_at = time.perf_counter()
            self._staged.set()
            self._ended.set()

    def done(self) -> bool:
        """Tell whether it ended, well or not."""
        return self._ended.is_set()

    def mark_staged(self) -> None:
        """Tell who waits that the caller may change its tensors."""
        self._is_staged = True
        self._staged.set()

    def _wait(self, event: threading.Event, timeout: float | None, what: str) -> None:
        self._opened.check_process()
        if not event.wait(None if timeout is None else seconds_of(timeout)):
            raise OperationTimeoutError(f"save of {self._name!r}: expected {what} within {timeout} s; it is not yet")
