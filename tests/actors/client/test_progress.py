"""Progress bars: where they are shown, what they say, and that they fail nothing."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tensorvine.actors import Repository
from tensorvine.actors.client import deployment, progress
from tensorvine.actors.client.progress import bar, each
from tensorvine.store.errors import ShardUnavailableError

from tests.support.waiting import PATIENCE_S, eventually


class Terminal:
    """A terminal of which the text is kept."""

    def __init__(self) -> None:
        self.console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def shows(self, text: str) -> bool:
        assert isinstance(self.console.file, io.StringIO)
        return text in self.console.file.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error is a terminal, and bars are shown at once."""
    made = Terminal()
    monkeypatch.setattr(progress, "is_visible", lambda: True)
    monkeypatch.setattr(progress, "_console", lambda: made.console)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    return made


def test_a_bar_says_how_much_is_done(terminal: Terminal) -> None:
    with bar("flush of [bold]x", "bytes", 2_000_000.0) as advance:
        advance(500_000.0)
        eventually(lambda: terminal.shows("0.5/2.0 MB"), "the bar")
        assert terminal.shows("flush of [bold]x")


def test_a_bar_that_measures_asks_until_the_end(terminal: Terminal) -> None:
    asked = threading.Event()
    done = iter(range(1_000_000))

    def measure() -> tuple[float, float]:
        asked.set()
        return next(done), 1_000_000.0

    with bar("scale", "shards", measure=measure):
        eventually(lambda: terminal.shows("2/1,000,000 shards"), "the bar")
    assert asked.is_set()
    assert terminal.shows("\x1b[2K")  # it was removed


def test_each_counts_items_and_stops_where_the_loop_does(terminal: Terminal) -> None:
    for item in each("abc", "verify", "versions", 3):
        if item == "b":
            eventually(lambda: terminal.shows("1/3 versions"), "the bar")
            break
    with bar("the next one", "bytes"):
        eventually(lambda: terminal.shows("the next one"), "the first one has ended")


def test_an_operation_within_another_one_shows_no_bar(terminal: Terminal) -> None:
    with bar("outer", "bytes"):
        eventually(lambda: terminal.shows("outer"), "the outer bar")
        with bar("inner", "bytes") as advance:
            advance(1.0)
    assert not terminal.shows("inner")


@pytest.mark.parametrize("error", [ShardUnavailableError("it died"), RuntimeError("a mistake")])
def test_a_measurement_that_fails_fails_nothing_else(terminal: Terminal, error: Exception) -> None:
    failed = threading.Event()

    def measure() -> tuple[float, float]:
        failed.set()
        raise error

    with bar("flush", "bytes", measure=measure):
        assert failed.wait(PATIENCE_S)


def test_the_error_of_an_operation_passes_and_its_bar_goes(terminal: Terminal) -> None:
    def fails() -> None:
        with bar("flush", "bytes"):
            eventually(lambda: terminal.shows("flush"), "the bar")
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        fails()
    assert progress._turn.acquire(blocking=False)
    progress._turn.release()


class TestWhere:
    @pytest.mark.parametrize("stderr", [None, SimpleNamespace(isatty=lambda: False)])
    def test_a_file_and_a_program_without_standard_error_have_none(
        self, monkeypatch: pytest.MonkeyPatch, stderr: object
    ) -> None:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
        assert not progress.is_visible()
        with bar("flush", "bytes") as advance:
            advance(1.0)

    def test_a_terminal_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
        assert progress.is_visible()

    @pytest.mark.parametrize(("shell", "widgets"), [(None, True), (SimpleNamespace(kernel=1), False)])
    def test_a_notebook_needs_a_kernel_and_widgets(
        self, monkeypatch: pytest.MonkeyPatch, shell: object, widgets: bool
    ) -> None:
        self.notebook(monkeypatch, shell, widgets)
        assert not progress.is_visible()

    def test_a_notebook_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notebook(monkeypatch, SimpleNamespace(kernel=1), True)
        assert progress.is_visible()

    def notebook(self, monkeypatch: pytest.MonkeyPatch, shell: object, widgets: bool) -> None:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        monkeypatch.setattr(progress.importlib.util, "find_spec", lambda _: object() if widgets else None)


class TestOperations:
    def test_long_operations_show_one(
        self, cluster: object, tmp_path: object, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown: list[str] = []

        class Noted(progress.Bar):
            def __init__(self, what: str, *more: object) -> None:
                shown.append(what)
                super().__init__(what, *more)  # type: ignore[arg-type]

        monkeypatch.setattr(progress, "Bar", Noted)
        with Repository.start("bars", shards=1, preallocate_bytes=0, path=str(tmp_path)) as repo:
            repo.save("m", {"w": np.ones(1000)})
            repo.flush()
            repo.verify()
            repo.export("m", f"{tmp_path}/m.arrow")
            repo.import_(f"{tmp_path}/m.arrow", "n")
            repo.scale(2)
            repo.scale(1)
        kinds = ["start of bars", "flush of bars", "verify of bars", "export of m@1", "import of n"]
        assert shown == [*kinds, "scale of bars", "scale of bars", "flush of bars"]  # closing flushes

    def test_drained_bytes_are_those_that_left_the_draining_shards(self) -> None:
        looks = [({0: 50, 1: 100}, (1,)), ({0: 90, 1: 60}, (1,)), ({0: 150}, ())]
        stand_in = SimpleNamespace(_session=SimpleNamespace(refresh=lambda: None, topology=None), _answered=None)
        measure: Callable[[], tuple[float, float | None]] = deployment.Deployment._drained(stand_in)  # type: ignore[arg-type]
        found: list[tuple[float, float | None]] = []
        for memory, leaving in looks:
            stand_in._session.topology = SimpleNamespace(leaving=leaving)
            stand_in._answered = lambda m=memory: [SimpleNamespace(shard=s, bytes_memory=b) for s, b in m.items()]
            found.append(measure())
        assert found == [(0, 100), (40, 100), (100, 100)]
