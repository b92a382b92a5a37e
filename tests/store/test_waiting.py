"""Deadlines and pauses between tries."""

from __future__ import annotations

import pytest
from tensorvine.store.waiting import Backoff, Deadline


def test_what_is_left_is_never_negative() -> None:
    assert Deadline.after(-5.0).left() == 0.0
    assert 0.0 < Deadline.after(60.0).left() <= 60.0


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = Backoff(first=1.0, most=5.0)
    assert [pauses.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]


@pytest.mark.timeout(30)
def test_no_pause_ends_behind_the_deadline() -> None:
    assert not Backoff(first=60.0, most=60.0).wait(Deadline.after(1.0))
    assert Backoff(first=1e-4, most=1.0).wait(Deadline.after(60.0))
