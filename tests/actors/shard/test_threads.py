"""Threads of a shard outlive any one exception, and the end of sessions waits for no other shard. No Ray."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensorvine.actors.memory.process import ProcessId, pid_namespace
from tensorvine.actors.shard.disk import persister as persister_module
from tensorvine.actors.shard.disk import tiers
from tensorvine.actors.shard.disk.persister import Job
from tensorvine.actors.shard.sweep import Sweep
from tensorvine.actors.shard.ticker import Ticker
from tensorvine.store.holders import Lease, Query, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part

from tests.actors.shard.test_disk_rules import Bench
from tests.support.home import BYTES, Home
from tests.support.waiting import eventually


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


@pytest.mark.parametrize("where", ["progressed", "future", "settle"])
def test_the_thread_that_writes_behind_outlives_any_exception(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (persister_module, tiers):  # on a busy machine a thread that others go before may get no core
        monkeypatch.setattr(module, "give_way", lambda: None)
    bench = Bench(tmp_path)
    persister = bench.persister
    jobs: list[Job] = []
    for number in (1, 2, 3):
        bench.fill(ModelRef("m", number), (0, number), [64])
        jobs.append(bench.job(ModelRef("m", number), (0, number), [64], urgent=False))
    failing = 2

    def fail(*_: Any) -> None:
        nonlocal failing
        failing -= 1
        if failing >= 0:
            raise RuntimeError("nobody expected this")
        settle()

    settle = bench.settle
    if where == "progressed":
        persister._progressed = fail
    elif where == "future":
        assert jobs[0].done.cancel()  # as a caller that no longer waits does
    else:
        known, settle = persister._settle, lambda: None

        def settled(job: Job, failure: Exception | None) -> None:
            fail()
            known(job, failure)

        monkeypatch.setattr(persister, "_settle", settled)
    with caplog.at_level(logging.ERROR):
        for job in jobs:
            persister.add(job)
        persister.flush(200.0)
    assert bench.on_disk[-1] == ModelRef("m", 3)
    assert caplog.text.count("shard 0: background writer failed, retrying") == 1
    eventually(lambda: persister.behind() == (0, 0), "nothing waits")
    persister.bury(jobs[0].header)


class Asking:
    """What asks other shards, one of which is silent."""

    open = True

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    def gather(self) -> None:
        self.asked.set()
        self.answered.wait(600.0)

    def look(self) -> None:
        pass


class Idle:
    """Has nothing to look after."""

    def forget(self, shards: object) -> None:
        pass

    def close_idle(self) -> None:
        pass

    def drop_idle(self) -> None:
        pass


def test_a_client_that_dies_while_another_shard_is_silent_loses_its_pins_at_once() -> None:
    home, asking, idle = Home(roomy=True), Asking(), Idle()
    held: Any = asking
    nothing: Any = idle
    home.save([])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        home.sessions._local.watch("dies", ProcessId(pid_namespace(), process.pid))
        Sweep(
            home.context,
            home.settling,
            sessions=home.sessions,
            reconciliation=held,
            strays=held,
            replica_store=nothing,
            senders=nothing,
            exports=nothing,
            patches=nothing,
        )
        assert asking.asked.wait(60.0)
        with home.context.lock:
            home.state.pin("m", 1, Lease(Query("dies", 1), 0), time.monotonic())
            assert home.context.segment_memory.grant(Save("dies", 1), [BYTES // 2])
        process.kill()
    eventually(
        lambda: home.state.stats().pins == 0 and home.context.segment_memory.bytes_filling == 0,
        "the pin and the memory of the client that died to be taken back",
        timeout=20.0,
    )
    assert not asking.answered.is_set()
    asking.answered.set()


def test_memory_that_a_shard_fills_for_a_client_elsewhere_goes_with_the_session() -> None:
    """Nobody else may still write to it; the process of that client cannot be watched."""
    home = Home(roomy=True)
    with home.context.lock:
        home.state.open("far", time.monotonic() - 3600.0)
        (offset,) = home.context.segment_memory.grant(Save("far", 1), [BYTES // 2])
        assert Part(offset, BYTES // 2)
    home.sessions.end_lost()
    assert home.context.segment_memory.bytes_filling == 0
