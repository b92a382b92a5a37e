"""Actors as tests reach into them, on any engine: they run a function there, and are killed by their processes.

Rules
- A function that is to run in an actor is a nested one, which goes there as code and not as a name.
- Ray's actors can run one by themselves. On Dask those can that were spawned in a process where `reachable` holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast
from unittest import mock

import cloudpickle
import ray
import ray.exceptions
from tensorvine.actors import Repository
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.engine.groups import group
from tensorvine.actors.engine.ray.engine import _translate
from tensorvine.actors.rpc.messages import planner_name
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.waiting import Backoff, Deadline

from tests.support.asking import ask

PATIENCE_S = 60.0


def run_in(engine: Engine, name: str, work: Callable[[Any], Any]) -> Any:
    """Have the actor of a name run a function of it, and return the answer."""
    actor: Any = engine.find(name)
    if isinstance(engine, DaskEngine):
        return ask(engine, actor, "run_of_test", cloudpickle.dumps(work), timeout=PATIENCE_S, who=name)
    try:
        return ray.get(actor.__ray_call__.remote(work), timeout=PATIENCE_S)
    except ray.exceptions.RayError as exc:
        _translate(exc, PATIENCE_S, name)


def pid_of(engine: Engine, name: str) -> int:
    """Return the process of the actor of a name."""
    return run_in(engine, name, lambda _: os.getpid())


def planner_pid(repository: Repository) -> int:
    """Return the process of a repository's planner."""
    return pid_of(repository.engine, planner_name(repository.name))


def kill_planner(repository: Repository) -> None:
    """Kill a repository's planner, which starts again by itself."""
    os.kill(planner_pid(repository), signal.SIGKILL)


def restart_planner(repository: Repository) -> None:
    """Kill a repository's planner, and wait until it has started again."""
    first = planner_pid(repository)
    os.kill(first, signal.SIGKILL)
    deadline, pauses = Deadline.after(PATIENCE_S), Backoff(0.05, 0.5)
    while True:
        with contextlib.suppress(ShardUnavailableError):
            if planner_pid(repository) != first:
                return
        assert pauses.wait(deadline), "the planner starts again"


def joining(engine: Engine) -> dict[str, str]:
    """Return the environment of a program that joins a cluster by `engine=os.environ.get("ENGINE")`."""
    if isinstance(engine, DaskEngine):
        return {"ENGINE": engine._seat.cluster}
    return {"RAY_ADDRESS": cast(Any, ray.get_runtime_context()).gcs_address}


@contextmanager
def reachable() -> Iterator[None]:
    """Have actors on Dask run functions of tests, if they are spawned here meanwhile."""
    spawn = DaskEngine.spawn

    def spawn_reachable(engine: DaskEngine, cls: type, *arguments: Any, **named: Any) -> Any:
        return spawn(engine, _reachable(cls), *arguments, **named)

    with mock.patch.object(DaskEngine, "spawn", spawn_reachable):
        yield


@cache
def _reachable(cls: type) -> type:
    """Return a class with one more method: a nested one, so that it travels as code."""

    class Reachable(cls):
        @group("ctl")
        async def run_of_test(self, work: bytes) -> Any:
            return cloudpickle.loads(work)(self)

    return Reachable
