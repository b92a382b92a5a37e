"""Measures the branches that this process takes, and keeps them although it may be killed. See `tests.branches`."""

from __future__ import annotations

import _thread
import atexit
import json
import os
import sys
from time import monotonic_ns, sleep  # bound here: tests put others into that module
from typing import NoReturn

import coverage

FOLDER = "TENSORVINE_COVERAGE"
"""An environment variable: the folder of what processes have taken."""
ROOMS = ("actors", "clusters", "planner", "store")
EVERY_S = 0.1
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class Kept:
    """The branches of this process, written to a file of its own soon after they were taken first."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._measured = coverage.Coverage(
            data_file=None, branch=True, config_file=False, source=[os.path.join(ROOT, room) for room in ROOMS]
        )
        self._written: dict[str, set[int]] = {}
        self._lock = _thread.allocate_lock()

    def start(self) -> None:
        self._measured.start()
        atexit.register(self.write)
        os.register_at_fork(before=self.write, after_in_child=self.go_on)
        os._exit = exit_now
        self.go_on()

    def go_on(self) -> None:
        """Write from time to time, in a process that was forked, too.

        A fork server of Ray's workers may start no thread, so it does not; its children, which have written, do.
        """
        self._lock = _thread.allocate_lock()
        self._path = os.path.join(self._folder, f"{os.getpid()}-{monotonic_ns()}.jsonl")
        if not any(word.endswith("warm/server.py") for word in sys.orig_argv) or self._written:
            _thread.start_new_thread(self.write_for_ever, ())

    def write_for_ever(self) -> None:
        while True:
            sleep(EVERY_S)
            self.write()

    def write(self) -> None:
        """Append what is new."""
        with self._lock:
            new: dict[str, list[int]] = {}
            for name, arcs in self._measured._collector.data.copy().items():
                written = self._written.setdefault(name, set())
                if len(arcs) > len(written):
                    new[name] = list(arcs.copy() - written)
                    written.update(new[name])
            if new:
                with open(self._path, "a") as kept:
                    kept.write(json.dumps(new) + "\n")


_exit = os._exit
_kept: list[Kept] = []


def exit_now(status: int) -> NoReturn:
    """Stand in for `os._exit`. It is pickled as that, by name."""
    for each in _kept:
        each.write()
    _exit(status)


exit_now.__module__, exit_now.__qualname__, exit_now.__name__ = "os", "_exit", "_exit"
if FOLDER in os.environ:
    _kept.append(Kept(os.environ[FOLDER]))
    _kept[0].start()
