"""Refused peers: what is logged of many, and how long each pauses."""

from __future__ import annotations

import threading

import pytest
from tensorvine.actors.engine.sockets.refusals import FIRST_PAUSE_S, LINES, LONGEST_PAUSE_S, WINDOW_S, Refusals


class Clock:
    """A clock that is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_flood_makes_few_lines_and_the_next_line_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals("shard 3", clock)
    for number in range(80_000):
        clock.now = 1000.0 + number * 4.0 / 80_000
        refusals.note(f"expected a token; found number {number}")
    assert len(caplog.records) == LINES
    assert caplog.messages[0] == "shard 3: refused: expected a token; found number 0"
    assert caplog.messages[-1].endswith("found number 4 (further ones are only counted for 60 s)")
    clock.now = 1000.0 + WINDOW_S
    refusals.note("expected a token; found none")
    refusals.note("expected a token; found none")
    assert caplog.messages[LINES:] == [
        "shard 3: refused: expected a token; found none (and 79,995 more since the previous line)",
        "shard 3: refused: expected a token; found none",
    ]


def test_a_flood_that_lasts_has_so_many_lines_a_window(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals("shard 3", clock)
    for number in range(6000):  # ten minutes
        clock.now = 1000.0 + 0.1 * number
        refusals.note("expected a token; found none")
    assert len(caplog.records) == 10 * LINES


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_quiet_time() -> None:
    clock = Clock()
    refusals = Refusals("shard 3", clock)
    pauses = [refusals.note("no") for _ in range(50)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S == max(pauses)
    clock.now += WINDOW_S / 2
    assert refusals.note("no") == LONGEST_PAUSE_S
    clock.now += WINDOW_S
    assert refusals.note("no") == FIRST_PAUSE_S


def test_threads_count_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals("shard 3", clock)
    threads = [threading.Thread(target=lambda: [refusals.note("no") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += WINDOW_S
    refusals.note("no")
    assert "(and 3,995 more since the previous line)" in caplog.messages[-1]
