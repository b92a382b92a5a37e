"""How the examples start: a quiet TensorFlow, and an end by Ctrl-C or SIGTERM that is no traceback."""

from __future__ import annotations

import _thread
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
"""The exit codes that shells give to what Ctrl-C or SIGTERM ended."""
AGAIN_S = 0.05
"""Seconds after which a Ctrl-C that was lost is raised again."""


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process with what shells expect when Ctrl-C or SIGTERM (`ray job stop`) comes within the block."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow reads it when it is imported, actors inherit it
    with _terminable() as terminated:
        try:
            with _raised_again():
                yield
        except KeyboardInterrupt:
            typer.echo(f"\nstopped by {'SIGTERM' if terminated() else 'Ctrl-C'}", err=True)
            raise typer.Exit(TERMINATED if terminated() else INTERRUPTED) from None


@contextmanager
def _terminable() -> Iterator[Callable[[], bool]]:
    """Let the first SIGTERM do what Ctrl-C does, whatever that is by then; yields whether one came.

    Later ones do nothing: what was started is being ended.
    """
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
    """Have SIGTERM handled as before after the block: `ray.init` puts a handler of its own there."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


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
