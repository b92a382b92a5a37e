"""What a round stands on: a Ray of its own, of one raylet or several, and the processes of the repository there.

Rules
- Every process of a soak has `MARK` in its environment. A signal goes to a process only if it has this soak's mark.
- Ray's files lie below the round's folder, so that a Ray that others run on this machine is neither found nor touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from tensorvine.actors.catalog.parts.deploy import Deploy
from tensorvine.clusters import LocalCluster

from benchmarks.core.clusters import await_room

MARK = "TENSORVINE_SOAK"
"""Environment variable that says to which soak a process belongs."""
STORE_BYTES = 128 << 20
"""Capacity of each raylet's object store."""
TRIES = 5
PATIENCE_S = 300.0
"""How long a busy machine may take to start what died."""


class Ground:
    """A Ray for one round.

    Args:
        raylets: how many nodes.
    """

    def __init__(self, raylets: int) -> None:
        self._local = _started() if raylets == 1 else None
        self._cluster: Any = None
        if raylets > 1:
            self._node = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
            self._cluster = Cluster(initialize_head=True, head_node_args=self._node)
            try:
                for _ in range(raylets - 1):
                    self._cluster.add_node(**self._node)
                ray.init(address=self._cluster.address, log_to_driver=False)
                self._cluster.wait_for_nodes()
                for node in self.nodes():
                    await_room(node)
            except BaseException:
                self.close()
                raise
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @property
    def address(self) -> str:
        """Where clients find it."""
        return ray.get_runtime_context().gcs_address

    def nodes(self) -> list[str]:
        """Return the ids of the nodes, the driver's own first."""
        here = ray.get_runtime_context().get_node_id()
        return sorted((row["NodeID"] for row in ray.nodes() if row["Alive"]), key=lambda node: (node != here, node))

    def replace_node(self, draw: int) -> None:
        """Kill a node that has no driver, with all that runs there, and start another one."""
        others = [node for node in self._cluster.list_all_nodes() if node is not self._cluster.head_node]
        self._cluster.remove_node(others[draw % len(others)], allow_graceful=False)
        await_room(self._cluster.add_node(**self._node).node_id)

    def close(self) -> None:
        """End it."""
        if self._local is not None:
            self._local.close()
            return
        with contextlib.suppress(Exception):
            ray.shutdown()
        self._cluster.shutdown()


def _started() -> LocalCluster:
    """Start Ray on this machine, again where a busy one did not do it within the half minute that Ray gives it."""
    for _ in range(TRIES - 1):
        try:
            return LocalCluster(object_store_bytes=STORE_BYTES, cpus=2)
        except Exception as exc:  # Ray's own has no type
            if "timed out during startup" not in str(exc):
                raise
            ray.shutdown()
    return LocalCluster(object_store_bytes=STORE_BYTES, cpus=2)


def pid_of(actor: str, patience: float = PATIENCE_S) -> int:
    """Return the process of an actor's present life, once it answers.

    Raises:
        TimeoutError: it did not within `patience` seconds.
    """
    deadline, reason = time.monotonic() + patience, "it was not asked"
    while time.monotonic() < deadline:
        try:
            found = ray.get_actor(actor, namespace="tensorvine")
            return ray.get(found.__ray_call__.remote(_pid), timeout=max(deadline - time.monotonic(), 1.0))
        except (ray.exceptions.RayError, ValueError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
            time.sleep(0.1)
    raise TimeoutError(f"{actor}: expected it to answer within {patience} s; {reason[:300]}")


def look_for_orphans(actor: str) -> None:
    """Have a catalog look for unused files now, and not only when a minute is over."""
    ray.get(ray.get_actor(actor, namespace="tensorvine").__ray_call__.remote(_look), timeout=PATIENCE_S)


def send(pid: int, number: int) -> bool:
    """Send a signal to a process of this soak; False: there is none of that number."""
    if mark_of(pid) != os.environ[MARK]:
        return False
    try:
        descriptor = os.pidfd_open(pid)
        try:
            if mark_of(pid) != os.environ[MARK]:
                return False
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except ProcessLookupError:
        return False
    return True


def mark_of(pid: int) -> str | None:
    """Return the mark in the environment that a process was started with."""
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = f"{MARK}=".encode()
    return next((row[len(start) :].decode() for row in rows if row.startswith(start)), None)


def processes(mark: str) -> list[int]:
    """List the living processes with a mark, but for this one."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()]
    return [pid for pid in pids if mark_of(pid) == mark]


def end_all(mark: str) -> int:
    """Kill what is left of a soak, and give how many processes that were."""
    killed: set[int] = set()
    for pid in _until_none(lambda: processes(mark)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    return len(killed)


def _until_none(look: Callable[[], list[int]]) -> Iterator[int]:
    for _ in range(100):
        found = look()
        if not found:
            return
        yield from found
        time.sleep(0.1)


def _look(catalog: Any) -> None:
    catalog.parts[Deploy]._placement.look_for_orphans()


def _pid(_: object) -> int:
    return os.getpid()
