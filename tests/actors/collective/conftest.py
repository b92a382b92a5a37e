"""What tests of groups share: all back ends, and groups on them whose members are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext

import pytest
from tensorvine.actors.collective.group import Group

from tests.support.groups import gpus, groups
from tests.support.stand_in_cuda import stand_in_gpus

BACKENDS = ("shared", "gloo", "nccl")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "gloo":
        pytest.importorskip("torch")
    with stand_in_gpus() if request.param == "nccl" and gpus() < 2 else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def joined(backend: str) -> Iterator[Callable[[int], list[Group]]]:
    """Groups by size, for tests that break nothing."""
    made: dict[int, list[Group]] = {}
    with ExitStack() as stack:

        def of(size: int) -> list[Group]:
            if size not in made:
                made[size] = stack.enter_context(groups(backend, size))
            return made[size]

        yield of
