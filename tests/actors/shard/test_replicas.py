"""Replicas on real nodes: what survives a process and a node, and what a commit waits for.

Rules
- The scenarios of `replicas_scenarios` run one after another on three raylets in a process of their own; each has a
  test here. Only those run whose tests do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
SCENARIOS = (
    "start is checked",
    "each version is on two nodes",
    "a killed shard comes back",
    "one shard after another is killed",
    "many versions come back again and again",
    "copies follow a change of shards",
    *(f"home killed {when} its copy" for when in ("before", "during", "after")),
    "home killed at the commit",
    *(f"backup killed {when} a copy" for when in ("before", "during", "after")),
    "an idle backup is killed",
    "both are killed",
    "no backup answers",
    "with a path only what waits is replicated",
    "shard and catalog are killed between a file and its manifest",
    "a node is lost",
    "a node is lost with a path",
)


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Run the scenarios whose tests were chosen: what their process printed, a line each."""
    tests: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [test.callspec.params["scenario"] for test in tests if test.originalname == "test_replicas"]
    command = [sys.executable, "-m", "tests.support.replicas_scenarios", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith(('{"all"', '{"scenario"'))]


@pytest.fixture(scope="module")
def outcomes(said: list[dict[str, Any]]) -> dict[str, str]:
    """Name of a scenario -> what went wrong."""
    return {line["scenario"]: line["error"] for line in said if "scenario" in line}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_replicas(scenario: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[scenario], outcomes[scenario]


def test_every_scenario_is_a_test(said: list[dict[str, Any]]) -> None:
    (names,) = (line["all"] for line in said if "all" in line)
    assert sorted(names) == sorted(SCENARIOS)
