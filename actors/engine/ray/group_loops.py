"""The event loops of an actor's concurrency groups, each of which gets a thread.

Ray starts a thread for each group's loop, and the thread looks up which loop it is to run when it begins to run
(`CoreWorker.initialize_eventloops_for_actor_concurrency_group`, Ray 2.60). Where the machine is busy that is after Ray
has gone on to the next group: then two threads run one loop, the second of them fails, and what is called in the group
whose loop nobody runs is never answered. Here it does not matter which loop a thread asks for: each runs one that none
has run yet.

Ray makes an actor's object (`__new__`), then the loops, and calls `__init__` in one of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from ray import _raylet
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR

log = logging.getLogger(__name__)

NewLoop = Callable[[], asyncio.AbstractEventLoop]


def with_loops(cls: type) -> type:
    """Return a class like `cls` whose actors have all of their loops run."""

    def __new__(klass: type, *_: object, **__: object) -> object:  # noqa: N807
        install()
        return cast(Any, cls).__new__(klass)

    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {"__new__": __new__, **named})


def install() -> None:
    """Make Ray use such loops in this process, which is about to become an actor.

    Ray warns of each `ray.get` in an actor with event loops. Ours are called in threads and in constructors, where they
    block no loop that answers; loops await (`RayEngine.awaitable`).
    """
    os.environ.setdefault(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")
    new_loop: NewLoop | None = getattr(_raylet, "get_new_event_loop", None)
    if new_loop is None:
        log.info("this version of Ray creates event loops of actors in another way; they are left unchanged")
    elif not isinstance(new_loop, EachRunOnce):
        _raylet.get_new_event_loop = EachRunOnce(new_loop)  # pyright: ignore[reportAttributeAccessIssue]


class EachRunOnce:
    """Makes event loops. Of those that it made, each thread that runs one runs the first that nobody has run.

    Args:
        new_loop: makes one.
    """

    def __init__(self, new_loop: NewLoop) -> None:
        self._new_loop = new_loop
        self._runs: deque[Callable[[], None]] = deque()

    def __call__(self) -> asyncio.AbstractEventLoop:
        """Make a loop."""
        loop = self._new_loop()
        self._runs.append(loop.run_forever)
        loop.run_forever = self._run_next
        return loop

    def _run_next(self) -> None:
        self._runs.popleft()()
