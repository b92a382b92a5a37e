"""The thread of a step that is taken again and again outlives any one exception."""

from __future__ import annotations

import threading

import pytest
from tensorvine.actors.rpc.ticker import Ticker


def test_a_ticker_outlives_failures_of_its_step_and_of_its_pause(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[int] = []
    done = threading.Event()

    def pause() -> float:
        if len(steps) == 2:
            steps.append(0)
            raise ValueError("no pause")
        return 0.001

    def step() -> None:
        steps.append(0)
        if len(steps) < 6:
            raise KeyError("a step")
        done.set()

    Ticker("example", "shard 0", pause, step)
    assert done.wait(60.0)
    for cause in ("KeyError('a step')", "ValueError('no pause')"):
        assert caplog.text.count(f"shard 0: example failed, retrying: {cause}") == 1
