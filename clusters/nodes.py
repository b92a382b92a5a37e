"""The machines of a cluster, and which repositories run on it: questions to its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..store.errors import OperationTimeoutError, RepositoryNotFoundError, ShardUnavailableError
from ..store.waiting import Backoff, Deadline
from . import words

if TYPE_CHECKING:
    from ..actors.engine.engine import Engine

CATALOG = "/catalog"
STARTED_BY_UP = "tensorvine-up"
"""The label of the node of a Ray that `tensorvine up` started."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One living node of the cluster."""

    id: str
    address: str
    """IP address."""
    cpus: float
    gpus: float
    memory_bytes: int
    """What may be reserved of its memory in all."""
    store_bytes: int
    """Capacity of its object store; Dask has none."""
    labels: Mapping[str, str]
    """Of the node, Ray's own among them."""


def machines(engine: Engine) -> list[Machine]:
    """List the living nodes of a cluster, by address."""
    found = [
        Machine(
            node.id,
            node.address,
            node.resources.get("CPU", 0.0),
            node.resources.get("GPU", 0.0),
            int(node.resources.get("memory", 0)),
            int(node.resources.get("object_store_memory", 0)),
            node.labels,
        )
        for node in engine.nodes()
    ]
    return sorted(found, key=lambda machine: (machine.address, machine.id))


def await_nodes(engine: Engine, count: int, timeout: float) -> None:
    """Wait until a cluster has `count` nodes.

    Raises:
        OperationTimeoutError: it has fewer after `timeout` seconds.
    """
    deadline, pauses = Deadline.after(timeout), Backoff(0.2, 0.2)
    while (found := len(engine.nodes())) < count:
        if not pauses.wait(deadline):
            raise OperationTimeoutError(
                f"the cluster: expected {words.count(count, 'node')} within {timeout:.0f} s; found {found}"
            )


def repositories(engine: Engine) -> list[str]:
    """List the names of the repositories that run."""
    return sorted(name.removesuffix(CATALOG) for name in engine.actors() if name.endswith(CATALOG))


def check_there(engine: Engine, repository: str) -> None:
    """Look whether a repository still runs on a cluster.

    Raises:
        RepositoryNotFoundError: it was stopped, or the cluster does not say: its head or its scheduler has ended.
    """
    where = f"repository {repository!r}: expected it to run"
    try:
        found = repositories(engine)
    except ShardUnavailableError as exc:
        raise RepositoryNotFoundError(f"{where}; its cluster does not answer: {exc}") from exc
    if repository not in found:
        raise RepositoryNotFoundError(f"{where}; it was stopped")
