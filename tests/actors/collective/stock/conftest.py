"""What tests of the stock back ends share: one set of actors per file, and groups of them that no test breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.support.stock_members import Member, each, init


@pytest.fixture(scope="module")
def members(cluster: object) -> Iterator[list[Any]]:
    actor: Any = ray.remote(num_cpus=0)(Member)
    started = [actor.remote() for _ in range(3)]
    yield started
    for one in started:
        ray.kill(one)


@pytest.fixture(params=["TENSORVINE", "TENSORVINE_GLOO"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def standing(members: list[Any]) -> Iterator[dict[str, str]]:
    """Back end -> name of a group of all, which no test breaks."""
    names = {backend: f"standing-{backend}" for backend in ("TENSORVINE", "TENSORVINE_GLOO")}
    for backend, name in names.items():
        each(members, init, 3, backend, name)
    yield names
    for name in names.values():
        each(members, lambda collective, rank, name=name: collective.destroy_collective_group(name))
