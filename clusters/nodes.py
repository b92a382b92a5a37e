"""The machines of the running Ray, and which of a repository's actors are on which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..actors.engine.ray import control_service
from ..actors.engine.ray.engine import NAMESPACE
from ..store.errors import OperationTimeoutError, RepositoryNotFoundError
from ..store.waiting import Backoff, Deadline

PLANNER = "/planner"


@dataclass(frozen=True, slots=True)
class Machine:
    """One living node of the cluster."""

    id: str
    address: str
    """IP address."""
    cpus: float
    gpus: float
    memory_bytes: int
    """What Ray may hand out of its memory."""
    store_bytes: int
    """Capacity of its object store."""
    labels: Mapping[str, str]
    """Of the node, Ray's own among them."""


def machines() -> list[Machine]:
    """List the living nodes of the Ray that this process is attached to, by address."""
    import ray

    found = [
        Machine(
            row["NodeID"],
            row["NodeManagerAddress"],
            row["Resources"].get("CPU", 0.0),
            row["Resources"].get("GPU", 0.0),
            int(row["Resources"].get("memory", 0)),
            int(row["Resources"].get("object_store_memory", 0)),
            row.get("Labels", {}),
        )
        for row in cast("list[dict[str, Any]]", ray.nodes())
        if row["Alive"]
    ]
    return sorted(found, key=lambda machine: (machine.address, machine.id))


def await_nodes(count: int, timeout: float) -> None:
    """Wait until the Ray that this process is attached to has `count` nodes.

    Raises:
        OperationTimeoutError: it has fewer after `timeout` seconds.
    """
    deadline, pauses = Deadline.after(timeout), Backoff(0.2, 0.2)
    while (found := len(machines())) < count:
        if not pauses.wait(deadline):
            raise OperationTimeoutError(f"Ray: expected {count} nodes within {timeout:.0f} s; found {found}")


def places() -> dict[str, str]:
    """Give, for each living actor that has a name, the id of the node that it is on."""
    from ray._private import state  # Ray's public listing of actors needs its dashboard

    rows = cast("dict[str, dict[str, Any]]", state.actors(actor_state_name="ALIVE"))
    return {row["Name"]: row["Address"]["NodeID"] for row in rows.values() if row["Name"]}


def repositories() -> list[str]:
    """List the names of the repositories that run."""
    from ray.util import list_named_actors

    named: Any = list_named_actors(all_namespaces=True)  # its annotation leaves this form out
    return sorted(
        row["name"].removesuffix(PLANNER)
        for row in named
        if row["namespace"] == NAMESPACE and row["name"].endswith(PLANNER)
    )


def check_there(repository: str) -> None:
    """Look whether a repository still runs on the Ray that this process is attached to.

    Raises:
        RepositoryNotFoundError: it was stopped, or its Ray has ended, which is said at once: Ray itself would try to
            reach it for a minute.
    """
    import ray

    where = f"repository {repository!r}: expected it to go on"
    address = cast("str", cast("Any", ray.get_runtime_context()).gcs_address)
    try:
        control_service.connection(address).close()
    except ConnectionError as exc:
        raise RepositoryNotFoundError(f"{where}; its Ray has ended: {exc}") from exc
    if repository not in repositories():
        raise RepositoryNotFoundError(f"{where}; it was stopped")
