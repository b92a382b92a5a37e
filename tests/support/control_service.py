"""Ray's control service without the rest of a Ray: it starts in a tenth of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from tensorvine.store.waiting import Backoff, Deadline

PATIENCE_S = 100.0
PROGRAM = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].close()
"""


@contextmanager
def control_service(folder: Path, token: str | None) -> Iterator[str]:
    """Run one on this machine that asks for this token, or for none; gives its address."""
    mode = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    words = {"log_dir": folder, "session-dir": folder, "config_list": "e30=", "node-ip-address": "127.0.0.1"}
    words |= {"gcs_server_port": 0, "metrics-agent-port": 0, "session-name": "test", "node-id": "f" * 56}
    with (folder / "said").open("wb") as said:
        command = [str(PROGRAM), *(f"--{name}={value}" for name, value in words.items())]
        process = subprocess.Popen(command, env={**os.environ, **mode}, stdout=said, stderr=said)
    try:
        yield f"127.0.0.1:{_port(process, folder)}"
    finally:
        process.kill()
        process.wait(PATIENCE_S)


@contextmanager
def listener_of(user: int) -> Iterator[str]:
    """Run a process of another user that accepts connections on this machine; gives its address."""
    command = [sys.executable, "-c", LISTEN, str(user)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def _port(process: subprocess.Popen[bytes], folder: Path) -> int:
    deadline, pauses = Deadline.after(PATIENCE_S), Backoff(0.01, 0.1)
    while True:
        for file in folder.glob("gcs_server_port_*"):
            if written := file.read_text():
                return int(written)
        if process.poll() is not None or not pauses.wait(deadline):
            raise RuntimeError(f"the control service did not start: {(folder / 'said').read_text()[-500:]}")
