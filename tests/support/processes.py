"""Processes of tests that are stopped and go on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

PATIENCE_S = 60.0


def stand_still(process: psutil.Process) -> None:
    """Stop a process, and wait until each of its threads has stopped.

    The kernel tells one thread of it, and the others only when that one has run: on a busy machine they still answer
    for a while.
    """
    process.suspend()
    deadline = time.monotonic() + PATIENCE_S
    while any(_runs(task) for task in Path(f"/proc/{process.pid}/task").iterdir()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process.pid}: expected all threads to stop within {PATIENCE_S} s")
        threading.Event().wait(0.005)


def _runs(task: Path) -> bool:
    try:
        fields = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return False
    return fields.rpartition(")")[2].split()[0] != "T"
