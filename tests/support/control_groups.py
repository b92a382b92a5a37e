"""Control groups that limit memory, where this user may make them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorvine.store.waiting import Backoff, Deadline

END_S = 60.0
"""How long processes of a group may take to end; after half of it they are killed."""
_ROOT = Path("/sys/fs/cgroup")
ENTER = 'echo $$ >"$PROCS" && exec "$@"'
"""What a shell does with a command to run it in the group whose `cgroup.procs` PROCS names."""


@contextmanager
def memory_group(limit: int) -> Generator[Path]:
    """Make a control group of so many bytes; skips where none can be made. What is left in it at the end is killed.

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
        _end(folder)


def _end(folder: Path) -> None:
    """Wait for a group's processes to end, and remove it."""
    deadline, pauses = Deadline.after(END_S), Backoff(0.02, 0.2)
    while True:
        try:
            folder.rmdir()
        except OSError:  # some have not ended, or were not removed yet
            if not pauses.wait(deadline):
                raise
        else:
            return
        if deadline.left() < END_S / 2:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
