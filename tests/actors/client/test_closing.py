"""What is closed when something else cannot be, and how long closing waits. No Ray: the parts are stand-ins."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tensorvine.actors.client import deployment, repository
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.client.save import saves
from tensorvine.actors.client.save.request import Saved, SaveRequest, requested
from tensorvine.actors.client.save.saves import Saves
from tensorvine.actors.engine.opened import Opened
from tensorvine.actors.rpc.calls import Request
from tensorvine.store.counting import Counts
from tensorvine.store.errors import OperationTimeoutError, StorageError, TensorVineError
from tensorvine.store.refs import ModelRef
from tensorvine.store.waiting import Deadline

from tests.support.waiting import eventually

SAVED = Saved(ModelRef("m", 1), 0, 0)


class Part:
    """Stands in for each part of a repository; its `close` is noted, and raises what it is told to."""

    path = None
    repository = "stand-in"
    counts = Counts()
    meter = None
    names: tuple[str, ...] = ()

    def __init__(self, name: str, closed: list[str], error: Exception | None) -> None:
        self.name, self.closed, self.error = name, closed, error
        self.opened = Opened(name)

    def give_up(self, *_: object) -> None:
        """Nobody was asked for anything."""

    def close(self, *_: object) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error

    stop = close


PARTS = ["Saves", "Reader", "Session"]


def repository_of(monkeypatch: pytest.MonkeyPatch, closed: list[str], errors: dict[str, Exception]) -> Repository:
    for name in [*PARTS, "Catalog", "Verifier"]:
        part = Part(name, closed, errors.get(name))
        monkeypatch.setattr(deployment if name == "Session" else repository, name, lambda *_, part=part, **__: part)
    launched: Any = Part("Launched", closed, errors.get("Launched"))
    return Repository(None, "stand-in", launched)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("failing", PARTS)
def test_whatever_cannot_be_closed_the_rest_of_a_repository_is(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    closed: list[str] = []
    repo = repository_of(monkeypatch, closed, {failing: StorageError(failing)})
    with pytest.raises(StorageError, match=failing):
        repo.close()
    assert closed == [*PARTS, "Launched"]
    repo.close()
    assert len(closed) == 4


def test_the_first_of_several_errors_is_raised_and_the_others_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: dict[str, Exception] = {"Saves": StorageError("first"), "Session": RuntimeError("second")}
    repo = repository_of(monkeypatch, [], errors)
    with pytest.raises(StorageError, match="first"):
        repo.close()
    assert "second" in caplog.text


@pytest.mark.parametrize("error", [StorageError, OperationTimeoutError])
def test_a_close_that_cannot_write_all_logs_what_it_waits_for_raises_and_closes_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[TensorVineError]
) -> None:
    closed, asked = list[str](), list[tuple[object, ...]]()
    repo = repository_of(monkeypatch, closed, {})
    session: Any = repo._session

    def ask(request: Request[Any], timeout: float) -> None:
        assert request.remote.name == "flush"
        asked.append(request.arguments)
        if request.arguments == (5.0,):
            eventually(lambda: "waiting for writes to its path: m@1, m@2" in caplog.text, "the log says what for")
        raise error("m@1, m@2")

    session.path, session.ask = "there", ask
    launched: Any = repo._launched
    launched.names = ("planner",)
    monkeypatch.setattr(deployment, "QUIET_S", 0.0)
    monkeypatch.setattr(deployment, "FLUSH_TIMEOUT_S", 5.0)
    with pytest.raises(error, match="close of repository 'stand-in': m@1, m@2"):
        repo.close()
    assert sorted(asked) == [(0.0,), (5.0,)]
    assert closed == [*PARTS, "Launched"]


class SlowSaver:
    """Its saves take longer than anything but their own timeout allows."""

    def __init__(self, *parts: Any) -> None:
        self.closed = threading.Event()
        self.closed_early = False
        self.reserved = self

    def take(self, *_: Any) -> None:
        """No memory is reserved."""

    def renew(self, *_: Any) -> None:
        """None is."""

    def save(self, *_: Any, rereads: bool) -> Saved:
        self.closed_early = self.closed.wait(0.2)
        return SAVED

    def greet(self) -> None:
        """There is nobody to greet."""

    def map_ahead(self) -> bool:
        return False

    def close(self) -> None:
        self.closed.set()


class FailingSaver(SlowSaver):
    """Whatever is done between saves fails, as nobody expects."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.looks = 0

    def renew(self, *_: Any) -> None:
        raise RuntimeError("renew")

    def map_ahead(self) -> bool:
        self.looks += 1
        raise RuntimeError("map ahead")


def test_no_exception_between_saves_ends_the_thread_that_saves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saves, "Saver", FailingSaver)
    nothing: Any = None
    session: Any = Part("stand-in", [], None)
    own = Saves(session, nothing, nothing, greets=False)
    saver: Any = own.saver
    for number in range(1, 4):
        pending = own.submit(requested("m", {}, None), until="copied")
        assert pending.committed(60.0) == SAVED
        eventually(lambda looks=number: saver.looks == looks and own._thread is None, "it looks once", pause=0.002)
    own.close()
    assert caplog.text.count("RuntimeError: renew") == caplog.text.count("RuntimeError: map ahead") == 3


def test_closing_waits_for_saves_as_long_as_their_own_timeouts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "Saver", SlowSaver)
    monkeypatch.setattr(saves, "CONTROL_TIMEOUT_S", 0.0)
    nothing: Any = None
    session: Any = Part("stand-in", [], None)
    own = Saves(session, nothing, nothing)
    request = SaveRequest(
        name="m",
        arrays={},
        graph=None,
        parent=None,
        inherit=None,
        quality=None,
        metadata="{}",
        recipe=None,
        deadline=Deadline.after(60.0),
        durable=False,
    )
    pending = own.submit(request, until="copied")
    own.close()
    assert pending.committed(60.0) == SAVED
    saver: Any = own.saver
    assert saver.closed.is_set()
    assert not saver.closed_early
