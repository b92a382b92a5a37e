"""A publisher's records and its two threads. No Ray: the repository is a stand-in, and mostly the planner, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.client.save.pending import PendingSave
from tensorvine.actors.client.save.request import Saved
from tensorvine.actors.planner.streams import Advice, Streams
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.updates import publisher as module
from tensorvine.actors.updates.publisher import Publisher
from tensorvine.actors.updates.trigger import Trigger
from tensorvine.planner.schedules.schedule import Schedule
from tensorvine.planner.schedules.stream import PlanRequest
from tensorvine.store.counting import Counts
from tensorvine.store.errors import ModelNotFoundError, OperationTimeoutError, ShardUnavailableError, StoreFullError
from tensorvine.store.refs import ModelRef
from tensorvine.store.waiting import Deadline

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
    assert publisher._trigger.chosen == (5, 9)


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


class Repo:
    """Keeps refs. Each save is committed at once, or when `ends` is called."""

    has_path = False

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.saves = 0
        self.errors: list[Exception] = []
        """Raised by the next saves, one each."""
        self.refuses: list[Exception] = []
        """Raised by the next retirements, one each."""
        self.held = False
        """Saves are staged, and not committed until `ends` is called."""
        self.pending: list[PendingSave] = []
        self.streams = Streams()
        self._session = SimpleNamespace(planner=self, counts=Counts())

    def _submit(self, name: str, tensors: Any, graph: Any, *, until: str, **options: Any) -> PendingSave:
        self.saves += 1
        self.pending.append(PendingSave(name, Deadline.after(60.0), lambda save: None))
        if not self.held:
            self.ends()
        else:
            self.pending[-1].mark_staged()
        (self.pending[-1].staged if until == "staged" else self.pending[-1].committed)()
        return self.pending[-1]

    def ends(self) -> None:
        def work() -> Saved:
            if self.errors:
                raise self.errors.pop()
            self.versions.append(self.saves)
            return SimpleNamespace(ref=ModelRef("net", self.saves), bytes_written=16)

        self.pending[-1].run(work)

    def retire(self, ref: ModelRef) -> None:
        if self.refuses:
            raise self.refuses.pop()
        self.versions.remove(ref.version)

    def call(self, request: Request[Any], timeout: float) -> Advice:
        return self.streams.observed(*request.arguments)


@pytest.fixture
def repo() -> Repo:
    return Repo()


@pytest.fixture
def alone(repo: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """A publisher of every iteration that keeps 2 versions, without a thread."""
    monkeypatch.setattr(Publisher, "_start", lambda self: None)
    with Publisher(repo, "net", 1, keep=2) as made:
        yield made


def test_close_retires_the_versions_that_are_not_kept(repo: Repo, alone: Publisher) -> None:
    for _ in range(5):
        alone.step(1.0, MODEL)
    alone.close()
    assert repo.versions == [4, 5]


def test_finish_retires_the_versions_that_are_not_kept(repo: Repo, alone: Publisher) -> None:
    for _ in range(5):
        alone.step(1.0, MODEL)
    alone.finish()
    assert repo.versions == [4, 5]


def test_a_version_whose_shard_did_not_answer_is_retired_later(repo: Repo, alone: Publisher) -> None:
    repo.refuses = [ShardUnavailableError("no answer")]
    for _ in range(4):
        alone.step(1.0, MODEL)
    alone._retire()
    assert repo.versions == [1, 2, 3, 4]
    alone._retire()
    assert repo.versions == [3, 4]


def test_a_version_that_somebody_else_retired_is_not_tried_again(repo: Repo, alone: Publisher) -> None:
    repo.refuses = [ModelNotFoundError("no such version")]
    for _ in range(4):
        alone.step(1.0, MODEL)
    alone._retire()
    assert repo.versions == [1, 3, 4]


def test_an_update_that_begins_while_the_thread_records_the_one_before_is_not_lost(
    repo: Repo, alone: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, taken = PendingSave.committed, threading.Event()
    waits = threading.Event()

    def late(self: PendingSave, timeout: float | None = None) -> Saved:
        saved = committed(self, timeout)
        if threading.current_thread() is other:
            waits.set()
            assert taken.wait(60)
        return saved

    monkeypatch.setattr(PendingSave, "committed", late)
    repo.held = True
    other = threading.Thread(target=alone._settle, kwargs={"wait": False})
    alone.publish(MODEL, 1.0)
    repo.ends()
    other.start()
    assert waits.wait(60)
    alone.publish(MODEL, 2.0)  # records the first
    taken.set()
    other.join()
    repo.ends()
    alone.finish()
    report = alone.report()
    assert [update.loss for update in report.updates] == [1.0, 2.0]
    assert report.failed == 0


@pytest.mark.parametrize("error", [StoreFullError("full"), MemoryError("not one of the tree")])
def test_an_update_that_failed_is_counted_once(repo: Repo, alone: Publisher, error: Exception) -> None:
    repo.held = True
    repo.errors = [error]
    alone.publish(MODEL, 1.0)
    repo.ends()
    alone.finish()
    repo.held, repo.errors = False, [error]
    with pytest.raises(type(error)):
        alone.publish(MODEL, 2.0)
    assert alone.report().failed == 2
    assert not alone.report().updates


def test_a_report_is_bounded_and_a_planner_that_restarted_is_sent_all_that_is_kept(
    repo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Publisher, "_start", lambda self: None)
    monkeypatch.setattr(module, "KEPT_LOSSES", 8)
    monkeypatch.setattr(module, "KEPT_UPDATES", 2)
    publisher = Publisher(repo, "net", 4)
    for _ in range(20):
        publisher.step(1.0, MODEL)
        publisher._tell()
    assert len(repo.streams.statuses()["net"].losses) == 20
    for _ in range(30):  # more than are kept
        publisher.step(1.0, MODEL)
    assert [iteration for iteration, _ in publisher.report().losses] == list(range(43, 51))
    assert [update.iteration for update in publisher.report().updates] == [44, 48]
    publisher._tell()
    assert len(repo.streams.statuses()["net"].losses) == 28
    repo.streams = Streams()
    publisher.step(1.0, MODEL)
    publisher._tell()
    publisher._tell()
    assert len(repo.streams.statuses()["net"].losses) == 8
    publisher.step(1.0, MODEL)
    publisher._tell()
    assert len(repo.streams.statuses()["net"].losses) == 9
    publisher.close()


def test_costs_are_counted_once_where_an_answer_of_the_planner_was_lost(repo: Repo, alone: Publisher) -> None:
    answer = repo.call

    def lost(request: Request[Any], timeout: float) -> Advice:
        answer(request, timeout)
        repo.call = answer
        raise OperationTimeoutError("no answer")

    repo.call = lost
    for _ in range(3):
        alone.step(1.0, MODEL)
        alone._tell()
    alone._tell()
    assert len(repo.streams._streams["net"].commits_s) == 3


def test_a_warm_up_ends_where_steps_leave_iterations_out(repo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "_start", lambda self: None)
    with Publisher(repo, "net", PlanRequest(warmup=50, stop=4000, slowdown=None)) as publisher:
        for at in range(4, 401, 4):
            publisher._steps_s.append(1e6)  # steps of a stand-in take no time; an update costs next to nothing
            publisher.step(2.0 * np.exp(-at / 500) + 0.1, MODEL, iteration=at)
            publisher._tell()
        report = publisher.report()
    assert report.updates[0].iteration == 52
    assert report.schedule is not None
    assert report.schedule.iterations
    assert len(report.updates) > 10


def test_a_plan_is_logged_once_with_its_reason(
    repo: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tensorvine")
    monkeypatch.setattr(Publisher, "_start", lambda self: None)
    with Publisher(repo, "net", PlanRequest(warmup=5, stop=4000, slowdown=None)) as publisher:
        for _ in range(40):
            publisher._steps_s.append(1.0)
            publisher.step(1.0, MODEL)
            publisher._tell()
        for _ in range(3):
            publisher._tell()
        assert repr(publisher) == "Publisher('net', iteration 40, 1 updates)"
        assert repr(publisher.report()) == "PublishReport(1 updates, the last net@1, 0 failed, 40 losses)"
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("plan for")]
    assert said == ["plan for 'net': no update: the predicted loss does not fall"]
