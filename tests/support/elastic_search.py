"""A search on nodes that come and go, as a program: `test_nas` runs it and reads the JSON that it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorvine.actors import Repository

from examples.nas.search import Evaluation, Line, Plan, Results, evolution_of, read, retirement_of, with_deephyper
from examples.shared.elastic import ElasticCluster
from tests.support.waiting import eventually

CANDIDATES, POPULATION, NODES = 24, 6, 2
KILL_AFTER = 8
"""Candidates before the nodes are killed."""
PATIENCE_S = 150.0
"""For nodes that the autoscaler starts and ends, which it does in its own time."""


def run(cluster: ElasticCluster, folder: Path) -> dict[str, object]:
    """Search, kill all nodes once, and wait until the pins and the nodes are gone again."""
    seen: dict[str, Any] = {"before": len(cluster.workers()), "most": 0, "killed": 0}

    def watch(lines: Sequence[Line]) -> None:
        if len(lines) == KILL_AFTER:
            eventually(lambda: len(cluster.workers()) == NODES, "all nodes are there", timeout=PATIENCE_S, pause=0.2)
        nodes = cluster.workers()
        seen["most"] = max(seen["most"], len(nodes))
        if len(lines) == KILL_AFTER:
            seen["killed"] = len(nodes)
            for node in nodes:
                cluster.kill(node)

    plan, lines = read(folder / "results.jsonl", Plan("wine", POPULATION, 3))
    with Repository.start("elastic", shards=1, preallocate_bytes=0) as repo:
        callbacks = [
            retirement_of(repo, plan, lines, "nas/"),
            Results(folder / "results.jsonl", lines, repo, watch),
        ]
        run = Evaluation(plan).run(repo.name, "nas/")
        with_deephyper(evolution_of(plan, lines, folder), run, callbacks, CANDIDATES, NODES)
        seen |= {
            "candidates": len(lines),
            "failed": sum(line["quality"] is None for line in lines),
            "models": len(repo.models()),
            "problems": [str(problem) for problem in repo.verify()],
        }
        eventually(
            lambda: not sum(shard.pins for shard in repo.stats().shards),
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
