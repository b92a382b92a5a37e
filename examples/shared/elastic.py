"""A cluster on this machine whose nodes come and go: the real Ray autoscaler with its fake multi-node provider.

Rules
- The head has no CPU slot: whoever asks for one makes a node come. A node that nobody uses goes again.
- This is what `ray.cluster_utils.AutoscalingCluster` does, which cannot be used: its `start` and `shutdown` stop every
  Ray on the machine, other people's too, and Ray's wheels lack the configuration that it begins from. Here the cluster
  has a port and a folder of its own, and only what it started is ended: that is known by an environment variable.
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
"""Where the provider tells a raylet which node it is."""
HEAD = "ray.head.default"
"""The name that the provider gives to its head."""
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""What a machine of a cloud would be told to run; there is none."""
START_S, STOP_S = 60.0, 4.0
LOST_S = "10"
"""After how many seconds of silence a node counts as dead, and another one is made in its place."""
IDLE_MINUTES = 0.05
"""How long a node may have nothing to do before it goes."""


class ElasticCluster:
    """A Ray whose nodes come when somebody asks for a CPU. A context manager; this process is attached to it within.

    Args:
        nodes: how many may be there at once, one CPU slot each.
        object_store_bytes: capacity of the object store of the head, and of each node.
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
        """Start the head and its autoscaler, and attach this process.

        Raises:
            RuntimeError: Ray does not start; says what it wrote.
        """
        auth_token.guard()  # this process, and all that is started here
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
        """Return the ids of the nodes beside the head."""
        return [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["Resources"].get("CPU")]

    def kill(self, node: str) -> None:
        """Kill a node as a crash would: its raylet, and with it its workers."""
        for process in self.processes():
            if process.name() == "raylet" and _environment_of(process).get(NODE) == node:
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that this cluster started and that run."""
        return [process for process in psutil.process_iter() if _environment_of(process).get(MARK) == self._folder.name]

    def close(self) -> None:
        """Detach this process, and end all that the cluster started."""
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
