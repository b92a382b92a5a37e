"""What ends on Dask, and what is left then: nannies, nodes, schedulers, programs. Each test has its own cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.engine import DaskEngine
from tensorvine.actors.engine.dask.hosts import LEAVE_S
from tensorvine.actors.engine.engine import Lifetime, Node
from tensorvine.store.errors import ModelLostError, ShardUnavailableError, TensorVineError

from tests.support.asking import ask, begin
from tests.support.dask_cluster import WAIT_S, DaskProcesses, dask_processes, is_running
from tests.support.dask_probe import DaskProbe
from tests.support.waiting import eventually

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(400)]

PROGRAM = """
import sys, time
from distributed import Client
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.engine import Lifetime
from tests.support.dask_probe import DaskProbe
engine = engine_of(Client(sys.argv[1]))
engine.spawn(DaskProbe, "own", {"engine": engine}, lifetime=Lifetime(outlives=False))
engine.spawn(DaskProbe, "stays", {"engine": engine})
print("started", flush=True)
time.sleep(600)
"""


def facts_of(engine: DaskEngine, actor: Any) -> dict[str, Any] | None:
    try:
        return ask(engine, actor, "facts")
    except ShardUnavailableError:
        return None


def node(engine: DaskEngine, wanted: str) -> Node | None:
    return next((found for found in engine.nodes() if found.id == wanted), None)


def test_a_nanny_that_is_killed_takes_its_actors_along_and_they_start_on_another_node() -> None:
    with dask_processes("one", "two") as (processes, engine):
        here, there = [found.id for found in engine.nodes()]
        actor = engine.spawn(DaskProbe, "moves", {"engine": engine}, there)
        stays_dead = engine.spawn(DaskProbe, "stays dead", {"engine": engine}, there, Lifetime(restarts=False))
        before = ask(engine, actor, "facts")
        handles = ask(engine, stays_dead, "hold", np.arange(9))
        assert before["node"] == there
        waiting = begin(engine, actor, "pass_gate", who="who waits")
        os.kill(before["host"], signal.SIGKILL)
        with pytest.raises(ShardUnavailableError, match="who waits"):
            waiting.result(WAIT_S)
        eventually(lambda: not is_running(before["pid"]), "the actor's process has ended")
        after = eventually(lambda: facts_of(engine, actor), "the actor answers again")
        assert (after["node"], after["restarted"]) == (here, True)
        with pytest.raises(ShardUnavailableError, match="its node has ended"):
            ask(engine, stays_dead, "facts")
        with pytest.raises(ModelLostError):
            engine.get(handles, WAIT_S, "keeper")
        assert node(engine, there) is None
        processes.start_worker("three")  # which of the two was killed is not known
        anew = eventually(
            lambda: [found for found in engine.nodes() if found.id not in (here, there)],
            "a node in place of the one that ended",
        )
        again = engine.spawn(DaskProbe, "again", {"engine": engine}, anew[0].id)
        assert ask(engine, again, "facts")["node"] == anew[0].id


def test_actors_whose_template_is_killed_end_and_their_next_lives_have_another() -> None:
    with dask_processes("one") as (_, engine):
        actor = engine.spawn(DaskProbe, "restarts", {"engine": engine})
        stays_dead = engine.spawn(DaskProbe, "stays dead", {"engine": engine}, lifetime=Lifetime(restarts=False))
        before, other = ask(engine, actor, "facts"), ask(engine, stays_dead, "facts")
        assert before["template"] == other["template"]
        waiting = begin(engine, actor, "pass_gate", who="who waits")
        os.kill(before["template"], signal.SIGKILL)
        with pytest.raises(ShardUnavailableError, match="who waits"):
            waiting.result(WAIT_S)
        after = eventually(lambda: facts_of(engine, actor), "the actor answers again")
        assert (after["host"], after["restarted"]) == (before["host"], True)
        assert after["template"] != before["template"]
        with pytest.raises(ShardUnavailableError, match="SIGKILL"):
            ask(engine, stays_dead, "facts")
        assert not is_running(before["pid"])
        assert not is_running(other["pid"])


def test_a_node_whose_worker_closes_is_leaving_until_it_is_drained() -> None:
    with dask_processes("one", "two") as (processes, engine):
        here, there = [found.id for found in engine.nodes()]
        first, second = (engine.spawn(DaskProbe, name, {"engine": engine}, there) for name in ("first", "second"))
        facts = [ask(engine, actor, "facts") for actor in (first, second)]
        worker = worker_of(processes, facts[0]["host"])
        worker.send_signal(signal.SIGTERM)
        eventually(lambda: (found := node(engine, there)) is not None and found.leaving, "the node is leaving")
        assert ask(engine, first, "facts") == facts[0], "it answers still"
        elsewhere = engine.spawn(DaskProbe, "third", {"engine": engine}, there)
        assert ask(engine, elsewhere, "facts")["node"] == here
        engine.kill("first")
        engine.kill("second")
        worker.wait(WAIT_S)
        eventually(lambda: node(engine, there) is None, "the node is gone")
        eventually(lambda: not is_running(facts[0]["template"]), "its template has ended")


def test_a_node_that_nobody_drains_ends_and_its_actors_start_elsewhere() -> None:
    with dask_processes("one", "two") as (processes, engine):
        here, there = [found.id for found in engine.nodes()]
        actor = engine.spawn(DaskProbe, "moves", {"engine": engine}, there)
        facts = ask(engine, actor, "facts")
        worker_of(processes, facts["host"]).send_signal(signal.SIGTERM)
        began = time.monotonic()
        after = eventually(
            lambda: (found := facts_of(engine, actor)) and found["restarted"] and found,
            "the actor answers in its next life",
        )
        assert after["node"] == here
        assert time.monotonic() - began > LEAVE_S / 2, "it had time to be drained"
        eventually(lambda: not is_running(facts["pid"]), "the process of its former life has ended")


def test_when_all_workers_are_killed_no_process_stays() -> None:
    with dask_processes("one", "one") as (processes, engine):
        facts = ask(engine, engine.spawn(DaskProbe, "a", {"engine": engine}), "facts")
        for worker in processes.workers:
            for process in (*psutil.Process(worker.pid).children(), psutil.Process(worker.pid)):
                process.kill()
        eventually(lambda: not is_running(facts["pid"]), "the actor's process has ended")
        eventually(lambda: not is_running(facts["template"]), "its template has ended")
        eventually(lambda: not engine.nodes(), "all nodes are gone")  # the second worker was one when the first ended
        with pytest.raises(ShardUnavailableError, match="found none"):
            engine.this_node()


def test_a_worker_without_a_nanny_holds_its_node_itself() -> None:
    with dask_processes("one") as (processes, engine):
        (first,) = engine.nodes()
        worker = processes.start_worker("two", nanny=False)
        (second,) = eventually(lambda: [found for found in engine.nodes() if found.id != first.id], "the second node")
        actor = engine.spawn(DaskProbe, "moves", {"engine": engine}, second.id)
        facts = ask(engine, actor, "facts")
        worker.kill()
        eventually(lambda: not is_running(facts["pid"]), "the actor's process has ended")
        assert eventually(lambda: facts_of(engine, actor), "the actor answers again")["node"] == first.id


def test_actors_end_with_the_scheduler_and_a_new_client_starts_them_on_the_next_one() -> None:
    with dask_processes("one", "two") as (processes, engine):
        actor = engine.spawn(DaskProbe, "ends", {"engine": engine}, engine.nodes()[0].id)
        facts = ask(engine, actor, "facts")
        processes.scheduler.kill()
        processes.scheduler.wait(WAIT_S)
        eventually(lambda: not is_running(facts["pid"]), "the actor's process has ended")
        asked = (engine.nodes, lambda: engine.find("ends"), lambda: engine.kill("ends"), lambda: engine.kept(""))
        for asks in (*asked, lambda: engine.spawn(DaskProbe, "new", {"engine": engine})):
            with pytest.raises(ShardUnavailableError, match="the scheduler"):
                asks()
        with pytest.raises(ShardUnavailableError):
            ask(engine, actor, "facts")
        processes.start_scheduler()
        for name in ("one", "two"):
            processes.start_worker(name)
        with Client(processes.address, timeout=WAIT_S, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=WAIT_S)
            with pytest.raises(ShardUnavailableError, match=r"it was restarted|is not connected"):
                engine.find("ends")
            with closing(engine_of(client)) as anew:
                assert len(anew.nodes()) == 2
                with pytest.raises(LookupError):
                    anew.find("ends")
                assert ask(anew, anew.spawn(DaskProbe, "ends", {"engine": anew}), "facts")["pid"] != facts["pid"]


def test_a_program_that_is_killed_takes_what_was_its_own_along() -> None:
    with dask_processes("one") as (processes, engine):
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, processes.address], stdout=subprocess.PIPE)
        assert program.stdout is not None
        assert program.stdout.readline() == b"started\n"
        assert {ask(engine, engine.find(name), "facts")["node"] for name in ("own", "stays")} == {engine.this_node()}
        program.kill()
        program.communicate(timeout=WAIT_S)
        eventually(lambda: _found(engine, "own") is None, "what was the program's own is gone")
        assert ask(engine, engine.find("stays"), "facts")["node"] == engine.this_node()
        engine.kill("stays")


def _found(engine: DaskEngine, name: str) -> Any:
    try:
        return engine.find(name)
    except (LookupError, TensorVineError):
        return None


def worker_of(processes: DaskProcesses, nanny: int) -> subprocess.Popen[bytes]:
    """Return the worker of a nanny's process."""
    return next(worker for worker in processes.workers if worker.pid == nanny)
