"""Watching a training and its consumers while they run: a line that changes, and notes of how far the training was.

Rules
- One thread asks a few times a second; neither the training nor an answer waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from tensorvine.actors import PublishReport
from tensorvine.store.errors import TensorVineError

from .answering import Answering
from .recorded import Sighting
from .report import Line

LOOK_S = 0.25


class Watch:
    """Looks at a training until the `with` block ends.

    Args:
        report: asks the training what it did so far.
        line: where to show it.
    """

    def __init__(self, report: Callable[[], PublishReport], line: Line) -> None:
        self.answering: Answering | None = None
        """Who asks the consumers; set when that begins."""
        self.sightings: list[Sighting] = []
        self._report = report
        self._line = line
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)

    def look(self) -> None:
        """Note and show how things are."""
        report = self._report()
        if not report.losses:
            return
        iteration, loss = report.losses[-1]
        self.sightings.append(Sighting(time.time(), iteration, report.curve))
        newest = report.updates[-1].ref.version if report.updates else None
        answers = self.answering.so_far() if self.answering else ()
        self._line.show(iteration, loss, newest, self.answering.versions() if self.answering else [], answers)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        if error is None:
            self.look()

    def _look_on(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
            except TensorVineError:  # whoever waits for the training hears of it
                return
