"""What a raylet starts as a worker: it has one forked, and ends with it.

It is started for each worker, so it costs as little as a Python may: `-S -E` (`tests.support.warm`), and nearly no
import but of what is built in. With `site`, `socket` and `json` it would take three times as long.
"""

from __future__ import annotations

import _socket
import fcntl
import marshal
import os
import sys

FOLDER = "TENSORVINE_TEST_FORK_SERVERS"
"""An environment variable: the folder of the servers' sockets, each named after its raylet and its job."""
PLAIN = "plain"
"""A file in that folder: while it is there, workers are forked from a server that imports nothing it is asked for."""


def main() -> None:
    """Run Ray's own `default_worker.py` with this process's arguments, in a child of the fork server."""
    order = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in range(3))
    server = connected()
    head = len(order).to_bytes(8, "big")
    server.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    server.sendall(order)
    while server.recv(1):
        pass


def connected() -> _socket.socket:
    """Connect to the fork server of this raylet and job; the first who does starts it."""
    job = os.environ.get("RAY_JOB_ID")  # one that spills the object store to disk has none
    address = os.path.join(os.environ[FOLDER], f"{os.environ['RAY_RAYLET_PID']}-{job}")
    address += f"-{PLAIN}" if os.path.exists(os.path.join(os.environ[FOLDER], PLAIN)) else ""
    server = _socket.socket(_socket.AF_UNIX)
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
