"""Replicas on real nodes: what survives a process and a node, and what a commit waits for.

Rules
- The scenarios of `replicas_scenarios` run one after another on three raylets in a process of their own; each has a
  test here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.own_cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
SCENARIOS = (
    "start is checked",
    "each version is on two nodes",
    "a killed shard comes back",
    "bytes of other homes come back",
    "many versions come back again and again",
    "copies follow a change of shards",
    *(f"home killed {when} its copy" for when in ("before", "during", "after")),
    *(f"backup killed {when} a copy" for when in ("before", "during", "after")),
    "a holder elsewhere is killed",
    "an idle backup is killed",
    "both are killed",
    "no backup answers",
    "with a path only what waits is replicated",
    "a shard is killed between a file and its manifest",
    "a node is lost",
    "a node is lost with a path",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Run all scenarios: name -> what went wrong."""
    command = [sys.executable, "-m", "tests.support.replicas_scenarios"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"scenario"')]
    assert run.returncode == 0, run.stderr[-3000:]
    return {outcome["scenario"]: outcome["error"] for outcome in found}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_replicas(scenario: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[scenario], outcomes[scenario]


def test_every_scenario_is_a_test(outcomes: dict[str, str]) -> None:
    assert sorted(outcomes) == sorted(SCENARIOS)
