"""Workers of the shared Ray are forked, and are in all else what Ray would have started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tensorvine.clusters import LocalCluster

from tests.support.warm import ask_for, worker

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Empty:
    """An actor that does what it is told."""

    def run(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)


@pytest.fixture
def forked(cluster: LocalCluster) -> Iterator[tuple[Any, psutil.Process]]:
    """An actor that is forked, with its process."""
    made = ray.remote(num_cpus=0)(Empty).remote()
    try:
        yield made, psutil.Process(ray.get(made.run.remote(os.getpid), timeout=60))
    finally:
        ray.kill(made)


def waiting() -> set[int]:
    """Processes that a raylet has started for a worker, and that wait for its end."""
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if worker.__file__ in child.cmdline():
                found.add(child.pid)
    return found


def test_a_worker_is_forked_in_a_group_of_its_own(forked: tuple[Any, psutil.Process]) -> None:
    running, process = forked
    assert any(part.endswith("warm/server.py") for part in process.parent().cmdline())
    assert os.getpgid(process.pid) == process.pid
    environment = ray.get(running.run.remote(lambda: dict(os.environ)), timeout=30)
    assert environment["RAY_JOB_ID"] == ray.get_runtime_context().get_job_id()
    assert ray.get(running.run.remote(os.getcwd), timeout=30) == process.cwd()


def test_what_started_a_worker_ends_with_it(forked: tuple[Any, psutil.Process]) -> None:
    _, process = forked
    before = waiting()
    assert before
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    deadline = time.monotonic() + 30
    while before <= waiting():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


@pytest.mark.parametrize("sent", [b"", b"\0\0", (9).to_bytes(8, "big"), (9).to_bytes(8, "big") + b"[["])
def test_who_is_killed_while_it_asks_for_a_worker_stops_nobody_else(
    cluster: LocalCluster, sent: bytes, request: pytest.FixtureRequest
) -> None:
    ray.get(ray.remote(num_cpus=0)(Empty).remote().run.remote(os.getpid), timeout=60)  # the first starts the server
    job = ray.get_runtime_context().get_job_id()
    (address,) = (each for each in Path(os.environ[worker.FOLDER]).iterdir() if each.name.endswith(f"-{job}"))
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(address))
        if sent:
            socket.send_fds(asking, [sent], range(3))
    _, process = request.getfixturevalue("forked")
    assert any(part.endswith("warm/server.py") for part in process.parent().cmdline())


def test_a_full_object_store_is_spilled_to_disk(cluster: LocalCluster) -> None:
    """By a worker that is no job's: without one, who puts something into a full store waited for ever."""
    nbytes = int(ray.cluster_resources()["object_store_memory"]) // 5 * 2
    refs = [ray.put(np.full(nbytes, number, np.uint8)) for number in range(4)]
    assert [ray.get(ref, timeout=60)[-1] for ref in refs] == [0, 1, 2, 3]


def test_what_is_asked_for_is_imported_before_workers_are_started(forked: tuple[Any, psutil.Process]) -> None:
    """What no file asks for is not: `tests/actors/client/test_two_nodes.py` looks for frameworks."""
    name = "tabnanny"  # nobody imports it otherwise

    def imported() -> bool:
        import sys

        return name in sys.modules

    assert not ray.get(forked[0].run.remote(imported), timeout=30)
    ask_for([name])
    assert ray.get(ray.remote(num_cpus=0)(Empty).remote().run.remote(imported), timeout=60)


IMPORTED = """
import sys
from tests.support.warm import server
server.have_imported({"ray", *sys.argv[1:]}, set())
print(server.drawn_by_a_child() == server.drawn_by_a_child())
"""


@pytest.mark.parametrize("name", ["ray.tune", "ray.util.collective", "deephyper.evaluator"])
def test_workers_that_are_forked_draw_ids_of_their_own(name: str) -> None:
    """As two drew the same, an actor that both called ended: their calls had the same id."""
    done = subprocess.run([sys.executable, "-c", IMPORTED, name], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_what_draws_an_id_as_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text("import ray\nray.NodeID.from_random()\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", IMPORTED, "drawing"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "one of ['drawing', 'ray'] draws an id of Ray's as it is imported" in done.stderr


def test_environments_of_workers_are_made_when_they_are_asked_for(cluster: LocalCluster) -> None:
    told = ray.remote(lambda: os.environ["TENSORVINE_TEST_TOLD"])
    asked = [told.options(runtime_env={"env_vars": {"TENSORVINE_TEST_TOLD": text}}).remote() for text in "ab"]
    assert ray.get(asked, timeout=60) == ["a", "b"]
