"""Three actors that know only `ray.util.collective`, and groups of them on our back ends.

What actors are given goes there as code: they cannot import tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
TIMEOUT_S = 60


class Member:
    """An actor of somebody who has never heard of us, but for one line."""

    def __init__(self) -> None:
        from tensorvine.actors.collective.stock import register

        register()
        register()

    def run(self, act: Callable[..., Any], *given: Any) -> Any:
        from ray.util import collective

        return act(collective, *given)


def each(actors: list[Any], act: Callable[..., Any], *given: Any) -> list[Any]:
    """Let actors act at once, each told its place among them."""
    calls = [one.run.remote(act, place, *given) for place, one in enumerate(actors)]
    return ray.get(calls, timeout=TIMEOUT_S)


def init(collective: Any, rank: int, size: int, backend: str, name: str) -> None:
    collective.init_collective_group(size, rank, backend=backend, group_name=name)
