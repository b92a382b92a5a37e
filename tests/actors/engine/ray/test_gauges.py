"""Gauges of shards in Ray's own metrics, which its dashboard shows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tensorvine.store.metrics import METRICS, SHOWN, Source

PROGRAM = """
import sys, time, urllib.request
import ray
from tensorvine.actors import Repository
with Repository.start("gauges", shards=1, preallocate_bytes=0):
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ends = time.monotonic() + 150
    while time.monotonic() < ends:
        try:
            text = urllib.request.urlopen(url, timeout=10).read().decode()
        except OSError:  # the process that has the metrics is starting
            text = ""
        names = {line.partition("{")[0] for line in text.splitlines() if line.startswith("ray_tensorvine_")}
        if names:
            break
        time.sleep(1)
    print(*sorted(names))
"""


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
def test_ray_exports_the_gauges_of_a_shard() -> None:
    metrics = {"RAY_enable_metrics_collection": "1", "RAY_metrics_report_interval_ms": "1000", "RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=os.environ | metrics, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = set(ran.stdout.split())
    assert found == {
        f"ray_{metric.name}" for metric in METRICS if metric.source is Source.SHARD and metric.field in SHOWN
    }
