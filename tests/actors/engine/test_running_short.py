"""A node that runs short of memory: the kernel ends what takes too much, and models stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.control_groups import ENTER, memory_group

LIMIT = 2 << 30
WAIT_S = 300.0

PROGRAM = """
import os
from pathlib import Path
import numpy as np
import ray
from tensorvine.actors import Repository
from tensorvine.clusters import LocalCluster

@ray.remote(num_cpus=1, max_retries=0)
def greedy():
    held = []
    while True:
        held.append(np.ones(32 << 20, np.uint8))

def marks(prefix):
    found = []
    for pid in mine():
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(prefix):
                found.append(Path(f"/proc/{pid}/oom_score_adj").read_text().strip())
        except OSError:  # it has ended
            continue
    return found

def say(*words):
    with open(os.environ["SAID"], "a") as said:  # Ray writes to the standard output, also within others' lines
        print(*words, file=said)

def mine():
    return Path(os.environ["PROCS"]).read_text().split()

with LocalCluster(cpus=1), Repository.start(shards=1) as repo:
    repo.save("m", {"w": np.arange(64 << 20, dtype=np.float32)})
    say("the kernel's marks:", *marks(b"ray::Shard"), *marks(b"ray::Planner"))
    pid = repo._session.connection(0).hello.pid
    say("the monitor:", os.environ["RAY_memory_monitor_refresh_ms"], "ms")
    try:
        ray.get(greedy.remote())
    except ray.exceptions.RayError as exc:
        say("the task:", type(exc).__name__)
    repo.save("n", {"w": np.ones(1 << 20)})
    say("the shard:", "the same" if repo._session.connection(0).hello.pid == pid else "another", repo.verify())
    loaded = repo.load("m")["w"]
    say("its models:", loaded[-1] == (64 << 20) - 1, len(repo.models()))
"""


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
def test_a_greedy_task_is_ended_and_the_shard_goes_on_with_its_models(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with memory_group(LIMIT) as procs:
        ran = subprocess.run(
            ["/bin/sh", "-c", ENTER, "sh", sys.executable, "-c", PROGRAM],
            env={**os.environ, "PROCS": str(procs), "SAID": str(said), "RAY_ADDRESS": "local"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert said.read_text().splitlines() == [
        "the kernel's marks: 0 0",
        "the monitor: 0 ms",
        "the task: WorkerCrashedError",
        "the shard: the same []",
        "its models: True 2",
    ]
