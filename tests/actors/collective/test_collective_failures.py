"""Members that die, leave, fall silent or never come: a matrix of phase x event, each with real processes.

Rules
- Rank 2 of 0, 1, 2 is who fails. The others must name it, within their time, and get nothing wrong.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Outcome, Rank, backends, processes

SOON_S = 8.0
"""A death is known much sooner than at the operation's timeout, 20 s, on a loaded machine, too."""
SHARED = ("barrier", "all_reduce", "all_gather", "broadcast of 2", "recv from 2", "send to 2")
GLOO = ("all_reduce", "recv from 2", "send to 2")
"""Fewer, as its library has tests of its own (test_gloo_failures.py)."""
MATRIX = [
    pytest.param(*backend.values, operation, marks=backend.marks)
    for backend, operations in zip(backends("shared", "gloo"), (SHARED, GLOO), strict=True)
    for operation in operations
]
each_cell = pytest.mark.parametrize(("backend", "operation"), MATRIX)
each_backend = pytest.mark.parametrize("backend", backends("shared", "gloo"))


def start(ranks: list[Rank], operation: str) -> None:
    for rank in ranks:
        rank.start(operation)


def ends(ranks: list[Rank]) -> list[Outcome]:
    return [rank.outcome() for rank in ranks]


def fail(rank: Rank, event: str) -> None:
    if event == "dies":
        rank.kill()
    else:
        assert rank.does("leave")[0] == "done"


def assert_lost(outcome: Outcome, event: str) -> None:
    kind, text, seconds = outcome
    assert kind == "PeerLostError", outcome
    assert "rank 2" in text
    assert ("left" if event == "leaves" else "died") in text
    assert "group 'test', epoch 0" in text
    assert seconds < SOON_S


@pytest.mark.parametrize("event", ["dies", "leaves"])
@each_cell
def test_before_an_operation(tmp_path: Path, backend: str, event: str, operation: str) -> None:
    with processes(tmp_path, backend, 3) as (ranks, _):
        fail(ranks[2], event)
        start(ranks[:2], operation)
        for outcome in ends(ranks[:2]):
            assert_lost(outcome, event)


@pytest.mark.parametrize("event", ["dies", "leaves"])
@each_cell
def test_while_the_others_wait_for_it(tmp_path: Path, backend: str, event: str, operation: str) -> None:
    with processes(tmp_path, backend, 3) as (ranks, _):
        start(ranks[:2], operation)
        fail(ranks[2], event)
        for outcome in ends(ranks[:2]):
            assert_lost(outcome, event)


@pytest.mark.parametrize(
    ("backend", "operation"), [cell for cell in MATRIX if cell.values[1] not in ("recv from 2", "send to 2")]
)
def test_dying_after_an_operation_harms_the_next_one_only(tmp_path: Path, backend: str, operation: str) -> None:
    with processes(tmp_path, backend, 3) as (ranks, _):
        start(ranks, operation)
        assert [outcome[0] for outcome in ends(ranks)] == ["done"] * 3
        ranks[2].kill()
        start(ranks[:2], operation)
        for outcome in ends(ranks[:2]):
            assert_lost(outcome, "dies")


@pytest.mark.parametrize("size", ["", "a little "])
@each_backend
def test_dying_with_a_message_on_its_way(tmp_path: Path, backend: str, size: str) -> None:
    """What was sent may have arrived, or not: then it is an error."""
    with processes(tmp_path, backend, 3) as (ranks, _):
        ranks[2].start(f"send {size}to 0")
        ranks[2].kill()
        outcome = ranks[0].does(f"recv {size}from 2")
        if outcome[0] != "done" or size == "":
            assert_lost(outcome, "dies")


@each_backend
def test_dying_harms_nothing_that_goes_on_without_it(tmp_path: Path, backend: str) -> None:
    with processes(tmp_path, backend, 3) as (ranks, _):
        ranks[2].kill()
        ranks[0].start("send to 1")
        ranks[1].start("recv from 0")
        assert [outcome[0] for outcome in ends(ranks[:2])] == ["done"] * 2


@each_cell
def test_standing_still_is_an_error_in_time(tmp_path: Path, backend: str, operation: str) -> None:
    with processes(tmp_path, backend, 3, timeout=0.8) as (ranks, _):
        ranks[2].stop()
        start(ranks[:2], operation)
        for kind, text, seconds in ends(ranks[:2]):
            assert kind == "OperationTimeoutError", text
            assert re.search(r"rank 2|ranks [01], 2", text), text  # on a busy machine the other one may be late, too
            assert 0.7 < seconds < 0.8 + SOON_S


@each_backend
def test_never_coming_is_an_error_in_time(tmp_path: Path, backend: str) -> None:
    with processes(tmp_path, backend, 3, joining=0.8, absent=1) as (_, joined):
        for kind, text, _ in joined:
            assert kind == "OperationTimeoutError"
            assert "2 did not come" in text


@each_backend
def test_the_failure_of_a_message_reaches_those_who_wait_for_others(tmp_path: Path, backend: str) -> None:
    with processes(tmp_path, backend, 3) as (ranks, _):
        ranks[1].start("recv from 0")
        ranks[0].start("recv from 2")
        ranks[2].kill()
        assert_lost(ranks[0].outcome(), "dies")
        told: Any = ranks[1].outcome()
        assert_lost(told, "dies")
        assert "reported by rank 0" in told[1]
