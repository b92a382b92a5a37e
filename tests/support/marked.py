"""Processes of tests that are known by a mark in their environment, whatever their parents."""

from __future__ import annotations

import contextlib

import psutil

MARK = "TENSORVINE_TEST_MARK"
"""The environment variable; its value is a test's own, such as the path of its temporary folder."""


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that run with this mark."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def names_of(mark: str) -> set[str]:
    """Return the names of marked processes."""
    found: set[str] = set()
    for process in marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(process.name())
    return found


def outlive(mark: str, seconds: float = 90.0) -> list[str]:
    """Return the command lines of marked processes that do not end within `seconds`.

    Ray's agents try for 60 s to tell a head that has died with them before they end.
    """
    _, alive = psutil.wait_procs(marked(mark), timeout=seconds)
    found: list[str] = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(process.cmdline())[:120])
    return found
