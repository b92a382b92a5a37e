"""A change of all ranks while one of them is held back. No Ray: the ranks' actors run in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.training.calls import TrainerCalls
from tensorvine.actors.training.numpy import NumpyTraining, StepContext
from tensorvine.actors.training.report import Recipe
from tensorvine.actors.training.start import Trainers
from tensorvine.actors.training.trainer import TrainerActor
from tensorvine.actors.training.training import RankContext

from tests.support.direct import Answering, call_directly

SOON_S = 60.0
STEPS = 6


class LocalEngine:
    """Calls actors of this process in one event loop; `hold` keeps calls back until their event is set."""

    def __init__(self) -> None:
        self.hold: dict[tuple[int, str], threading.Event] = {}
        """(rank, method) -> what its call waits for."""
        self.called: Callable[[str], None] = lambda method: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def this_node(self) -> str:
        return "here"

    def reach(self, actor: TrainerActor, timeout: float, who: str) -> list[Answering]:
        return [partial(self._call, actor)]

    def _call(self, actor: TrainerActor, method: str, *arguments: Any) -> Future[Any]:
        self.called(method)
        held = self.hold.get((actor._rank, method))

        async def carry_out() -> Any:
            if held is not None:
                assert await asyncio.to_thread(held.wait, SOON_S)
            return await getattr(actor, method)(*arguments)

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop)

    def kill(self, name: str) -> None:
        pass

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()


class Ranks:
    """Two ranks that tell their rate; each begins a step when `may_step` is set."""

    def __init__(self, engine: LocalEngine) -> None:
        self.may_step, self.stepping = threading.Event(), threading.Event()

        def build(context: RankContext) -> NumpyTraining:
            def step(now: StepContext) -> float:
                self.stepping.set()
                assert self.may_step.wait(SOON_S)
                return now.options["rate"]

            return NumpyTraining(context, {"w": np.zeros(2)}, step, options={"rate": 1.0})

        made: Any = engine
        actors = [TrainerActor(made, Recipe(build), f"run-{rank}", "group", 0, 1, SOON_S) for rank in range(2)]
        for rank, actor in enumerate(actors):
            actor._rank = rank
        self.trainers = Trainers(made, "run", actors, ["rank-0", "rank-1"])
        self.trainers._ask(TrainerCalls.start(), SOON_S)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    call_directly(monkeypatch)
    made = LocalEngine()
    yield made
    made.close()


@pytest.fixture
def ranks(engine: LocalEngine) -> Iterator[Ranks]:
    made = Ranks(engine)
    yield made
    made.may_step.set()
    for event in engine.hold.values():
        event.set()
    made.trainers.close()


def test_a_rank_that_has_not_begun_changes_after_the_same_step_as_another(engine: LocalEngine, ranks: Ranks) -> None:
    held = engine.hold[1, "train"] = threading.Event()

    def decided(method: str) -> None:
        if method == "decide":
            held.set()
            ranks.may_step.set()

    engine.called = decided
    ranks.trainers.train_async(STEPS)
    assert ranks.stepping.wait(SOON_S)
    ranks.trainers.configure({"rate": 2.0}, SOON_S)
    one, other = ranks.trainers.results(SOON_S)
    assert one == other == [1.0] * 2 + [2.0] * 4


def test_ranks_of_which_none_has_begun_stop_after_the_same_step(engine: LocalEngine, ranks: Ranks) -> None:
    first, second = threading.Event(), threading.Event()
    engine.hold = {(0, "train"): first, (1, "train"): second}
    ranks.may_step.set()

    def decided(method: str) -> None:
        if method == "decide":
            first.set()
            second.set()

    engine.called = decided
    ranks.trainers.train_async(STEPS)
    assert [report.training for report in ranks.trainers.describe()] == [True, True]
    ranks.trainers.stop(SOON_S)
    assert ranks.trainers.results(SOON_S) == [[1.0, 1.0], [1.0, 1.0]]


def test_a_train_that_is_refused_is_waited_for_no_longer(ranks: Ranks) -> None:
    ranks.may_step.set()
    ranks.trainers.train_async(0)
    with pytest.raises(ValueError, match="expected at least 1 step"):
        ranks.trainers.results(SOON_S)
    ranks.trainers.configure({"rate": 3.0}, SOON_S)
    assert ranks.trainers.train(1, SOON_S) == [[3.0], [3.0]]
