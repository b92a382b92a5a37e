"""What a publisher's two threads change at one time. No Ray: the repository and its planner are stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.planner.streams import Advice
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.updates import publisher as module
from tensorvine.actors.updates.publisher import Publisher
from tensorvine.actors.updates.trigger import Trigger
from tensorvine.planner.schedules.schedule import Schedule

MODEL = {"w": np.zeros(2)}


class Planner:
    """Advises what it is told to."""

    def __init__(self) -> None:
        self.iterations: tuple[int, ...] = ()

    def call(self, request: Request[Any], timeout: float) -> Advice:
        _, told = request.arguments
        known = told.place + len(told.losses)
        return Advice(known, Schedule(self.iterations, None, 0.0) if self.iterations else None)


@pytest.fixture
def planner() -> Planner:
    return Planner()


@pytest.fixture
def publisher(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """One whose own thread does nothing: the test is the other thread."""
    monkeypatch.setattr(module, "TELL_S", 3600.0)
    repo: Any = SimpleNamespace(has_path=True, _session=SimpleNamespace(planner=planner))
    made = Publisher(repo, "net", warmup=1000)
    monkeypatch.setattr(made, "_publish_gently", lambda model, loss: None)
    yield made
    monkeypatch.setattr(made, "_tell", lambda: None)
    made.close()


def test_a_plan_that_comes_while_the_training_tells_of_itself_is_not_lost(
    publisher: Publisher, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner.iterations = (5, 9)
    told = Trigger.told
    other = threading.Thread(target=publisher._tell)

    def told_meanwhile(self: Trigger, stop: int | None, epoch: int | None) -> Trigger:
        changed = told(self, stop, epoch)
        other.start()
        other.join(0.2)  # it waits for the lock; without one, it has ended
        return changed

    monkeypatch.setattr(Trigger, "told", told_meanwhile)
    publisher.expect(stop=100)
    other.join()
    assert publisher._trigger.request is not None
    assert publisher._trigger.request.stop == 100
    assert publisher._trigger.chosen == {5, 9}


def test_what_a_plan_owes_while_a_step_looks_for_an_update_under_way_stays_owed(
    publisher: Publisher, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not publisher.step(1.0, MODEL)
    looks = publisher._is_under_way
    publisher._owed = True

    def look_meanwhile() -> bool:
        found = looks()
        planner.iterations = (2,)
        publisher._tell()
        return found

    monkeypatch.setattr(publisher, "_is_under_way", look_meanwhile)
    assert publisher.step(1.0, MODEL)
    monkeypatch.setattr(publisher, "_is_under_way", looks)
    assert publisher.step(1.0, MODEL)
    assert not publisher.step(1.0, MODEL)
