"""The example of a device outside the cluster runs to its end, says what it must, and leaves no process behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.example_runs import await_line, interrupt, start
from tests.support.marked import outlive
from tests.support.redis_server import PASSWORD, RedisServer

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(400)]
EXAMPLE = "edge_consumer"


def versions(output: str) -> list[int]:
    """Return the versions that the device said it answers with, in order."""
    return [
        int(version) for version in re.findall(r"device: wave@(\d+) +notified +-?[\d.]+ ms .* error 0\.\d+", output)
    ]


def test_a_device_without_ray_answers_with_each_version_also_after_redis_was_gone(mark: str) -> None:
    process = start(EXAMPLE, mark)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    arrived = versions(output)
    assert arrived[0] < arrived[-1] == 9
    assert arrived == sorted(set(arrived))
    assert output.count("'ray' in sys.modules is False") == 2
    assert "wave@4 is saved, without a notification" in output
    assert re.search(r"wave@9 answers at the end, after \d+ answers in between", output)
    assert "Traceback" not in output
    assert outlive(mark) == []


def test_a_server_that_runs_already_is_used_and_its_password_is_not_shown(mark: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path, password=True) as server:
        process = start(EXAMPLE, mark, "--redis", server.url)
        output, _ = process.communicate(timeout=250)
        assert process.returncode == 0, output
        assert versions(output)[-1] == 9
        assert "Redis is killed" not in output
        assert "Traceback" not in output
        assert PASSWORD not in output
        assert "cret" not in output


def test_ctrl_c_ends_it_and_its_device(mark: str) -> None:
    process = start(EXAMPLE, mark)
    await_line(process, "device: wave@")
    interrupt(process)
    assert outlive(mark) == []
