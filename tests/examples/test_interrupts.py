"""Ctrl-C while Python is in a finalizer."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import typer

from examples.shared.starting import INTERRUPTED, interruptible


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Have Python's own handler of Ctrl-C, which the background job of a shell does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
def test_ctrl_c_that_comes_in_a_finalizer_is_raised_after_it(capfd: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    hook, reached = sys.unraisablehook, list[str]()

    def work() -> None:
        with interruptible():
            Dying()
            reached.append("the finalizer's KeyboardInterrupt is lost")
            threading.Event().wait(60)
            reached.append("nothing came")

    with pytest.raises(typer.Exit) as ended:
        work()
    assert reached == ["the finalizer's KeyboardInterrupt is lost"]
    assert ended.value.exit_code == INTERRUPTED
    assert capfd.readouterr().err == "\nstopped by Ctrl-C\n"
    assert sys.unraisablehook is hook


def test_what_else_a_finalizer_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(str(unraisable.exc_value)))
    with interruptible():
        Dying()
    assert reported == ["in a finalizer"]
