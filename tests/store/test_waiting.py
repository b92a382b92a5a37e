"""Deadlines and pauses between tries."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from tensorvine.store.errors import OperationTimeoutError, OptionError
from tensorvine.store.waiting import LONGEST_S, Backoff, Deadline


def test_what_is_left_is_never_negative() -> None:
    assert Deadline.after(-5.0).left() == 0.0
    assert 0.0 < Deadline.after(60.0).left() <= 60.0


def test_a_step_takes_no_longer_than_the_whole() -> None:
    deadline = Deadline.after(60.0)
    assert deadline.left(5.0) == 5.0
    assert 50.0 < deadline.left(100.0) <= 60.0
    assert deadline.sooner(5.0).left() <= 5.0
    assert deadline.sooner(100.0) == deadline
    assert not deadline.passed
    assert Deadline.after(-1.0).passed


def test_a_step_for_which_no_time_is_left_is_named() -> None:
    assert 0.0 < Deadline.after(60.0).left_for("load of 'm'") <= 60.0
    with pytest.raises(OperationTimeoutError, match=r"load of 'm'.*it did not"):
        Deadline.after(-1.0).left_for("load of 'm'")


@pytest.mark.parametrize("timeout", [math.nan, None, "3", [], 1j, object()])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    with pytest.raises(OptionError, match="timeout: expected a number of seconds; found"):
        Deadline.after(timeout)


def test_a_timeout_may_be_longer_than_the_longest() -> None:
    for timeout in (math.inf, 1e300, 10**400):
        assert LONGEST_S - 60.0 < Deadline.after(timeout).left() <= LONGEST_S
    event = threading.Event()
    event.set()
    assert event.wait(LONGEST_S)
    assert Deadline.after(-(10**400)).passed
    assert Deadline.after(-math.inf).passed


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = Backoff(first=1.0, most=5.0)
    assert [pauses.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    pauses.reset()
    assert pauses.next() == 1.0


@pytest.mark.timeout(30)
def test_no_pause_ends_behind_the_deadline() -> None:
    assert not Backoff(first=60.0, most=60.0).wait(Deadline.after(1.0))
    assert Backoff(first=1e-4, most=1.0).wait(Deadline.after(60.0))


@pytest.mark.timeout(30)
def test_a_pause_ends_when_who_pauses_is_closing() -> None:
    closing = threading.Event()
    closing.set()
    assert not Backoff(first=60.0, most=60.0, closing=closing).wait(Deadline.after(120.0))
