"""Metrics: the counts of one save of 1 KiB, timed without the save, and a scrape of a repository.

Rules
- The counts of a save are those of its client and of its shard, with the readings of the clock that they need.
- A scrape asks the planner and two shards, and writes the text that Prometheus reads. Its floor is one answer of a
  shard.
"""

from __future__ import annotations

import time

import numpy as np
from tensorvine.actors.client.save.request import Saved
from tensorvine.actors.client.save.saves import count_save
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.clusters.metrics import collect
from tensorvine.store.counting import Counts
from tensorvine.store.metrics import SHARD_COMMIT
from tensorvine.store.refs import ModelRef

from .core.clusters import repository
from .core.measure import alternate, sample, timed
from .core.report import Goal, Report

SAVED = Saved(ModelRef("m", 1), 1024, 0)
MOST_S = 10e-6


def run(report: Report) -> None:
    """Time the counts, then scrapes."""
    counts_of_a_save(report)
    scrapes(report)


def counts_of_a_save(report: Report) -> None:
    """Time the counts of a save."""
    client, shard = Counts(), Counts()

    def count() -> None:
        begun = time.perf_counter()
        count_save(client, SAVED, time.perf_counter() - begun)
        begun = time.perf_counter()
        shard.observe(SHARD_COMMIT, time.perf_counter() - begun)

    def read_clock() -> None:
        for _ in range(4):
            time.perf_counter()

    rounds = report.pick(quick=20, normal=2000)
    found, floor = ([timed(work)[0] for _ in range(rounds)] for work in (count, read_clock))
    ours = sample(found)
    goals = [Goal("microseconds", ours.median * 1e6, at_most=MOST_S * 1e6)]
    report.add("counts of a save", ours, 1024, floor=("four readings of the clock", sample(floor)), goals=goals)


def scrapes(report: Report) -> None:
    """Time scrapes of a repository with two shards."""
    with repository(shards=2, preallocate_bytes=0) as repo:
        repo.save("m", {"t": np.ones(128)})
        session = repo._session
        actions = {"scrape": lambda: collect(repo), "floor": lambda: session.call(0, ShardCalls.stats())}
        found = alternate(actions, rounds=report.pick(quick=2, normal=100))
        report.add("scrape", found["scrape"], floor=("one answer of a shard", found["floor"]))
