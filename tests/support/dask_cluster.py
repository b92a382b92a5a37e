"""Clusters of Dask: in this process, with workers, and in processes of their own, which a test may kill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psutil
from distributed import Client, LocalCluster
from tensorvine.actors.engine.dask import clients
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.engine import DaskEngine

from tests.support.actors import reachable
from tests.support.waiting import eventually

WAIT_S = 60.0


def local_cluster(workers: int) -> LocalCluster:
    return LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0")


@contextmanager
def shared_dask() -> Iterator[DaskEngine]:
    """A Dask for many tests, beside what else runs in this process: its client is nobody's current one."""
    with (
        local_cluster(1) as cluster,
        Client(cluster, set_as_default=False) as client,
        closing(engine_of(client)) as engine,
        reachable(),
    ):
        yield engine


class DaskProcesses:
    """A scheduler and its workers; workers of one node have one name of it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.scheduler = self.start_scheduler()
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", str(self.port))
        return self.scheduler

    def start_worker(self, node: str, nanny: bool = True) -> subprocess.Popen[bytes]:
        """Start a worker, with its nanny or without one."""
        nanny_or_not = "--nanny" if nanny else "--no-nanny"
        options = (nanny_or_not, "--nthreads", "1", "--host", "127.0.0.1", "--memory-limit", "1GB")
        address = self.address.replace("127.0.0.1", "localhost")  # as the scheduler does not call itself
        self.workers.append(self._start("worker", address, *options, node=node))
        return self.workers[-1]

    def close(self) -> None:
        """End it, and first what this process has joined it by: it would try to join again, for half a minute."""
        for where in [where for where in clients._clients if where.endswith(f":{self.port}")]:
            client = clients._clients.pop(where)
            if client.id in clients._engines:
                clients._engines.pop(client.id).close()
            client.close()
        for process in (*self.workers, self.scheduler):
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait(WAIT_S)

    def _start(self, kind: str, *arguments: str, node: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *arguments, "--no-dashboard"]
        return subprocess.Popen(command, env={**os.environ, "DASK_TENSORVINE__NODE": node}, stderr=subprocess.DEVNULL)


@contextmanager
def dask_processes(*nodes: str) -> Iterator[tuple[DaskProcesses, DaskEngine]]:
    """A cluster with one worker on each of some nodes, and an engine of it."""
    processes = DaskProcesses()
    try:
        for node in nodes:
            processes.start_worker(node)
        with Client(processes.address, timeout=WAIT_S) as client:
            client.wait_for_workers(len(nodes), timeout=WAIT_S)
            engine = engine_of(client)
            try:
                eventually(lambda: len(engine.nodes()) == len(set(nodes)), f"{len(set(nodes))} nodes")
                yield processes, engine
            finally:
                engine.close()
    finally:
        processes.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
