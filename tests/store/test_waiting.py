"""Deadlines and pauses between tries."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from tensorvine.store.waiting import NEVER, Backoff, Deadline


class TestDeadline:
    def test_what_is_left_is_never_negative(self) -> None:
        assert Deadline.after(-5.0).left() == 0.0
        assert Deadline.after(-5.0).passed

    def test_what_is_left_is_at_most_what_the_caller_allows(self) -> None:
        assert Deadline.after(100.0).left(most=3.0) == 3.0
        assert NEVER.left(most=3.0) == 3.0
        assert Deadline.after(-1.0).left(most=3.0) == 0.0

    def test_no_limit(self) -> None:
        assert Deadline.after(None) is NEVER
        assert NEVER.left() == math.inf
        assert NEVER.timeout() is None
        assert not NEVER.passed

    def test_a_limit_is_given_as_threads_want_it(self) -> None:
        assert 0.0 < (Deadline.after(60.0).timeout() or 0.0) <= 60.0

    def test_the_sooner_of_two(self) -> None:
        later = Deadline.after(100.0)
        assert later.sooner(1.0) < later
        assert later.sooner(1000.0) is later
        assert NEVER.sooner(1.0) < NEVER


class TestBackoff:
    def test_pauses_grow_up_to_the_longest(self) -> None:
        pauses = Backoff(first=1.0, most=5.0)
        assert [pauses.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]

    def test_even_pauses(self) -> None:
        pauses = Backoff(first=0.5, factor=1.0)
        assert [pauses.next() for _ in range(3)] == [0.5, 0.5, 0.5]

    def test_what_worked_begins_anew(self) -> None:
        pauses = Backoff(first=1.0)
        pauses.next()
        pauses.reset()
        assert pauses.next() == 1.0

    def test_no_pause_ends_behind_the_deadline(self) -> None:
        assert not Backoff(first=60.0).wait(Deadline.after(1.0))
        assert not asyncio.run(Backoff(first=60.0).wait_async(Deadline.after(1.0)))

    def test_a_pause_that_ends_in_time(self) -> None:
        assert Backoff(first=1e-4).wait(Deadline.after(60.0))
        assert asyncio.run(Backoff(first=1e-4).wait_async(Deadline.after(60.0)))

    @pytest.mark.timeout(30)
    def test_an_owner_that_closes_ends_the_pause(self) -> None:
        closing = threading.Event()
        threading.Timer(0.01, closing.set).start()
        assert not Backoff(first=3600.0).wait(NEVER, closing)
