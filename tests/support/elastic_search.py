"""A search on nodes that come and go, as a program: `test_nas` runs it and reads the JSON that it prints."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tensorvine.actors import Repository
from torch import nn

from examples.nas.search import Evaluation, Line, Plan, Results, evolution_of, read, retirement_of, with_deephyper
from examples.shared.elastic import ElasticCluster
from tests.support.waiting import eventually

CANDIDATES, POPULATION, NODES = 24, 6, 2
KILL_AFTER = 8
"""Candidates before those whose nodes are killed while they train."""
PATIENCE_S = 150.0
"""For nodes that the autoscaler starts and ends, which it does in its own time."""


class Standing(Evaluation):
    """Stands still in one training for each node, which needs its slot and pins its ancestor, until it is killed."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan)
        self._folder, self._number = folder, -1

    def build(self, job: Any) -> nn.Module:
        self._number = int(job.id.rpartition(".")[2])
        return super().build(job)

    def train(self, model: nn.Module) -> float:
        if KILL_AFTER <= self._number < KILL_AFTER + NODES:
            (self._folder / f"stands-{self._number}").touch()
            threading.Event().wait(2 * PATIENCE_S)
        return super().train(model)


def kill(cluster: ElasticCluster, folder: Path) -> int:
    """Kill all nodes as soon as a training stands still on each of them. Gives the number of nodes."""
    standing = lambda: len(list(folder.glob("stands-*"))) == NODES  # noqa: E731
    eventually(standing, "a training stands still on each node", timeout=2 * PATIENCE_S, pause=0.2)
    nodes = cluster.workers()
    for node in nodes:
        cluster.kill(node)
    return len(nodes)


def run(cluster: ElasticCluster, folder: Path) -> dict[str, object]:
    """Search, kill all nodes once, and wait until the pins and the nodes are gone again."""
    seen: dict[str, Any] = {"before": len(cluster.workers()), "most": 0}

    def watch(lines: Sequence[Line]) -> None:
        seen["most"] = max(seen["most"], len(cluster.workers()))

    plan, lines = read(folder / "results.jsonl", Plan("wine", POPULATION, 3))
    with Repository.start("elastic", shards=1, preallocate_bytes=0) as repo:
        callbacks = [
            retirement_of(repo, plan, lines, "nas/"),
            Results(folder / "results.jsonl", lines, repo, watch),
        ]
        run = Standing(plan, folder).run(repo.name, "nas/")
        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(kill, cluster, folder)
            with_deephyper(evolution_of(plan, lines, folder), run, callbacks, CANDIDATES, NODES)
        seen |= {
            "killed": killed.result(),
            "most": max(seen["most"], killed.result()),
            "candidates": len(lines),
            "failed": sum(line["quality"] is None for line in lines),
            "models": len(repo.models()),
            "problems": [str(problem) for problem in repo.verify()],
        }
        eventually(
            lambda: not repo.stats().catalog.pins,
            "no pin is left",
            timeout=PATIENCE_S,
            pause=0.2,
        )
        eventually(lambda: not cluster.workers(), "no node is left", timeout=PATIENCE_S, pause=0.2)
    return seen


if __name__ == "__main__":
    with ElasticCluster(NODES) as cluster:
        said = run(cluster, Path(sys.argv[1]))
    sys.stdout.write(json.dumps(said) + "\n")
