"""Ctrl-C that waits for the framework: TensorFlow's C++ part swallows an exception that comes while it runs, or prints
it as an error of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """What became of Ctrl-C: KeyboardInterrupt at once, or, within `deferred`, at the next `check`.

    A second Ctrl-C is KeyboardInterrupt at once in any case.
    """

    def __init__(self) -> None:
        self._came = False
        self._deferred = False

    @contextmanager
    def handled(self) -> Iterator[Interrupts]:
        """Handle Ctrl-C within the block."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep a Ctrl-C that comes within the block until the next `check`, or the block's end."""
        self._deferred = True
        try:
            yield
            self.check()
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self._came:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if again or not self._deferred:
            raise KeyboardInterrupt
