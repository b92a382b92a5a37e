"""The Ray that `tensorvine up` starts where none runs, and `tensorvine down` ends.

Rules
- It is one process, `ray start --head --block`, in a session of its own; Ray's daemons end with it.
- It listens on all interfaces, and asks who joins it for this user's token (`auth_token`), which this process presents.
  Ray's ports are those that the files for `ray up` name, but for that of Ray's client: one from 20000 to 31999.
- No file says that it runs: its node carries a label, and the process has the label in its command line. What was
  started by other means has no such label, and is never ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from typing import IO

import psutil

from ..actors.engine.ray import auth_token, discovery
from ..actors.engine.room import MONITOR_OFF, ray_start_options
from ..store.errors import OperationTimeoutError, ShardUnavailableError
from ..store.waiting import Backoff, Deadline
from .nodes import STARTED_BY_UP

START_S = 60.0
STOP_S = 30.0
_PORTS = range(20_000, 32_000)
"""Above those of Ray's workers, and below those that Linux gives to who asks for any."""
_STARTED = re.compile(r"ray start --address='([^']+)'")


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray that was started."""

    address: str
    """HOST:PORT of its control service."""
    mark: str
    """The value of its node's label, by which `stop` finds it."""


def start(port: int) -> Head:
    """Start a Ray on this machine that lives until `stop`.

    Args:
        port: of its control service; 0: any that is free.

    Raises:
        ShardUnavailableError: it ended at once: the port is taken, or a library is missing. Says what Ray said.
        OperationTimeoutError: it did not come up within START_S seconds.
        StoreFullError: there is too little memory for a Ray.
        StorageError: this user's token cannot be made or read.
    """
    auth_token.guard()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    command += ray_start_options()
    command += [f"--ray-client-server-port={free_port()}"]  # its default may be another Ray's: then this one ends
    mark = uuid.uuid4().hex[:12]
    command += [_argument(mark)]
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(  # noqa: S603  our own words, and a number
            command,
            env=dict([MONITOR_OFF]) | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return Head(_await_address(process, output), mark)
        except BaseException:
            if process.poll() is None:
                _end(psutil.Process(process.pid))
            raise


def stop(mark: str) -> bool:
    """End the Ray that `start` gave this mark, if it is on this machine; says whether it is.

    Raises:
        OperationTimeoutError: it did not end within STOP_S seconds.
    """
    for process in psutil.process_iter(["cmdline"]):
        if _argument(mark) in (process.info["cmdline"] or ()):
            _end(process)
            discovery.forget_ended()
            return True
    return False


def _argument(mark: str) -> str:
    return f"--labels={STARTED_BY_UP}={mark}"


def free_port() -> int:
    """Return a port that nobody has, and that nobody gets who asks for any."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise ShardUnavailableError(f"expected a free port from {_PORTS[0]} to {_PORTS[-1]}; found none in 100 tries")


def _await_address(process: subprocess.Popen[bytes], output: IO[bytes]) -> str:
    deadline, pauses = Deadline.after(START_S), Backoff(0.1, 0.1)
    while True:
        output.seek(0)
        text = output.read().decode(errors="replace")
        found = _STARTED.search(text)
        if found:
            return found[1]
        if process.poll() is not None:
            said = [line.strip() for line in text.splitlines() if line.strip()]
            raise ShardUnavailableError(f"ray start --head: expected it to run; it ended: {' / '.join(said[-3:])}")
        if not pauses.wait(deadline):
            raise OperationTimeoutError(f"ray start --head: expected it to start within {START_S:.0f} s; it did not")


def _end(process: psutil.Process) -> None:
    """End a process with its children: it ends them itself, or is made to."""
    try:
        family = [process, *process.children(recursive=True)]
        process.terminate()
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(family, timeout=STOP_S)
    for one in left:
        one.kill()
    _, left = psutil.wait_procs(left, timeout=STOP_S)
    if left:
        raise OperationTimeoutError(
            f"Ray: expected its processes to end within {STOP_S:.0f} s; found {left} still running"
        )
