"""The benchmark of many clients: what they do at once, and the row that comes of it."""

from __future__ import annotations

import doctest
from pathlib import Path

import ray
from tensorvine.actors import Repository

from benchmarks import savers
from benchmarks.savers import COPY, FILE_SAVE, ORDER, SAVE, Savers
from benchmarks.weak_scaling import row_of


def test_bandwidth_counts_from_the_first_beginning_to_the_last_end() -> None:
    found = doctest.testmod(savers)
    assert (found.attempted, found.failed) == (2, 0)


def test_clients_that_save_and_load_at_once_are_told_apart(repository: Repository, tmp_path: Path) -> None:
    clients = Savers(repository.name, [ray.get_runtime_context().get_node_id()], 2, (1 << 20, 8), tmp_path)
    found = clients.round()
    clients.close()
    assert list(found) == list(ORDER)
    assert all(len(step.spans) == 2 and step.seconds > 0 and 0 < step.fairness <= 1 for step in found.values())
    assert (repository.models(), list(tmp_path.iterdir())) == ([], [])
    steps = {name: [step] for name, step in found.items()}
    row = row_of("4 clients on 1 hosts: save", steps, SAVE, FILE_SAVE, 2 << 20)
    assert row.facts["share_of_memory"] == row.goals[0].value == found[COPY].seconds / found[SAVE].seconds
