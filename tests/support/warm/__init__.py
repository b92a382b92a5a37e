"""Workers of Ray that are forked from a process which has imported what they need.

A worker of Ray is a new Python that imports Ray and TensorVine, for 0.8 s of a core, and the tests on a shared cluster
start nine hundred of them. Forked, one takes 0.1 s.

Rules
- Ray is told to start `worker.py` in place of its own `default_worker.py`. That hands its arguments, environment,
  working directory and standard streams to a fork server (`server.py`), whose child runs `default_worker.py` with them,
  and ends with the child. All else is Ray's: the child is a process in a group of its own, and may be killed like any.
- Ray's core reads the RAY_* of the environment when it is loaded. So a fork server serves one raylet and the job of one
  driver: what other jobs ask for, and what is asked for before the server is ready, starts as Ray starts it.
- A server imports no framework and starts no thread before it forks. It ends with the process that started it.
- Ray's monitors of logs and of demand are left out: nobody reads the one, nor adds nodes for the other, and the first
  looks into all logs ten times a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.parameter import RayParams

from tests.support.warm.worker import FOLDER

HERE = Path(__file__).parent
TIMEOUT_S = 30.0
"""For a fork server that is to end."""


@contextmanager
def warm_workers() -> Iterator[Callable[[], None]]:
    """Have the Ray that is started in the block fork its workers, once what this gives was called.

    It is called when Ray is initialised, and again when nodes were added.
    """
    served: set[int] = set()

    def serve() -> None:
        job = ray.get_runtime_context().get_job_id()
        raylets = [child.pid for child in psutil.Process().children() if child.name() == "raylet"]
        for raylet in set(raylets) - served:
            servers.enter_context(fork_server(raylet, job, folder))
            served.add(raylet)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, folder)
        worker = str(HERE / "worker.py")
        started = partialmethod(RayParams.__init__, worker_path=worker, include_log_monitor=False, no_monitor=True)
        patch.setattr(RayParams, "__init__", started)
        yield serve


@contextmanager
def fork_server(raylet: int, job: str, folder: str) -> Iterator[None]:
    """Start a fork server, and wait until it is ready."""
    command = [sys.executable, str(HERE / "server.py"), os.path.join(folder, f"{raylet}-{job}")]
    environment = {**os.environ, "RAY_RAYLET_PID": str(raylet), "RAY_JOB_ID": job}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield
            server.stdin.close()
            server.wait(TIMEOUT_S)
        finally:
            server.kill()
