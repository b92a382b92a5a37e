"""A Ray node on one host: `python -m tests.hosts.node HOST HEAD FOLDER STORE_BYTES`. It ends with its standard input,
which may say "kill" and "start" of the process that is the cluster's head.

Rules
- HEAD is the host of the cluster's head. It starts what a cluster needs, and neither dashboard nor monitors nor agents.
- Workers are forked (`tests.support.warm`) from a process that has put gates into the actors (`tests.hosts.gates`).
- A node that does not answer is given up after some 10 s, and not after Ray's minute.
"""

from __future__ import annotations

import logging
import os
import sys

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from tests.hosts.network import address
from tests.support.warm import lean_nodes, worker

PORT = 6379
STORE_BYTES = 80 << 20
PATIENCE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
QUIET = {
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def ray_at(head: int) -> str:
    """Return the address of the Ray whose head is on a host."""
    return f"{address(head)}:{PORT}"


def connect(host: int) -> None:
    """Connect this process, which is on a host, to its node: Ray takes all nodes of a machine for its own.

    Its environment has the address, `RAY_ADDRESS`.
    """
    ray.init(
        address=os.environ["RAY_ADDRESS"],
        _node_ip_address=address(host),
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def main(host: int, first: int, folder: str, store_bytes: int) -> None:
    """Run a node until the standard input ends."""
    head = host == first
    parameters = RayParams(
        node_ip_address=address(host),
        gcs_address=None if head else ray_at(first),
        redis_address=None if head else ray_at(first),
        gcs_server_port=PORT if head else None,
        num_cpus=4,
        object_store_memory=store_bytes,
        temp_dir=folder,
        worker_path=worker.__file__,
        include_log_monitor=False,
        include_dashboard=False,
        dashboard_agent_listen_port=None,
        dashboard_port=None,
        no_monitor=True,
        min_worker_port=0,
        max_worker_port=0,
    )
    with lean_nodes():
        node = Node(parameters, head=head, shutdown_at_exit=False, spawn_reaper=False)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for order in map(str.strip, sys.stdin):
            node.kill_gcs_server(check_alive=False) if order == "kill" else node.start_gcs_server()
            sys.stdout.write(f"{order}\n")
            sys.stdout.flush()
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
