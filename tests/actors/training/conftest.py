"""What tests of trainings share: forks in one process, and how small PyTorch trainings run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fork_runs import Run


@pytest.fixture
def run() -> Any:
    made: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    """Small models are slower with several threads, and much so where others use the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small models updated in several parts."""
    from tensorvine.actors.training.torch import updates as torch_updates

    monkeypatch.setattr(torch_updates, "UPDATE_BYTES", 200)
