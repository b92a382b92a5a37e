"""Control groups that limit memory, where this user may make them."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
ENTER = 'echo $$ >"$PROCS" && exec "$@"'
"""What a shell does with a command to run it in the group whose `cgroup.procs` PROCS names."""


@contextmanager
def memory_group(limit: int) -> Generator[Path]:
    """Make a control group of so many bytes, whose processes must have ended at the end; skips where none can be made.

    Gives:
        the file that a process enters it by.
    """
    first = _ROOT / "memory"
    parent, file = (first, "memory.limit_in_bytes") if first.is_dir() else (_ROOT, "memory.max")
    folder = parent / f"tensorvine-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"no control groups that this user may make: {exc}")
    try:
        try:
            (folder / file).write_text(str(limit))
        except OSError as exc:
            pytest.skip(f"control groups here do not limit memory: {exc}")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()
