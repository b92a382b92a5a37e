"""How the examples start: a quiet TensorFlow, and an end by Ctrl-C that is no traceback."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

INTERRUPTED = 130
"""The exit code that shells give to what Ctrl-C ended."""
AGAIN_S = 0.05
"""Seconds after which a Ctrl-C that was lost is raised again."""


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process with what shells expect when Ctrl-C comes within the block."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow reads it when it is imported, actors inherit it
    try:
        with _raised_again():
            yield
    except KeyboardInterrupt:
        typer.echo("\nstopped by Ctrl-C", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _raised_again() -> Iterator[None]:
    """Raise a Ctrl-C again that came while Python ran a finalizer or a weak reference's callback.

    Python prints what such a function raises, and goes on.
    """
    hook, over = sys.unraisablehook, False

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())  # the interrupted code may hold the locks of `threading`
        else:
            hook(unraisable)

    def again() -> None:
        time.sleep(AGAIN_S)  # at once, it would meet the same finalizer
        if not over:
            os.kill(os.getpid(), signal.SIGINT)

    sys.unraisablehook = lost
    try:
        yield
    finally:
        over = True
        sys.unraisablehook = hook


@contextmanager
def stderr_closed() -> Iterator[None]:
    """Drop what is written to file descriptor 2.

    TensorFlow's C++ part says there that it found no GPU, whatever its log level; errors are raised, not written.
    """
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
