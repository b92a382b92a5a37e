"""Clusters on this machine, repositories in them, and what benchmarks do to them untimed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.store import ModelGraph, ModelRef

from .measure import GIB, progress, wait_until
from .models import small_tensors

if TYPE_CHECKING:
    from tensorvine.actors import Repository

NAME = "bench"
CLIENTS, IN_FLIGHT = 8, 256
START_TIMEOUT_S = 60
TRIES = 20
"""Ray treats the node of an actor as a preference."""


@contextmanager
def repository(object_store_bytes: int = GIB, **options: Any) -> Iterator[Repository]:
    """Start a cluster on this machine and a repository in it; stop both at the end.

    Args:
        object_store_bytes: Capacity of the object store.
        options: Options of `Repository.start`.
    """
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster

    with LocalCluster(object_store_bytes=object_store_bytes), Repository.start(NAME, **options) as repo:
        yield repo


class Names:
    """Model names that are used once, so that every save is a root."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0

    def fresh(self) -> str:
        """Return the next name."""
        self._count += 1
        return f"{self._prefix}/{self._count}"


def retire(repo: Repository, ref: ModelRef, bytes_left: int = 0) -> None:
    """Retire a model and wait until its memory is free."""
    repo.retire(ref)
    wait_until(lambda: repo.stats().bytes_memory <= bytes_left, f"at most {bytes_left} bytes stored after {ref}")


def quality_of(place: int) -> float:
    """Return the quality of the model at a place of a sequence; many models share one, so that ties occur."""
    return place % 997 / 997


def fill(graphs: Iterable[ModelGraph], names: Names, *, tensors: bool = False) -> list[ModelRef]:
    """Save one model per graph, many saves at a time, through several clients as in a search.

    Args:
        graphs: One model each.
        names: Source of the models' names.
        tensors: Give each tensor that a graph names a few values; otherwise a model has one number.
    """
    from tensorvine.actors import Repository

    pending: deque[Any] = deque()
    refs: list[ModelRef] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(Repository.connect(NAME)) for _ in range(CLIENTS)]
        for count, graph in enumerate(graphs):
            values = small_tensors(graph, seed=count) if tensors else {"w": np.zeros(1, np.float32)}
            save = clients[count % CLIENTS].save_async
            pending.append(save(names.fresh(), values, graph=graph, quality=quality_of(count), timeout=300))
            if len(pending) >= IN_FLIGHT:
                refs.append(pending.popleft().committed(300).ref)
            if count and count % 10_000 == 0:
                progress(f"{count} models saved")
        refs.extend(future.committed(300).ref for future in pending)
    return refs


# ---- several nodes on one machine -------------------------------------------------------------------------


@contextmanager
def raylets(count: int, store_bytes: int) -> Iterator[tuple[str, ...]]:
    """Start a cluster of several raylets and connect to it; end all.

    Yields:
        The ids of the nodes; this process is on the first one.

    Raises:
        RuntimeError: if this process is connected to a Ray already.
    """
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        raise RuntimeError(f"{count} raylets: expected a process without a Ray; it is connected to one")
    os.environ["RAY_ADDRESS"] = "local"  # no cluster of others
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store_bytes})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        here = ray.get_runtime_context().get_node_id()
        nodes = [str(row["NodeID"]) for row in ray.nodes()]
        for node in nodes:
            await_room(node)
        yield here, *(node for node in nodes if node != here)
    finally:
        ray.shutdown()
        cluster.shutdown()


def await_room(node: str) -> None:
    """Wait until actors can be placed on a node; until then Ray places actors that prefer it elsewhere."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(_nothing).options(num_cpus=0, scheduling_strategy=there)
    ray.get(task.remote(), timeout=START_TIMEOUT_S)


def started_on(node: str, start: Callable[[], Any], actor_of: Callable[[Any], Any]) -> Any:
    """Start an object whose actor runs on a node; close it and start it again if Ray placed it elsewhere.

    Args:
        node: Id of the node.
        start: Starts the object, which has a method `close`.
        actor_of: Returns Ray's handle of its actor.

    Raises:
        RuntimeError: if it runs elsewhere each time.
    """
    for _ in range(TRIES):
        started = start()
        if node_of(actor_of(started)) == node:
            return started
        started.close()
    raise RuntimeError(f"expected an actor on node {node}; found it elsewhere, {TRIES} times")


def repository_on(node: str, name: str, **options: Any) -> Any:
    """Start a repository whose one shard is on a node."""
    from tensorvine.actors import Repository

    return started_on(
        node, lambda: Repository.start(name, shards=1, **options), lambda _: actor_named(f"{name}/shard-0")
    )


def node_of(actor: Any) -> str:
    """Return the id of the node on which an actor runs."""
    import ray

    return ray.get(actor.__ray_call__.remote(_this_node), timeout=START_TIMEOUT_S)


def actor_named(name: str) -> Any:
    """Return Ray's handle of an actor of TensorVine."""
    import ray

    return ray.get_actor(name, namespace="tensorvine")


def _this_node(_: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _nothing() -> None:
    """Do nothing."""
