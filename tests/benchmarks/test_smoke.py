"""Each benchmark, quick: all of its cases are measured, and the result file has what it promises."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import names, run
from benchmarks.core.report import ROOT, Effort
from tests.hosts.network import missing

SHARED = {
    "save_load": 17,
    "incremental": 9,
    "prefix_query": 5,
    "query_scaling": 4,
    "growth": 6,
    "pages": 5,
    "codec": 7,
    "patches": 18,
    "persist": 22,
    "notify": 4,
    "consumers": 5,
    "checkpoint": 8,
    "schedule": 7,
    "collective": 6,
    "elastic": 2,
    "fork": 1,
    "metrics": 2,
}
"""Benchmarks that run on the shared Ray, and how many rows each has at least."""
OWN = {"start": 3, "staging": 5, "update_latency": 4, "calls": 8, "weak_scaling": 2, "engines": 7, "links": 6, "nas": 3}
"""Those with clusters of their own. `nas` has more rows if its searches reach the qualities that it compares."""


def test_each_benchmark_is_tested_here() -> None:
    assert names().keys() == SHARED.keys() | OWN.keys()


def check(found: dict[str, Any], name: str, rows: int) -> None:
    assert found["benchmark"] == name
    assert len(found["rows"]) >= rows
    assert {"machine", "commit", "versions"} <= found.keys()
    for row in found["rows"]:
        if name == "notify":  # a listener may have a version before this process sees it
            assert math.isfinite(row["ours_s"])
        else:
            assert row["ours_s"] > 0
            assert (row["peer_s"] or 1.0) > 0
        assert row["ours_times_s"]
        assert (row["limit_s"] or 1.0) > 0


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARED)
def test_a_benchmark_measures_all_of_its_cases(name: str, cluster: object, tmp_path: Path) -> None:
    report = run(name, Effort.QUICK)
    check(json.loads(report.write(tmp_path).read_text()), name, SHARED[name])


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OWN)
def test_a_benchmark_with_clusters_of_its_own_measures_all_of_its_cases(name: str, tmp_path: Path) -> None:
    if name == "links" and (lacking := missing()) is not None:
        pytest.skip(lacking)
    words = [name, "--quick", "--json", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tests.benchmarks.warm", "benchmarks", *words]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    check(json.loads((tmp_path / f"{name}.json").read_text()), name, OWN[name])
    assert json.loads(ran.stdout.splitlines()[-1])["benchmark"] == name
