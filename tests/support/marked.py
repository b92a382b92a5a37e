"""Processes of tests that are known by a mark in their environment, whatever their parents."""

from __future__ import annotations

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


def outlive(mark: str, seconds: float = 20.0) -> list[str]:
    """Return the command lines of marked processes that do not end within `seconds`."""
    _, alive = psutil.wait_procs(marked(mark), timeout=seconds)
    return [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]
