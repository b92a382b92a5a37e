"""Workers of Ray that are forked from a process which has imported what they need, and nodes with little else.

A worker of Ray is a new Python that imports Ray and TensorVine, for 0.8 s of a core, and the tests on a shared cluster
start nine hundred. Forked, one takes 0.1 s. A node's two agents take 2.5 s more, which nobody here asks for anything.

Rules
- Ray is told to start `worker.py` in place of its own `default_worker.py`. That hands its arguments, environment,
  working directory and standard streams to a fork server (`server.py`), whose child runs `default_worker.py` with them,
  and ends with the child. All else is Ray's: the child is a process in a group of its own, and may be killed like any.
- Ray's core reads the RAY_* of the environment when it is loaded. So a fork server serves one raylet and one job. The
  first worker of the two starts it; it ends with the raylet.
- A server imports no framework but those that it is told, and starts no thread of Python before it forks. It may be
  told later: then workers that are started from there on have them.
- A server draws nothing from Ray's generator of random numbers before it forks: its children would draw the same ids.
- `agent.py` stands for both agents of a node: there are no metrics, and that for `runtime_env` starts when it is asked.
- Ray's dashboard and its monitors of logs and of demand are left out: nobody reads the ones, nor adds nodes for the
  other, and that of logs looks into all of them ten times a second.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from unittest import mock

from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams

from tests.support.warm.server import ASKED
from tests.support.warm.worker import FOLDER, PLAIN

HERE = Path(__file__).parent


@contextmanager
def warm_workers(modules: Iterable[str] = ()) -> Iterator[None]:
    """Have the Rays that are started in the block fork their workers, and go without agents.

    Args:
        modules: that fork servers import, besides what all workers need; `ask_for` may add some.
    """
    started = partialmethod(
        RayParams.__init__, worker_path=str(HERE / "worker.py"), include_log_monitor=False, no_monitor=True
    )
    with (
        lean_nodes(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {FOLDER: folder}),
        mock.patch.object(RayParams, "__init__", started),
        mock.patch.object(services, "_site_flags", return_value=["-S", "-E"]),
    ):
        ask_for(modules)
        yield


def ask_for(modules: Iterable[str]) -> None:
    """Have workers that are started from now on forked from a process which has imported these, too."""
    if FOLDER in os.environ:
        with Path(os.environ[FOLDER], ASKED).open("a") as names:
            names.writelines(f"{name}\n" for name in modules)


@contextmanager
def plain_workers() -> Iterator[None]:
    """Have workers that are started in the block forked from a process that has imported nothing it was asked for."""
    note = Path(os.environ[FOLDER], PLAIN)
    note.touch()
    try:
        yield
    finally:
        note.unlink()


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Have the nodes that are started in the block go without a dashboard, and with `agent.py` for their agents."""
    of_agents = [sys.executable, "-S", "-E", str(HERE / "agent.py")]
    with (
        mock.patch.object(Node, "start_api_server"),
        mock.patch.object(services, "_build_python_executable_command_memory_profileable", return_value=of_agents),
    ):
        yield
