"""Several raylets on one machine: what as many nodes are, but for the network between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

START_TIMEOUT_S = 60
Nodes = tuple[str, str]
"""Ids: the node on which this process is, and the other one."""
TRIES = 20
"""Ray takes the node that an actor is to run on as a wish."""


class Closable(Protocol):
    """Something that runs until it is closed."""

    def close(self) -> None:
        """End it."""
        ...


Started = TypeVar("Started", bound=Closable)


@contextmanager
def two_raylets(store_bytes: int) -> Iterator[Nodes]:
    """Start a cluster of two raylets and connect to it; as `raylets`.

    Yields:
        The ids of the node on which this process is, and of the other one.
    """
    with raylets(2, store_bytes) as (here, other):
        yield here, other


@contextmanager
def raylets(count: int, store_bytes: int) -> Iterator[tuple[str, ...]]:
    """Start a cluster of so many raylets and connect to it; end all.

    Args:
        count: how many.
        store_bytes: capacity of each raylet's object store.

    Yields:
        The ids of the nodes; the first is the one on which this process is.

    Raises:
        RuntimeError: this process is connected to a Ray already.
    """
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        raise RuntimeError(f"{count} raylets: expected a process without a Ray; it is connected to one")
    os.environ["RAY_ADDRESS"] = "local"  # a Ray that others run on this machine is none of ours
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store_bytes})
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        here = ray.get_runtime_context().get_node_id()
        nodes = [str(row["NodeID"]) for row in ray.nodes()]
        for node in nodes:
            _await_room(node)
        yield here, *(node for node in nodes if node != here)
    finally:
        ray.shutdown()
        cluster.shutdown()


def started_on(node: str, start: Callable[[], Started], actor_of: Callable[[Started], Any]) -> Started:
    """Start something whose actor runs on a node; what came to run elsewhere is closed, and started again.

    Args:
        node: id of the node.
        start: starts it.
        actor_of: gives Ray's handle of its actor.

    Raises:
        RuntimeError: it came to run elsewhere each time.
    """
    for _ in range(TRIES):
        started = start()
        if node_of(actor_of(started)) == node:
            return started
        started.close()
    raise RuntimeError(f"expected an actor on node {node}; found it elsewhere, {TRIES} times")


def node_of(actor: Any) -> str:
    """Return the id of the node on which an actor runs."""
    import ray

    return ray.get(actor.__ray_call__.remote(_this_node), timeout=START_TIMEOUT_S)


def actor_named(name: str) -> Any:
    """Return Ray's handle of an actor of ours."""
    import ray

    return ray.get_actor(name, namespace="tensorvine")


def _await_room(node: str) -> None:
    """Wait until actors can be placed on a node; until then Ray puts those that prefer it elsewhere."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(_nothing).options(num_cpus=0, scheduling_strategy=there)
    ray.get(task.remote(), timeout=START_TIMEOUT_S)


def _this_node(_: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def _nothing() -> None:
    """Do nothing."""
