"""Fine-tuning: `examples/finetune` runs to its end or to Ctrl-C, says what it must, and leaves no process behind."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository

from tests.support.dask_cluster import dask_processes
from tests.support.example_runs import address, await_line, await_no_pins, check, interrupt, start
from tests.support.marked import names_of, outlive

SAYS = (
    r"longest_prefix\(candidate\) = root@1 .*: 10 layers with 20 tensors match",
    r"longest_prefix\(deeper\) = extra@1 .*: 11 layers with 22 tensors match",
    r"stored in the repository",
    r"deeper@1 +root@1 \(20\), extra@1 \(2\), deeper@1 \(4\)",
    r"common_ancestor\('deeper', 'scratch'\) +None",
    r"root@1 is retired; \S+ still has [1-9]\d* tensors of it",
    r"Loaded again: all \d+ versions that are left predict the same, bit for bit",
)
"""As regular expressions."""
CANDIDATES = {"head", "extra", "features", "deeper", "scratch"}
"""Models of `--quick` but the root; the two worst retire."""


@pytest.mark.timeout(900)
def test_it_runs_in_a_repository_of_others_and_leaves_its_models_there(
    repository: Repository, mark: str, tmp_path: Path
) -> None:
    theirs = repository.save("root", {"w": np.zeros(5)}).ref
    check("finetune", SAYS, mark, tmp_path, "--address", address(), "--repository", repository.name)
    ours = repository.models("finetune-")
    left = {re.sub(r"^finetune-[0-9a-f]{8}/", "", ref.name) for ref in ours}
    assert left < CANDIDATES
    assert len(left) == len(CANDIDATES) - 2
    assert repository.models() == [*ours, theirs]
    assert repository.verify() == []
    await_no_pins(repository)


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_without_ray_on_a_dask_that_runs(mark: str, tmp_path: Path) -> None:
    with dask_processes("a") as (processes, _):
        options = ("--engine", "dask", "--scheduler", processes.address)
        check("finetune", SAYS, mark, tmp_path, *options, without_ray=True)


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("moment", "group"),
    [
        pytest.param("Starting Ray", True, id="while Ray starts"),
        pytest.param("Digits 0 to 4", False, id="in training, only to Python"),
        pytest.param("longest_prefix(candidate)", True, id="while an ancestor is pinned"),
    ],
)
def test_ctrl_c_ends_it_promptly_and_cleanly(moment: str, group: bool, mark: str, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole process group; `kill -INT` sends it to one process."""
    process = start("finetune", mark, "--out", str(tmp_path))
    await_line(process, moment)
    if moment != "Starting Ray":
        assert {"raylet", "gcs_server"} <= names_of(mark)
    interrupt(process, group=group)
    assert outlive(mark) == []


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
def test_ctrl_c_ends_it_on_dask_as_cleanly(mark: str, tmp_path: Path) -> None:
    process = start("finetune", mark, "--engine", "dask", "--out", str(tmp_path), without_ray=True)
    await_line(process, "longest_prefix(candidate)")
    interrupt(process)
    assert outlive(mark) == []
