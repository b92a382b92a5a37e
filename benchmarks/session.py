"""An embedded cluster with one repository, and what benchmarks do to it untimed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.store import ModelGraph, ModelRef

from .architectures import small_tensors
from .measure import GIB, progress, wait_until

if TYPE_CHECKING:
    from tensorvine.actors import Repository

NAME = "bench"
CLIENTS = 8
IN_FLIGHT = 256


@contextmanager
def repository(
    object_store_bytes: int = GIB,
    *,
    shards: int | None = None,
    store_bytes: int | None = None,
    preallocate_bytes: int | None = None,
) -> Iterator[Repository]:
    """Start a cluster on this machine and a repository in it; stop both at the end.

    Args:
        object_store_bytes: capacity of the object store.
        shards: as in `Repository.start`, as are the others; None is what a user gets.
        store_bytes: capacity of each shard.
        preallocate_bytes: memory that each shard takes at the start.
    """
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster

    with (
        LocalCluster(object_store_bytes=object_store_bytes),
        Repository.start(NAME, shards=shards, store_bytes=store_bytes, preallocate_bytes=preallocate_bytes) as repo,
    ):
        yield repo


class Names:
    """Model names that were not used before, so that every save is a root."""

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
    """Return the model at a place of a sequence a quality; many models share one, so that ties occur."""
    return place % 997 / 997


def fill(graphs: Iterable[ModelGraph], names: Names, *, tensors: bool = False) -> list[ModelRef]:
    """Save one model per graph, many saves at a time, through several clients as in a search.

    Args:
        graphs: one model each.
        names: where the models' names come from.
        tensors: give each tensor that a graph names a few values; otherwise each model has one number beside its graph.
    """
    from tensorvine.actors import Repository

    clients = [Repository.connect(NAME) for _ in range(CLIENTS)]
    pending: deque[Any] = deque()
    refs: list[ModelRef] = []
    for count, graph in enumerate(graphs):
        values = small_tensors(graph, seed=count) if tensors else {"w": np.zeros(1, np.float32)}
        client = clients[count % CLIENTS]
        pending.append(client.save_async(names.fresh(), values, graph=graph, quality=quality_of(count), timeout=300))
        if len(pending) >= IN_FLIGHT:
            refs.append(pending.popleft().committed(300).ref)
        if count and count % 10_000 == 0:
            progress(f"{count} models saved")
    refs.extend(future.committed(300).ref for future in pending)
    for client in clients:
        client.close()
    return refs
