"""What a raylet starts as a worker: it has one forked, and ends with it. Imports little, for that is its purpose."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import socket
import sys

FOLDER = "TENSORVINE_TEST_FORK_SERVERS"
"""An environment variable: the folder of the servers' sockets, each named after its raylet and its job."""
PLAIN = "plain"
"""A file in that folder: while it is there, workers are forked from a server that imports nothing it is asked for."""


def main() -> None:
    """Run Ray's own `default_worker.py` with this process's arguments, in a child of the fork server."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    command = [os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py"), *sys.argv[1:]]
    order = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
    with connected() as server:
        socket.send_fds(server, [len(order).to_bytes(8, "big")], range(3))
        server.sendall(order)
        while server.recv(1):
            pass


def connected() -> socket.socket:
    """Connect to the fork server of this raylet and job; the first who does starts it."""
    job = os.environ.get("RAY_JOB_ID")  # one that spills the object store to disk has none
    address = os.path.join(os.environ[FOLDER], f"{os.environ['RAY_RAYLET_PID']}-{job}")
    address += f"-{PLAIN}" if os.path.exists(os.path.join(os.environ[FOLDER], PLAIN)) else ""
    server = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            server.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):  # none was started, or it has ended
            start(address)
            server.connect(address)
    return server


def start(address: str) -> None:
    """Start a fork server, and wait until it is ready."""
    import subprocess

    command = [sys.executable, os.path.join(os.path.dirname(__file__), "server.py"), address]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise OSError(f"fork server {address}: expected it to be ready; found exit status {server.wait()}")


if __name__ == "__main__":
    main()
