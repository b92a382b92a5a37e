"""How the examples start: a quiet TensorFlow, and an end by Ctrl-C that is no traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

INTERRUPTED = 130
"""The exit code that shells give to what Ctrl-C ended."""


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process with what shells expect when Ctrl-C comes within the block."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow reads it when it is imported, actors inherit it
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\nstopped by Ctrl-C", err=True)
        raise typer.Exit(INTERRUPTED) from None


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
