"""Stops a call of an actor at a step, where a test wants to cut a link, until the test lets it go on.

Rules
- A step is an actor, a call's name, and "before" or "after" what carries it out. It is wanted by a file of its
  name in the folder of a repository or a run; the first call that comes there takes the file away and waits for the
  next one.
- Only actors on the test's hosts have gates: what their workers are forked from puts them in (`node`), and so do
  clients, from whom Ray takes the methods of actors that they start.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

FOLDER = "TENSORVINE_TEST_GATES"
"""An environment variable: the folder of the gates' folders."""
LOOK_S = 0.01
OPEN_S = 120.0
"""A gate that nobody opens opens by itself."""
_Method = Callable[..., Coroutine[Any, Any, Any]]


class Gate:
    """The test's side of one step.

    Args:
        folder: that of all gates.
        whose: a repository or a run.
        step: such as "shard.commit.before".
    """

    def __init__(self, folder: Path, whose: str, step: str) -> None:
        (folder / whose).mkdir(exist_ok=True)
        self.whose, self.step = whose, step
        self._wanted, self._reached = _files(str(folder / whose / step))
        Path(self._wanted).touch()

    def wait(self, goes_on: Callable[[], bool], timeout: float) -> bool:
        """Wait until a call has come there; False: what was to come there does not go on any more."""
        deadline = time.monotonic() + timeout
        while os.path.exists(self._wanted):
            if not goes_on() or time.monotonic() > deadline:
                return not os.path.exists(self._wanted)
            time.sleep(LOOK_S)
        return True

    def open(self) -> None:
        """Have the call go on, and none stop here any more."""
        for file in (self._wanted, self._reached):
            Path(file).unlink(missing_ok=True)


def install() -> None:
    """Put gates into the actors of this process."""
    catalog = importlib.import_module("tensorvine.actors.catalog.catalog").Catalog
    shard = importlib.import_module("tensorvine.actors.shard.shard").Shard
    planner = importlib.import_module("tensorvine.actors.planner.planner").Planner
    trainer = importlib.import_module("tensorvine.actors.training.trainer").TrainerActor
    _put(catalog, "catalog", lambda arguments: arguments["config"].topology.repository)
    _put(shard, "shard", lambda arguments: arguments["config"].repository)
    _put(planner, "planner", lambda arguments: arguments["topology"].repository)
    _put(trainer, "trainer", lambda arguments: arguments["run"])


def _put(cls: type, actor: str, whose: Callable[[dict[str, Any]], str]) -> None:
    made = cls.__init__

    @functools.wraps(made)
    def make(self: Any, **arguments: Any) -> None:
        self.gates = os.path.join(os.environ[FOLDER], whose(arguments))
        made(self, **arguments)

    cls.__init__ = make
    for name in dir(cls):
        method = getattr(cls, name)
        if hasattr(method, "answers") and asyncio.iscoroutinefunction(method):
            setattr(cls, name, _gated(f"{actor}.{name}", method))


def _gated(name: str, method: _Method) -> _Method:
    @functools.wraps(method)
    async def gated(self: Any, *arguments: Any) -> Any:
        await _pass(f"{self.gates}/{name}.before")
        answer = await method(self, *arguments)
        await _pass(f"{self.gates}/{name}.after")
        return answer

    return gated


async def _pass(step: str) -> None:
    wanted, reached = _files(step)
    if not os.path.exists(wanted):
        return
    try:
        os.rename(wanted, reached)
    except FileNotFoundError:  # another call was faster
        return
    deadline = time.monotonic() + OPEN_S
    while os.path.exists(reached) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)


def _files(step: str) -> tuple[str, str]:
    return f"{step}.wanted", f"{step}.reached"
