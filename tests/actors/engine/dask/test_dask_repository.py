"""Repositories on a Dask whose workers come, go, and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading

import numpy as np
import psutil
import pytest
from distributed import Client, Event, Scheduler, SpecCluster
from distributed.deploy.spec import ProcessInterface
from tensorvine.actors import Repository
from tensorvine.store.errors import TensorVineError

from tests.support.actors import pid_of, reachable
from tests.support.dask_cluster import WAIT_S, DaskProcesses, dask_processes
from tests.support.waiting import eventually

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(400)]


PACE_S = 0.01
"""Between two saves, so that all can be loaded again in the end."""


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
        """End it as a batch system may: with all its processes, at once."""
        if self._process.returncode is None:
            for process in (*psutil.Process(self._process.pid).children(recursive=True), self._process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await self._process.wait()
        await super().close()


def waits(number: int, name: str) -> int:
    """Be a task until the event of that name is set."""
    Event(name).wait(WAIT_S)
    return number


class Saver:
    """Saves one version after another in a thread."""

    def __init__(self, repository: Repository) -> None:
        self.saved = 0
        self._repository = repository
        self._failed: TensorVineError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._save)

    def __enter__(self) -> Saver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def goes_on(self) -> None:
        """Wait for five more versions."""
        more = self.saved + 5
        eventually(lambda: self.saved > more or self._failed is not None, "five more versions")
        self.check()

    def check(self) -> None:
        """See whether all were saved, and are what was saved."""
        if self._failed is not None:
            raise self._failed
        for number in range(self.saved):
            assert (self._repository.load(f"m{number}")["w"] == number).all()

    def _save(self) -> None:
        try:
            while not self._stop.wait(PACE_S):
                self._repository.save(f"m{self.saved}", {"w": np.full(1 << 10, self.saved, np.float32)})
                self.saved += 1
        except TensorVineError as exc:
            self._failed = exc


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
            with Saver(repository) as saver:
                cluster.adapt(minimum=1, maximum=2, interval="200ms", wait_count=2, target_duration="1ms")
                busy = client.map(waits, range(20), name="adapts")
                eventually(lambda: len(repository.shards) == 2, "two shards")
                saver.goes_on()
                Event("adapts").set()
                client.gather(busy)
                del busy
                eventually(lambda: len(repository.shards) == 1, "one shard")
            saver.check()


def test_saves_go_on_while_workers_are_killed_restarted_and_closed() -> None:
    with (
        dask_processes("one", "one", "two") as (processes, engine),
        Client(processes.address, set_as_default=False) as client,
        Repository.start("goes-on", store_bytes=128 << 20, preallocate_bytes=0, engine=client) as repository,
    ):
        with Saver(repository) as saver:
            assert len(repository.shards) == 2
            client.restart(wait_for_workers=False, timeout=WAIT_S)  # their nannies start them again
            client.wait_for_workers(3, timeout=WAIT_S)
            pids = client.run(os.getpid)
            os.kill(next(iter(pids.values())), signal.SIGKILL)
            eventually(
                lambda: len(now := client.scheduler_info()["workers"]) == 3 and set(now) != set(pids),
                "three workers again, one of them new",
            )
            processes.workers[2].send_signal(signal.SIGTERM)  # the only one of its node
            eventually(lambda: len(repository.shards) == 1, "one shard")
            saver.goes_on()
        saver.check()
        eventually(lambda: len(engine.nodes()) == 1, "one node")


def saves_here(number: int) -> str:
    """Be a task that saves a version, which this node holds."""
    with Repository.connect("copies", engine="dask") as repository:
        return str(repository.save(f"n{number}", {"w": np.full(1 << 18, number, np.float32)}).ref)


def test_copies_are_on_other_nodes_so_no_version_is_lost_with_a_node() -> None:
    with (
        dask_processes("one", "two", "three") as (processes, engine),
        Client(processes.address, set_as_default=False) as client,
        reachable(),
        Repository.start("copies", replicas=2, store_bytes=64 << 20, preallocate_bytes=0, engine=client) as repository,
    ):
        workers = list(client.scheduler_info()["workers"])
        tasks = [client.submit(saves_here, number, workers=[worker]) for number, worker in enumerate(workers)]
        refs = client.gather(tasks)
        assert sum(shard.bytes_replicated > 0 for shard in repository.stats().shards) > 1
        planner = engine.actors()["copies/planner"]
        lost = next(name for name, node in engine.actors().items() if "/shard-" in name and node != planner)
        lose_node(processes, pid_of(engine, lost))
        for number, ref in enumerate(refs):
            assert (repository.load(ref, timeout=WAIT_S)["w"] == number).all()
        refs.append(str(repository.save("after", {"w": np.zeros(1)}, timeout=WAIT_S).ref))
        assert sorted(map(str, repository.models())) == sorted(refs)


def lose_node(processes: DaskProcesses, actor: int) -> None:
    """Kill all processes of the node of an actor."""
    nanny = psutil.Process(actor).parents()[1]
    assert nanny.pid in [worker.pid for worker in processes.workers]
    for process in (nanny, *nanny.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
