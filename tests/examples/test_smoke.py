"""Each example runs to its end on a Ray of others, says what it must, draws its picture, and leaves nothing behind."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import ray.util
from tensorvine.actors import Repository

from tests.support.dask_cluster import dask_processes
from tests.support.example_runs import ROOT, address, await_line, await_no_pins, check, interrupt, start
from tests.support.marked import names_of, outlive

FINETUNE = (
    r"longest_prefix\(the network\) = root@1: \d+ layers with 38 tensors match",
    r"longest_prefix\(polished\) = deeper@1: \d+ layers with 56 tensors match",
    r"With transfer [89]\d\.\d%; without transfer, .* [5-8]\d\.\d%",
    r"contributions\('polished'\) +root@1 \(\d+\), polished@1 \(\d+\)",
    r"common_ancestor\('polished', 'scratch'\) +None",
    r"Loaded again: all 4 live versions predict the same, bit for bit",
)
EXAMPLES = {
    "finetune": FINETUNE,
    "fork_training": (
        r"3\.6 MB of state after step 150, from memory to memory",
        r"learning rate x 4 +rate-up@1 +1 +0\.\d{4} +0\.\d{4}",
        r"Original and control: 150 losses of each rank are the same, bit for bit",
    ),
    "online_ptychography": (r"16 patterns every \d+ ms", r"147 answers with each schedule", r"epoch +[2-5] "),
    "population_training": (
        r"member-\d becomes a copy of member-\d and trains with rate \d",
        r"exploits +[1-9]\d* +[1-9]\d*",
        r"accuracy of the best member +[89]\d\.\d% +[89]\d\.\d%",
    ),
    "nas": (
        r"Search without transfer",
        r"Best live candidate nas-[0-9a-f]{8}/000000-",
        r"candidates +10 +10",
        r"failed +0 +0",
        r"in the repository, per candidate +0\.0 ms +\d+",
    ),
}
"""Example -> regular expressions of lines. The models of others are not touched."""
OPTIONS = {"nas": ("--candidates", "10", "--data", "wine", "--workers", "1")}
MODULES = {"population_training": "ray.tune", "nas": "deephyper"}


@pytest.mark.timeout(900)
@pytest.mark.workers_import("torch")
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_runs_in_a_repository_of_others(example: str, repository: Repository, mark: str, tmp_path: Path) -> None:
    theirs = repository.save("root", {"w": np.zeros(5)}).ref
    options = ("--address", address(), "--repository", repository.name, *OPTIONS.get(example, ()))
    check(example, EXAMPLES[example], mark, tmp_path, *options, modules=MODULES.get(example, "torch"))
    ours = [ref for ref in repository.models() if ref != theirs]
    assert ours
    assert all(re.match(rf"{example}-[0-9a-f]{{8}}/", ref.name) for ref in ours)
    assert repository.load(theirs)["w"].size == 5
    assert repository.verify() == []
    await_no_pins(repository)
    assert not [one for one in ray.util.list_named_actors(all_namespaces=True) if example in one["name"]]


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_finetune_runs_without_ray_on_a_running_dask(mark: str, tmp_path: Path) -> None:
    with dask_processes("a") as (processes, _):
        options = ("--engine", "dask", "--scheduler", processes.address)
        check("finetune", FINETUNE, mark, tmp_path, *options, without_ray=True)


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["Starting Ray", "longest_prefix(the network)"])
def test_ctrl_c_ends_an_example_promptly_and_cleanly(moment: str, mark: str, tmp_path: Path) -> None:
    process = start("finetune", mark, "--out", str(tmp_path))
    await_line(process, moment)
    if moment != "Starting Ray":
        assert {"raylet", "gcs_server"} <= names_of(mark)
    interrupt(process)
    assert outlive(mark) == []


@pytest.mark.parametrize("module", ["shared.place", "shared.show", "nas.space", "online_ptychography.scans"])
def test_examples_in_docstrings_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"examples.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/run.py")), ids=lambda path: path.parent.name)
def test_each_example_is_tested(path: Path) -> None:
    assert path.parent.name in {*EXAMPLES, "edge_consumer"}  # which test_edge_example.py runs
