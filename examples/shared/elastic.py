"""A Ray on this machine whose nodes come and go: the real Ray autoscaler with its fake multi-node provider.

The head has no CPU slot: a task that needs one makes the autoscaler add a node. An idle node is removed.
`ray.cluster_utils.AutoscalingCluster` cannot be used: it stops every Ray on the machine, and Ray's wheels lack its
configuration. This cluster has an own port and folder. It ends its own processes only, which it knows by an
environment variable.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from tensorvine.actors.engine.ray import auth_token

from .starting import sigterm_kept

MARK = "TENSORVINE_ELASTIC"
NODE = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"
"""Environment variable of a raylet with the id of its node."""
HEAD = "ray.head.default"
"""Name of the provider's head."""
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""Commands for machines of a cloud; there are none here."""
START_S, STOP_S = 180.0, 4.0
LOST_S = "10"
"""Seconds of silence after which a node counts as dead and is replaced."""
IDLE_MINUTES = 0.05
"""How long a node may be idle before it is removed."""


class ElasticCluster:
    """A Ray with an autoscaler. A context manager, in which this process is connected to it.

    Args:
        nodes: Maximum number of nodes, with one CPU slot each.
        object_store_bytes: Capacity of the object store of each node.
    """

    def __init__(self, nodes: int, object_store_bytes: int = 256 << 20) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tv-", dir="/tmp")
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, self._client_port = one.getsockname()[1], other.getsockname()[1]
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self._store_bytes = object_store_bytes
        resources = {"CPU": 1, "object_store_memory": object_store_bytes}
        self._config: dict[str, Any] = {
            "cluster_name": "elastic",
            "max_workers": nodes,
            "idle_timeout_minutes": IDLE_MINUTES,
            "upscaling_speed": float(nodes),
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "use_node_id_as_ip": True,  # all nodes have the same address
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "auth": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            **{f"{what}_commands": [] for what in COMMANDS},
            "head_node_type": HEAD,
            "available_node_types": {
                HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": nodes},
            },
        }

    def start(self) -> None:
        """Start the head and its autoscaler, and connect this process.

        Raises:
            RuntimeError: if Ray does not start. The message contains its output.
        """
        auth_token.guard()  # of this process and its children
        config = Path(self._folder.name) / "autoscaler.json"
        config.write_text(json.dumps(self._config))
        port = self.address.rpartition(":")[2]
        options = ["start", "--head", f"--port={port}", "--num-cpus=0"]
        options += [f"--temp-dir={self._folder.name}", f"--autoscaling-config={config}", "--include-dashboard=false"]
        options += [
            f"--object-store-memory={self._store_bytes}",
            "--disable-usage-stats",
            f"--ray-client-server-port={self._client_port}",
        ]
        done = subprocess.run(  # noqa: S603 - no input
            [sys.executable, "-m", "ray.scripts.scripts", *options],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"ray start: expected exit status 0; found {done.returncode}:\n{done.stdout}")
        with sigterm_kept():
            ray.init(address=self.address, log_to_driver=False, configure_logging=False)

    def workers(self) -> list[str]:
        """Return the ids of the nodes except the head."""
        return [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["Resources"].get("CPU")]

    def kill(self, node: str) -> None:
        """Kill the raylet of a node. Its workers end with it."""
        for process in self.processes():
            if process.name() == "raylet" and _environment_of(process).get(NODE) == node:
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this cluster."""
        return [process for process in psutil.process_iter() if _environment_of(process).get(MARK) == self._folder.name]

    def close(self) -> None:
        """Disconnect this process, and end the processes of the cluster."""
        ray.shutdown()
        for process in self.processes():
            process.terminate()
        _, left = psutil.wait_procs(self.processes(), timeout=STOP_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=STOP_S)
        self._folder.cleanup()

    def _environment(self) -> Mapping[str, str]:
        intervals = {
            "AUTOSCALER_HEARTBEAT_TIMEOUT_S": LOST_S,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_worker_niceness": "0",  # as in an embedded Ray
        }
        without = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return {**without, **intervals, MARK: self._folder.name}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except psutil.Error:
        return {}
