"""A search on nodes that come and go, as a program: `test_autoscaler` runs it and reads the JSON that it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from tensorvine.actors import Repository
from tensorvine.actors.engine.ray.engine import RayEngine

from examples.nas.controller import Controller
from examples.nas.crew import Crew
from examples.nas.elastic import ElasticCluster
from examples.nas.evolution import Evolution
from examples.nas.journal import Journal, Told
from examples.nas.plan import Plan
from examples.nas.store import Access, Keeper
from tests.support.waiting import eventually

PLAN = Plan(data="wine", candidates=24, population=6, sample=3)
NODES = 2
KILL_AFTER = 8
"""Candidates that are told before the nodes are killed."""
PATIENCE_S = 150.0
"""For nodes that the autoscaler starts and ends, which it does in its own time."""


class Run:
    """The search, and what was seen of its nodes."""

    def __init__(self, cluster: ElasticCluster, journal: Path) -> None:
        self._cluster, self._journal = cluster, journal
        self._nodes: list[int] = []
        self._before: set[str] = set()
        """Who had told something when the nodes were killed."""
        self._killed = 0

    def run(self) -> dict[str, object]:
        """Search, and wait until the pins and the nodes are gone again."""
        before = len(self._cluster.workers())
        with Repository.start("elastic", shards=1, preallocate_bytes=0) as repository:
            trainer = PLAN.trainer()
            access = Access(repository="elastic")
            search = Evolution(trainer.space, PLAN.population, PLAN.sample, PLAN.seed)
            keeper = Keeper(repository, PLAN.name, PLAN.population)
            with (
                Journal(self._journal, PLAN) as journal,
                Crew(RayEngine(), trainer, access, NODES, cpus=1.0) as crew,
            ):
                told = Controller(PLAN, search, keeper, journal, self._watch).run(crew)
            said = {
                "before": before,
                "most": max(self._nodes),
                "killed": self._killed,
                "deaths": crew.deaths,
                "others": told[-1].outcome.worker not in self._before,
                "good": sum(one.outcome.quality is not None for one in told),
                "models": len(repository.models()),
                "problems": [str(problem) for problem in repository.verify()],
            }
            eventually(
                lambda: not sum(shard.pins for shard in repository.stats().shards),
                "no pin is left",
                timeout=PATIENCE_S,
                pause=0.2,
            )
            eventually(lambda: not self._cluster.workers(), "no node is left", timeout=PATIENCE_S, pause=0.2)
            return said

    def _watch(self, told: Told) -> None:
        """Kill all nodes at once: the search can only go on with those that the autoscaler makes in their place.

        The search stands still until all nodes are there, and until their workers are gone: it is short, and could end
        before a death is noticed.
        """
        if not self._killed:
            self._before.add(told.outcome.worker)
        if not self._killed and len(self._nodes) == KILL_AFTER:
            eventually(
                lambda: len(self._cluster.workers()) == NODES, "all nodes are there", timeout=PATIENCE_S, pause=0.2
            )
        nodes = self._cluster.workers()
        self._nodes.append(len(nodes))
        if not self._killed and len(self._nodes) > KILL_AFTER:
            self._kill(nodes)

    def _kill(self, nodes: Sequence[str]) -> None:
        self._killed = len(nodes)
        workers = [process for process in self._cluster.processes() if title(process).startswith("ray::Worker")]
        for node in nodes:
            self._cluster.kill(node)
        psutil.wait_procs(workers, PATIENCE_S)


def title(process: psutil.Process) -> str:
    """Return what a process calls itself; nothing where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    with ElasticCluster(NODES) as cluster:
        said = Run(cluster, Path(sys.argv[1])).run()
    sys.stdout.write(json.dumps(said) + "\n")
