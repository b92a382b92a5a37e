"""A progress bar for an operation that may take long: its part that is done, the rate and the time left.

Rules
- A bar is shown where standard error is a terminal, or the program a notebook with widgets, once the operation has
  taken `QUIET_S`. It is removed when the operation ends.
- One bar at a time: an operation within another one shows none.
- A bar never fails its operation. Rich is imported when a bar is shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from ...store.errors import TensorVineError

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

QUIET_S = 1.0
POLL_S = 0.5
"""How often a bar that measures asks."""
END_S = 5.0
"""How long the end of an operation waits for a measurement in progress."""

Measure: TypeAlias = Callable[[], "tuple[float, float | None]"]
"""Returns the amount that is done, and the total amount (None if unknown)."""
Unit = Literal["bytes", "versions", "shards"]
_T = TypeVar("_T")
_turn = threading.Lock()
"""Held by the operation that may show a bar."""


def is_visible() -> bool:
    """Return whether a person sees the output of this process."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None and importlib.util.find_spec("ipywidgets") is not None


class Bar:
    """The bar of one operation.

    Args:
        what: names the operation.
        unit: of `total`.
        total: the total amount. None if unknown.
        measure: called while the operation runs, in a thread of its own. None if the operation calls `advance`.
    """

    def __init__(self, what: str, unit: Unit, total: float | None, measure: Measure | None) -> None:
        self._what = what
        self._unit: Unit = unit
        self._done, self._total = 0.0, total
        self._measure = measure
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._shown: Any = None
        """Rich's progress, while it is shown."""
        self._thread = threading.Thread(target=self._run, name="tensorvine-progress", daemon=True)
        self._thread.start()

    def advance(self, amount: float) -> None:
        """Add to the part that is done."""
        self._set(self._done + amount, self._total)

    def close(self) -> None:
        """Remove the bar."""
        self._ended.set()
        self._thread.join(END_S)
        with self._lock:
            if self._shown is not None:
                self._shown.stop()

    def _set(self, done: float, total: float | None) -> None:
        with self._lock:
            self._done, self._total = done, total
            if self._shown is not None and not self._ended.is_set():
                self._shown.update(self._shown.task_ids[0], completed=done, total=total)

    def _run(self) -> None:
        if self._ended.wait(QUIET_S):
            return
        try:
            with self._lock:
                self._shown = _progress(self._unit)
                self._shown.add_task(self._what, completed=self._done, total=self._total)
                self._shown.start()
            while self._measure is not None and not self._ended.wait(POLL_S):
                with contextlib.suppress(TensorVineError):  # the operation itself raises it
                    self._set(*self._measure())
        except Exception:
            log.exception("%s: the progress bar failed; the operation continues", self._what)


@contextlib.contextmanager
def bar(
    what: str, unit: Unit, total: float | None = None, measure: Measure | None = None
) -> Generator[Callable[[float], None]]:
    """Show a bar while an operation runs; yield the function to call with each part that is done. See `Bar`."""
    if not is_visible() or not _turn.acquire(blocking=False):
        yield lambda _: None
        return
    try:
        shown = Bar(what, unit, total, measure)
        try:
            yield shown.advance
        finally:
            shown.close()
    finally:
        _turn.release()


def each(items: Iterable[_T], what: str, unit: Unit, total: float) -> Iterator[_T]:
    """Yield items, and show a bar of those that are done."""
    with bar(what, unit, total) as advance:
        for item in items:
            yield item
            advance(1.0)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _progress(unit: Unit) -> Any:
    """Return rich's progress with the columns for a unit."""
    from rich import progress

    many = (progress.DownloadColumn(), progress.TransferSpeedColumn()) if unit == "bytes" else (_count_column(unit),)
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *many)
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=_console(), transient=True)


def _count_column(unit: Unit) -> Any:
    """Return a column that shows the part that is done, and the rate."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Count(ProgressColumn):
        """Done, all, and per second."""

        def render(self, task: Task) -> Text:
            """Return the text of the column."""
            total = f"/{task.total:,.0f}" if task.total is not None else ""
            rate = f", {task.speed:,.1f}/s" if task.speed else ""
            return Text(f"{task.completed:,.0f}{total} {unit}{rate}")

    return Count()
