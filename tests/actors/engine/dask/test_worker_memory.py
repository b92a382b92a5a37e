"""The memory limits of Dask's workers, beside tasks that load what is larger."""

from __future__ import annotations

import os
import subprocess
import sys

import dask.config
import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster
from distributed.scheduler import KilledWorker
from tensorvine.actors import Repository
from tensorvine.actors.engine.dask.worker_memory import OwnBytes, read

from tests.support.dask_cluster import WAIT_S
from tests.support.waiting import eventually

LIMIT = 600 << 20
PARTS, PART = 6, 128 << 20
"""Tensors of a version, and the bytes of each: more than the limit in all."""


def loads(name: str) -> tuple[int, float, int, int]:
    """Load all of a version, and hold it until the nanny has looked."""
    with Repository.connect(name) as repository:
        loaded = repository.load("m")
        total = sum(float(tensor[::512].sum()) for tensor in loaded.values())
        looked = OwnBytes(0.0)
        for _ in range(50):
            looked.of(os.getpid())
        return os.getpid(), total, psutil.Process().memory_info().rss, looked.of(os.getpid())


def fills() -> None:
    """Take what is larger than the limit for itself."""
    taken = []
    while True:
        taken.append(np.ones(32 << 20, np.uint8))


@pytest.mark.own_cluster
def test_what_a_task_has_mapped_of_a_shard_is_not_its_workers_memory() -> None:
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=1, threads_per_worker=1, memory_limit=LIMIT, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Repository.start("mapped", shards=1, store_bytes=1 << 30, preallocate_bytes=0) as repository,
    ):
        repository.save("m", {f"w{part}": np.ones(PART // 4, np.float32) for part in range(PARTS)})
        before = client.run(os.getpid)
        pid, total, resident, own = client.submit(loads, "mapped", retries=0).result(WAIT_S)
        assert total == PARTS * PART / 4 / 512
        assert resident > LIMIT
        assert own < LIMIT / 2
        assert [pid] == list(before.values()) == list(client.run(os.getpid).values()), "its worker lives still"
        with pytest.raises(KilledWorker):
            client.submit(fills, retries=0).result(WAIT_S)
        assert repository.load("m")["w0"].all(), "the shard was not ended for it"
        eventually(lambda: client.scheduler_info()["workers"], "a worker is there again")


def test_bytes_of_a_process_are_its_own_where_it_maps_no_shard() -> None:
    with subprocess.Popen([sys.executable, "-c", "input(1)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.read(1) == b"1"
        own, others = read(other.pid)
        other.communicate(b"\n", timeout=WAIT_S)
    assert own > 0
    assert others == 0
    with pytest.raises(psutil.NoSuchProcess):
        read(1 << 30)
