"""Processes of tests: those of a Ray, and one that stands still for a while."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.waiting import eventually


def of_ray_in(folder: Path) -> list[psutil.Process]:
    """Find the processes whose Ray keeps what it writes in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@contextmanager
def folder_of_a_ray() -> Iterator[Path]:
    """A folder with a short path: Ray puts sockets there. What still runs with it at the end is killed."""
    folder = Path(tempfile.mkdtemp(prefix="tv", dir="/tmp"))
    try:
        yield folder
    finally:
        for process in of_ray_in(folder):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def stand_still(process: psutil.Process) -> None:
    """Stop a process, and wait until each of its threads has stopped.

    The kernel tells one thread of it, and the others only when that one has run: on a busy machine they still answer
    for a while.
    """
    process.suspend()
    tasks = Path(f"/proc/{process.pid}/task")
    eventually(lambda: not any(map(_runs, tasks.iterdir())), f"process {process.pid} stands still", pause=0.005)


def _runs(task: Path) -> bool:
    try:
        fields = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return False
    return fields.rpartition(")")[2].split()[0] != "T"
