"""Ctrl-C and SIGTERM end an example without a traceback."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit codes of shells for processes that Ctrl-C or SIGTERM ended."""
AGAIN_S = 0.05
"""Seconds after which a lost Ctrl-C is raised again."""


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process with the exit code that shells expect after Ctrl-C or SIGTERM (`ray job stop`) in the block."""
    with _terminable() as terminated:
        try:
            with _raised_again():
                yield
        except KeyboardInterrupt:
            typer.echo(f"\nstopped by {'SIGTERM' if terminated() else 'Ctrl-C'}", err=True)
            raise typer.Exit(TERMINATED if terminated() else INTERRUPTED) from None


@contextmanager
def _terminable() -> Iterator[Callable[[], bool]]:
    """Handle the first SIGTERM like Ctrl-C, and ignore later ones. Yields a function that says whether one came."""
    came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            return
        came = True
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # Ctrl-C is ignored, as in the background job of a shell
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after the block: `ray.init` sets its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


@contextmanager
def _raised_again() -> Iterator[None]:
    """Raise a Ctrl-C again that came in a finalizer or a callback of a weak reference: Python only prints it."""
    hook, over = sys.unraisablehook, False

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())  # the interrupted code may hold the locks of `threading`
        else:
            hook(unraisable)

    def again() -> None:
        time.sleep(AGAIN_S)  # immediately, it could meet the same finalizer
        if not over:
            os.kill(os.getpid(), signal.SIGINT)

    sys.unraisablehook = lost
    try:
        yield
    finally:
        over = True
        sys.unraisablehook = hook


def quiet_tune() -> None:
    """Have Ray Tune print nothing, write no logs for other programs, and leave Ctrl-C to the example."""
    os.environ |= {
        "RAY_AIR_NEW_OUTPUT": "0",  # otherwise Tune prints in spite of "verbose"
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
    }
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
