"""Updates by groups on a running repository: what is loaded when, and processes that die."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tensorvine.actors import Consumer, Repository
from tensorvine.actors.client.fetch.group_transport import GroupTransport
from tensorvine.actors.client.reader import Reader
from tensorvine.store.errors import ModelLostError, ShardUnavailableError

from tests.support.far import connect_from_afar
from tests.support.warm import plain_workers

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
NBYTES = (1 << 20) + 56


def tensors(value: float) -> dict[str, np.ndarray]:
    return {"large": np.full(1 << 18, value, np.float32), "small": np.full(7, value)}


class Far:
    """A client that gets bytes by groups."""

    def __init__(self, repository: str, connect: Callable[[str], Repository] = Repository.connect) -> None:
        self.repo = connect(repository)

    def load(self, ref: str, timeout: float = 60.0) -> float:
        loaded = self.repo._reader.fetch(ref, transport="gloo", verify=True, timeout=timeout)
        assert sum(loaded.transports.values()) == NBYTES
        assert loaded.digests_checked
        assert len(np.unique(loaded.arrays["large"])) == 1
        return float(loaded.arrays["small"][3])


@ray.remote(num_cpus=0)
class FarActor(Far):
    """The same in a process of its own."""


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("groups", shards=1, store_bytes=64 << 20, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:8]}"


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_nothing_is_loaded_before_somebody_asks(cluster: object, name: str) -> None:
    with plain_workers(), Repository.start(f"lazy-{name}", shards=1, preallocate_bytes=0) as repo:
        shard = repo._session.connection(0).hello.pid
        repo.save(name, tensors(1))
        far = Far(repo.name, connect_from_afar)
        assert set(far.repo._reader.far_transports) == {"socket", "object_store"}
        far.repo.load(name)
        assert not has_torch(shard)
        assert far.load(name) == 1
        assert has_torch(shard)
        assert set(far.repo._reader.far_transports) == {"socket", "object_store", "gloo"}
        far.repo.close()


def test_a_consumer_actor_follows_by_it(repo: Repository, name: str) -> None:
    class Tagged:
        def assign(self, arrays: dict[str, np.ndarray]) -> None:
            self.value = float(arrays["small"][0])

        def __call__(self, batch: object) -> list[float]:
            return [self.value]

    repo.save(name, tensors(1))
    with Consumer.start(repo, name, Tagged, transport="gloo") as consumer:
        repo.save(name, tensors(2), inherit=None)
        consumer.wait_for(2)
        assert consumer.infer(None).outputs == [2.0]
        assert {delivery.transport for delivery in consumer.status().deliveries} == {"gloo"}


def test_a_reader_that_is_killed_fails_no_other_load(repo: Repository, name: str) -> None:
    with ExitStack() as stack:
        readers = [Far(repo.name) for _ in range(2)]
        for reader in readers:
            stack.callback(reader.repo.close)
        actor = FarActor.remote(repo.name)
        stack.callback(ray.kill, actor)
        repo.save(name, tensors(1))
        assert ray.get(actor.load.remote(name), timeout=60) == 1
        ref = str(repo.save(name, tensors(2), inherit=None).ref)
        actor.load.remote(ref)
        ray.kill(actor)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda reader: reader.load(ref, 30.0), readers)) == [2] * 2


class Then(GroupTransport):
    """The way by Gloo, and something that happens just before the bytes are asked for."""

    event = staticmethod(lambda: None)

    def blocks(self, *arguments: Any, **options: Any) -> Any:
        self.event()
        return super().blocks(*arguments, **options)


def test_a_shard_that_is_killed_is_lost_by_name_and_its_next_life_is_met(cluster: object, name: str) -> None:
    with Repository.start(f"dies-{name}", shards=1, preallocate_bytes=0) as repo:
        repo.save(name, tensors(1))
        client = Repository.connect(repo.name)
        way = Then(client._session, "gloo")
        reader = Reader(client._session, client._catalog, [way])
        process = psutil.Process(repo._session.connection(0).hello.pid)

        def die() -> None:
            process.kill()
            psutil.wait_procs([process], timeout=20)

        assert reader.fetch(name, transport="gloo").transports == {"gloo": NBYTES}
        way.event = die
        with pytest.raises(ModelLostError, match=f"{name}@1 is lost"):
            reader.fetch(name, transport="gloo", timeout=60)
        way.event = lambda: None
        repo.save(name, tensors(2))
        assert reader.fetch(name, transport="gloo").arrays["small"][0] == 2
        reader.close()
        client.close()


def test_without_a_gpu_nccl_says_so(repo: Repository, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    repo.save(name, tensors(1))
    with pytest.raises(ShardUnavailableError, match="expected transport 'nccl' to reach shard"):
        repo.load(name, transport="nccl")
