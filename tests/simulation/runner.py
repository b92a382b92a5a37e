"""Runs seeds and tells what they broke.

Rules
- A seed gives the same trace every time: the collector is off while a world runs, and hashes of text must be fixed
  (`PYTHONHASHSEED=0`).
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from . import seams, threads
from .scenario import Scenario

WARMING = (-1, -2, -3)


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    steps: int
    broken: list[tuple[str, str]]
    trace: list[str] = field(default_factory=list[str])


@contextmanager
def simulator() -> Generator[None]:
    """Prepare this process for worlds."""
    importlib.import_module("scipy.optimize")
    hook, enabled = sys.unraisablehook, gc.isenabled()
    with seams.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of worlds that ended before they began
        gc.disable()
        sys.unraisablehook = lambda unraisable: None
        for seed in WARMING:  # what is imported late must be there, so that the collector need not look at it again
            run(seed)
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            sys.unraisablehook = hook
            gc.unfreeze()
            if enabled:
                gc.enable()


def run(seed: int, traced: bool = False, theme: str | None = None) -> Outcome:
    """Run one seed within a `simulator`."""
    handler, before = None, set(weakref.finalize._registry)  # pyright: ignore
    scenario = Scenario(seed, traced, theme)
    threads.enter(scenario.world)
    root = logging.getLogger("tensorvine")
    if traced:
        handler = _Noting(scenario)
        root.addHandler(handler)
    else:
        logging.disable(logging.CRITICAL)
    try:
        with seams.copies_in_pieces(scenario.kind.piece_bytes):
            scenario.run()
    finally:
        scenario.world.end()
        for finalizer in set(weakref.finalize._registry) - before:  # pyright: ignore  # of this world: it must not touch the next one
            finalizer.detach()
        threads.enter(scenario.world)
        logging.disable(logging.NOTSET)
        if handler is not None:
            root.removeHandler(handler)
    outcome = Outcome(seed, scenario.world.steps, scenario.oracle.broken, scenario.world.trace or [])
    del scenario, handler
    for _ in range(4):  # what a finalizer set free is found in the next round
        if not gc.collect():
            break
    return outcome


class _Noting(logging.Handler):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(logging.DEBUG)
        self._world = scenario.world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" {record.exc_info[1]!r}"
        self._world.note(f"log {record.levelname}: {text}")
