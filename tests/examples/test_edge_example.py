"""The example of a device outside the cluster runs to its end, says what it must, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.redis_server import PASSWORD, RedisServer

RUN = Path(__file__).parents[2] / "examples/edge_consumer/run.py"
MARK = "TENSORVINE_TEST_EDGE"
"""An environment variable by which the processes that the example started are known."""

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(120)]


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A value of MARK for one test; what still runs with it at the end is killed."""
    yield str(tmp_path)
    for process in started(str(tmp_path)):
        process.kill()


def start(mark: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(RUN), "--quick", *options],
        env={**os.environ, MARK: mark, "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )


def started(mark: str) -> list[psutil.Process]:
    """Return the processes that run with this mark in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def outlive(mark: str) -> list[str]:
    _, alive = psutil.wait_procs(started(mark), timeout=20)
    return [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]


def versions(output: str) -> list[int]:
    """Return the versions that the device said it answers with, in order."""
    return [int(version) for version in re.findall(r"device: wave@(\d+) +told +-?[\d.]+ ms .* error 0\.\d+", output)]


def test_a_device_without_ray_answers_with_each_version_also_after_redis_was_gone(mark: str) -> None:
    process = start(mark)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    arrived = versions(output)
    assert arrived[0] < arrived[-1] == 9
    assert arrived == sorted(set(arrived))
    assert output.count("'ray' in sys.modules is False") == 2
    assert "wave@4 is saved, and nobody can be told" in output
    assert re.search(r"wave@9 answers at the end, after \d+ answers in between", output)
    assert "Traceback" not in output
    assert outlive(mark) == []


def test_a_server_that_runs_already_is_used_and_its_password_is_not_shown(mark: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path, password=True) as server:
        process = start(mark, "--redis", server.url)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert versions(output)[-1] == 9
        assert "Redis is killed" not in output
        assert "Traceback" not in output
        assert PASSWORD not in output
        assert "cret" not in output


def test_ctrl_c_ends_it_and_its_device(mark: str) -> None:
    process = start(mark)
    assert process.stdout is not None
    seen = ""
    while "device: wave@" not in seen:
        line = process.stdout.readline()
        assert line, f"ended early:\n{seen}"
        seen += line
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    assert "stopped by Ctrl-C" in rest
    assert "Traceback" not in rest
    assert outlive(mark) == []
