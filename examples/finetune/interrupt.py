"""Ctrl-C that is not lost: TensorFlow's C++ part swallows some of those that come while it runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Give what raises KeyboardInterrupt after a Ctrl-C within the block whose own one was lost."""
    came = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        came.set()
        raise KeyboardInterrupt

    def check() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)
