"""A search on nodes that come and go: the real Ray autoscaler with its fake multi-node provider.

Rules
- It runs in a process of its own: the session's tests share an embedded Ray in this one.
- What that process started is known by a mark in its environment; none of it is left behind.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.elastic_search import NODES, PLAN
from tests.support.marked import MARK, marked, outlive

ROOT = Path(__file__).parents[2]


@pytest.mark.own_cluster
@pytest.mark.timeout(600)
def test_nodes_join_are_killed_and_come_again_while_the_search_goes_on_and_go_when_it_ends(tmp_path: Path) -> None:
    mark = str(tmp_path)
    # An embedded Ray, such as that of the tests before, leaves its mode to all that this process starts.
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.elastic_search", str(tmp_path / "journal")],
            cwd=ROOT,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", **mode},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert (said["before"], said["most"]) == (0, NODES)
        assert said["killed"] == NODES
        assert said["deaths"] >= 1  # a worker that had not begun to start on its node is started elsewhere
        assert said["others"], "whoever told the last candidate was not there before the nodes were killed"
        assert (said["good"], said["models"], said["problems"]) == (PLAN.candidates, PLAN.population, [])
        assert outlive(mark) == []
    finally:
        for process in marked(mark):
            process.kill()
