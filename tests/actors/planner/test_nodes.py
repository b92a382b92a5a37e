"""Shards follow the nodes of a cluster: raylets of one machine join, are told to leave, and are lost."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.messages import planner_name
from tensorvine.planner import ScalePolicy
from tensorvine.store.errors import ModelLostError, OptionError, TensorVineError

from tests.hosts.node import PATIENCE
from tests.support.waiting import eventually
from tests.support.warm import warm_workers

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(600)]

STORE = 96 << 20
WAIT_S = 120.0
PATIENTLY: dict[str, Any] = {"timeout": WAIT_S, "pause": 0.05, "ignoring": (TensorVineError,)}
"""How nodes are waited for: nodes take their time, and a shard that is being restarted does not answer."""
SIZES: dict[str, Any] = {"preallocate_bytes": 0, "store_bytes": 32 << 20}
PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
PATIENT = PATIENCE | {"RAY_health_check_timeout_ms": "20000"}
"""A node that is ended refuses checks at once; one that is only busy has some time to answer."""
_serial = count(1)


class Nodes:
    """A Ray whose nodes come and go; the head stays."""

    def __init__(self) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
        )
        ray.init(address=self._cluster.address, log_to_driver=False)
        self.head = str(self._cluster.head_node.node_id)
        self._gcs = GcsClient(address=self._cluster.address)

    def join(self, **options: Any) -> str:
        """Add a node; give its id."""
        return str(self._cluster.add_node(num_cpus=1, object_store_memory=STORE, **options).node_id)

    def warn(self, node: str) -> None:
        """Tell a node to drain, as an autoscaler does before it takes a spot instance away."""
        accepted, why = self._gcs.drain_node(node, PREEMPTION, "a test", time.time_ns() // 1_000_000 + 600_000)
        assert accepted, why

    def lose(self, node: str) -> None:
        """End a node with all that runs there."""
        victim = next(known for known in self._cluster.list_all_nodes() if known.node_id == node)
        self._cluster.remove_node(victim, allow_graceful=False)

    def only_head(self) -> None:
        """End all others."""
        for node in self._cluster.list_all_nodes():
            if node.node_id != self.head:
                self.lose(str(node.node_id))
        eventually(lambda: sum(row["Alive"] for row in ray.nodes()) == 1, "the head to be alone", **PATIENTLY)

    def close(self) -> None:
        with suppress(Exception):
            ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def started() -> Iterator[Nodes]:
    with mock.patch.dict(os.environ, PATIENT), warm_workers():
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.close()


@pytest.fixture
def nodes(started: Nodes) -> Iterator[Nodes]:
    """The head alone; what a test adds is ended after it."""
    yield started
    started.only_head()


def start(**options: Any) -> Repository:
    return Repository.start(f"nodes-{next(_serial)}", **SIZES, **options)


def places(repo: Repository) -> dict[int, str]:
    """The node of each shard, as the shards say themselves."""
    for shard in repo.shards:
        repo._session.connections.drop(shard)
    return {shard: repo._session.connection(shard).hello.node for shard in repo.shards}


def on(repo: Repository, *wanted: str) -> Callable[[], bool]:
    """One shard on each of these nodes, and no other."""
    return lambda: Counter(places(repo).values()) == Counter(wanted)


def saved(repo: Repository, names: int = 24) -> dict[str, np.ndarray]:
    kept = {f"m{i}": np.full(1 << 18, i, np.uint8) for i in range(names)}
    for name, array in kept.items():
        repo.save(name, {"w": array})
    return kept


def nodes_of(repo: Repository, name: str) -> set[str]:
    """The nodes whose shards have the tensors of a model."""
    located = repo._session.ask(CatalogCalls.locate(repo._session.client, name, None, None))
    return {places(repo)[shard] for shard, _ in located.places.values()}


def check(repo: Repository, kept: dict[str, np.ndarray]) -> None:
    assert [ref.name for ref in repo.models()] == sorted(kept)
    for name, array in kept.items():
        assert np.array_equal(repo.load(name)["w"], array), name
    assert repo.verify() == []


def check_lost(repo: Repository, kept: dict[str, np.ndarray], lost: set[str]) -> None:
    """What is lost is named, all else is there, and a name that was lost can be saved anew."""
    for name in lost:
        with pytest.raises(ModelLostError, match=name):
            repo.load(name)
    for name in kept.keys() - lost:
        assert np.array_equal(repo.load(name)["w"], kept[name]), name
    assert {ref.name for ref in repo.models()} - lost == kept.keys() - lost
    for name in lost:
        assert repo.save(name, {"w": np.zeros(3)}).ref.version > 1


class Reader:
    """Loads one model after the other, from a client of its own, until it is stopped."""

    def __init__(self, repo: Repository, kept: dict[str, np.ndarray]) -> None:
        self._name, self._kept = repo.name, kept
        self._stop = threading.Event()
        self.loads = 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert self.failed == []
        assert self.loads

    def _run(self) -> None:
        with Repository.connect(self._name) as repo:
            while not self._stop.is_set():
                for name, array in self._kept.items():
                    try:
                        assert np.array_equal(repo.load(name)["w"], array), name
                    except Exception as exc:  # noqa: BLE001 - the test names it
                        self.failed.append(f"{name}: {exc!r}")
                    self.loads += 1


def save_from(node: str, repo: Repository, names: list[str]) -> None:
    """Save from another node: the bytes lie there."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(_save.options(scheduling_strategy=here).remote(repo.name, names), timeout=WAIT_S)


def met_from(node: str, repo: Repository, name: str) -> set[int]:
    """Save from another node; gives the shards that the client has met then."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.get(_met.options(scheduling_strategy=here).remote(repo.name, name), timeout=WAIT_S)


@ray.remote(num_cpus=0)
def _met(repository: str, name: str) -> set[int]:
    with Repository.connect(repository) as repo:
        repo.save(name, {"w": np.full(1 << 20, 7, np.uint8)})
        return set(repo._session._greeted)


@ray.remote(num_cpus=0)
def _save(repository: str, names: list[str]) -> None:
    with Repository.connect(repository) as repo:
        for name in names:
            repo.save(name, {"w": np.full(1 << 20, 7, np.uint8)})


class TestOnePerNode:
    def test_nodes_join_and_leave_and_nothing_is_lost(self, nodes: Nodes) -> None:
        with start() as repo:
            kept = saved(repo)
            assert places(repo) == {0: nodes.head}
            with Reader(repo, kept):
                first, second = nodes.join(), nodes.join()
                eventually(on(repo, nodes.head, first, second), "a shard on each node", **PATIENTLY)
                save_from(first, repo, ["far"])
                nodes.warn(first)
                eventually(on(repo, nodes.head, second), "the node that leaves to have handed over", **PATIENTLY)
                nodes.lose(first)
                nodes.warn(second)
                eventually(on(repo, nodes.head), "the head to have all", **PATIENTLY)
                nodes.lose(second)
            check(repo, kept | {"far": np.full(1 << 20, 7, np.uint8)})

    def test_a_client_meets_the_shard_of_its_node_and_no_other(self, nodes: Nodes) -> None:
        with start() as repo:
            first, second = nodes.join(), nodes.join()
            eventually(on(repo, nodes.head, first, second), "a shard on each node", **PATIENTLY)
            shard_on = {node: shard for shard, node in places(repo).items()}
            assert met_from(second, repo, "m") == {shard_on[second]}

    def test_a_node_that_dies_while_its_shard_starts(self, nodes: Nodes) -> None:
        engine = RayEngine()
        with start() as repo:
            kept = saved(repo)
            node = nodes.join()
            # the planner reserves there, and starts the shard then
            eventually(
                lambda: node in engine.reserved(f"{repo.name}:").values(), "room reserved on the node", **PATIENTLY
            )
            nodes.lose(node)
            other = nodes.join()
            eventually(on(repo, nodes.head, other), "a shard on each node that is left", **PATIENTLY)
            check(repo, kept)

    def test_what_lost_nodes_had_is_named_or_comes_back_and_no_node_keeps_two(
        self, nodes: Nodes, tmp_path: Path
    ) -> None:
        first, second = nodes.join(), nodes.join()
        with start() as memory, start(path=tmp_path / "path") as path, start(replicas=2) as twice:
            for repo in (memory, path, twice):
                eventually(on(repo, nodes.head, first, second), "a shard on each node", **PATIENTLY)
            kept = saved(memory)
            saved(path)
            saved(twice)
            for repo in (memory, path, twice):
                save_from(first, repo, ["far"])
            path.flush()
            everything = kept | {"far": np.full(1 << 20, 7, np.uint8)}
            lost = {name for name in everything if first in nodes_of(memory, name)}
            assert "far" in lost
            nodes.lose(first)
            for repo in (memory, path, twice):
                eventually(on(repo, nodes.head, second), "one shard on each node that is left", **PATIENTLY)
            check(path, everything)
            check(twice, everything)
            check_lost(memory, kept, lost)
            nodes.lose(second)
            eventually(on(twice, nodes.head, nodes.head), "as many shards as replicas", **PATIENTLY)
            eventually(on(path, nodes.head), "one shard on the node that is left", **PATIENTLY)
            check(path, everything)
            check(twice, everything)

    def test_only_nodes_that_the_rule_selects(self, nodes: Nodes) -> None:
        with pytest.raises(OptionError, match=r"expected a living node that has .*tensorvine"):
            start(nodes={"tensorvine": 1})
        chosen = nodes.join(resources={"tensorvine": 1}, labels={"zone": "a"})
        with start(nodes={"tensorvine": 1, "zone": "a"}) as repo:
            assert set(places(repo).values()) == {chosen}
            kept = saved(repo)
            other = nodes.join(resources={"tensorvine": 1}, labels={"zone": "b"})
            third = nodes.join(resources={"tensorvine": 2}, labels={"zone": "a"})
            eventually(on(repo, chosen, third), "a shard on the node that is selected", **PATIENTLY)
            nodes.warn(chosen)
            eventually(on(repo, third), "the node that leaves to have handed over", **PATIENTLY)
            assert other not in places(repo).values()
            check(repo, kept)
            with pytest.raises(OptionError, match="is already running with nodes="):
                Repository.start(repo.name, nodes={"tensorvine": 2})

    def test_a_planner_that_starts_again_goes_on_following(self, nodes: Nodes) -> None:
        with start() as repo:
            kept = saved(repo)
            kill_planner(repo)
            node = nodes.join()
            eventually(on(repo, nodes.head, node), "a shard on each node", **PATIENTLY)
            check(repo, kept)


class TestANumber:
    def test_it_means_that_number_also_when_a_node_leaves(self, nodes: Nodes) -> None:
        first, second = nodes.join(), nodes.join()
        with start(shards=2) as repo:
            kept = saved(repo)
            leaving = next(node for node in places(repo).values() if node != nodes.head)
            nodes.warn(leaving)
            left = {nodes.head, first, second} - {leaving}
            eventually(
                lambda: set(places(repo).values()) <= left, "the node that leaves to have handed over", **PATIENTLY
            )
            assert len(repo.shards) == 2
            check(repo, kept)

    def test_scale_asks_for_a_number_and_for_one_per_node_again(self, nodes: Nodes) -> None:
        with start() as repo:
            kept = saved(repo)
            assert repo.scale(3).shards_after == 3
            node = nodes.join()
            kill_planner(repo)
            assert len(repo.shards) == 3, "a number means that number"
            report = repo.scale(None)
            assert (report.shards_before, report.shards_after) == (3, 2)
            assert on(repo, nodes.head, node)()
            check(repo, kept)

    def test_the_load_decides_and_a_node_that_leaves_hands_over(self, nodes: Nodes) -> None:
        node = nodes.join()
        with start(shards=2, scaling=ScalePolicy(least=2, most=2)) as repo:
            kept = saved(repo)
            assert on(repo, nodes.head, node)()
            nodes.warn(node)
            eventually(on(repo, nodes.head, nodes.head), "the node that leaves to have handed over", **PATIENTLY)
            check(repo, kept)


def kill_planner(repo: Repository) -> None:
    planner: Any = repo.engine.find(planner_name(repo.name))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(planner.__ray_call__.remote(lambda _: os._exit(1)), timeout=10.0)
