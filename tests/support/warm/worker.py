"""What a raylet starts as a worker: it has one forked, and ends with it. Imports little, for that is its purpose."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys

FOLDER = "TENSORVINE_TEST_FORK_SERVERS"
"""An environment variable: the folder of the servers' sockets, each named after its raylet and its job."""


def main() -> None:
    """Run Ray's own `default_worker.py` with this process's arguments, in a child of the fork server where one is."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    command = [os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py"), *sys.argv[1:]]
    job = os.environ.get("RAY_JOB_ID")  # one that spills the object store to disk has none
    address = os.path.join(os.environ[FOLDER], f"{os.environ['RAY_RAYLET_PID']}-{job}")
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
        except OSError:  # the worker is another job's, or none's, or an early one
            os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - this Python
        order = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [len(order).to_bytes(8, "big")], range(3))
        server.sendall(order)
        while server.recv(1):
            pass


if __name__ == "__main__":
    main()
