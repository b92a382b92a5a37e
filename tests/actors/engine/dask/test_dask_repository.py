"""Repositories on a Dask whose workers come, go, and are killed, and whose scheduler is started anew."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from distributed import Client, Event, Scheduler, SpecCluster
from distributed.deploy.spec import ProcessInterface
from tensorvine.actors import Repository
from tensorvine.store.errors import TensorVineError

from tests.support.dask_cluster import WAIT_S, dask_processes, until

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(400)]


class WorkerOnANode(ProcessInterface):
    """A worker on a node of its own, as a job of `dask-jobqueue` would be."""

    def __init__(self, scheduler: str, name: object = None) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._scheduler, self._name = scheduler, str(name)

    async def start(self) -> None:
        options = ("--name", self._name, "--nthreads", "1", "--memory-limit", "1GB", "--no-dashboard")
        command = (sys.executable, "-m", "distributed.cli.dask_worker", self._scheduler, *options)
        environment = {**os.environ, "DASK_TENSORVINE__NODE": f"node-{self._name}"}
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=quiet)
        await super().start()

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        await super().close()


def waits(number: int, name: str) -> int:
    """Be a task until the event of that name is set."""
    Event(name).wait(WAIT_S)
    return number


def weights(number: int) -> dict[str, np.ndarray]:
    return {"w": np.full(1 << 16, number, np.float32)}


def check(repository: Repository, versions: int) -> None:
    for number in range(versions):
        assert (repository.load(f"m{number}")["w"] == number).all()


@contextmanager
def saving(repository: Repository) -> Iterator[list[int]]:
    """Save one version after another meanwhile; what was saved is listed, and what fails is raised."""
    saved, stop, failed = list[int](), threading.Event(), list[TensorVineError]()

    def save() -> None:
        while not stop.is_set():
            try:
                repository.save(f"m{len(saved)}", weights(len(saved)))
            except TensorVineError as exc:
                failed.append(exc)
                return
            saved.append(len(saved))

    saver = threading.Thread(target=save)
    saver.start()
    try:
        until(lambda: saved or failed)
        yield saved
    finally:
        stop.set()
        saver.join(WAIT_S)
    assert failed == []


def test_shards_follow_a_cluster_that_adapts_and_nothing_is_lost() -> None:
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0", "port": 0, "host": "127.0.0.1"}}
    with (
        SpecCluster(scheduler=scheduler, worker={"cls": WorkerOnANode, "options": {}}) as cluster,
        Client(cluster) as client,
    ):
        cluster.scale(1)
        client.wait_for_workers(1, timeout=WAIT_S)
        with Repository.start("adapts", store_bytes=128 << 20, preallocate_bytes=0) as repository:
            assert len(repository.shards) == 1
            with saving(repository) as saved:
                cluster.adapt(minimum=1, maximum=2, interval="200ms", wait_count=2, target_duration="1ms")
                busy = client.map(waits, range(20), name="adapts")
                until(lambda: len(repository.shards) == 2)
                more = len(saved) + 5
                until(lambda: len(saved) > more)
                Event("adapts").set()
                client.gather(busy)
                del busy
                until(lambda: len(repository.shards) == 1)
            check(repository, len(saved))


def test_saves_go_on_while_workers_are_killed_restarted_and_closed() -> None:
    with (
        dask_processes("one", "one", "two") as (processes, engine),
        Client(processes.address, set_as_default=False) as client,
        Repository.start("goes-on", store_bytes=128 << 20, preallocate_bytes=0, engine=client) as repository,
    ):
        with saving(repository) as saved:
            assert len(repository.shards) == 2
            client.restart(wait_for_workers=False, timeout=WAIT_S)  # their nannies start them again
            (worker,) = psutil.Process(processes.workers[0].pid).children()
            worker.kill()
            until(lambda: len(client.scheduler_info()["workers"]) == 3)
            processes.workers[2].send_signal(signal.SIGTERM)  # the only one of its node
            until(lambda: len(repository.shards) == 1)
            more = len(saved) + 5
            until(lambda: len(saved) > more)
        check(repository, len(saved))
        until(lambda: len(engine.nodes()) == 1)


def test_saves_go_on_without_the_scheduler_and_the_next_one_finds_the_repository() -> None:
    with (
        dask_processes("one", "two") as (processes, _),
        Client(processes.address, set_as_default=False, timeout=WAIT_S) as client,
        Repository.start("survives", store_bytes=128 << 20, preallocate_bytes=0, engine=client) as repository,
    ):
        with saving(repository) as saved:
            processes.scheduler.kill()
            processes.scheduler.wait(WAIT_S)
            more = len(saved) + 5
            until(lambda: len(saved) > more)
            processes.start_scheduler()
            for name in ("one", "two"):
                processes.start_worker(name)
            with Client(processes.address, set_as_default=False, timeout=WAIT_S) as another:
                found = until(lambda: _connected("survives", another))
                assert found.models("m0")
                found.close()
                until(lambda: len(repository.shards) == 2)
        check(repository, len(saved))


def _connected(name: str, client: Client) -> Repository | None:
    try:
        return Repository.connect(name, engine=client)
    except TensorVineError:
        return None
