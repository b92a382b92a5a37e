"""The loops of an actor's concurrency groups: each is run, however late the threads that Ray starts for them begin."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray import _raylet
from tensorvine.actors.engine.engine import GROUPS, Engine
from tensorvine.actors.engine.ray.group_loops import EachRunOnce, install

from tests.support.late_threads import LateThreads

WAIT_S = 60.0


def test_threads_that_ask_for_one_loop_run_all() -> None:
    new_loop = EachRunOnce(asyncio.new_event_loop)
    loops = [new_loop() for _ in range(3)]
    threads = [threading.Thread(target=loops[-1].run_forever) for _ in loops]
    for thread in threads:
        thread.start()
    answers = [asyncio.run_coroutine_threadsafe(asyncio.sleep(0.0, number), loop) for number, loop in enumerate(loops)]
    assert [answer.result(WAIT_S) for answer in answers] == [0, 1, 2]
    for loop in loops:
        loop.call_soon_threadsafe(loop.stop)
    for thread in threads:
        thread.join(WAIT_S)
    for loop in loops:
        loop.close()


def test_a_process_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(_raylet, "get_new_event_loop", lambda: made.append("loop") or asyncio.new_event_loop())
    install()
    prepared = _raylet.get_new_event_loop
    install()
    assert _raylet.get_new_event_loop is prepared
    prepared().close()
    assert made == ["loop"]


def test_a_ray_that_makes_its_loops_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_raylet, "get_new_event_loop")
    install()
    assert not hasattr(_raylet, "get_new_event_loop")


@pytest.mark.ray
def test_an_actor_answers_in_all_groups_though_its_threads_begin_late(cluster: Engine) -> None:
    actor = cluster.spawn(LateThreads, "late-threads", {})
    try:
        for name in GROUPS:
            assert cluster.result(cluster.call(actor, name), WAIT_S, name) == name
    finally:
        cluster.kill("late-threads")
