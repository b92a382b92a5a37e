"""Fine-tuning: `examples/finetune` runs to its end or to Ctrl-C, says what it must, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.example_runs import await_line, check, interrupt, start
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


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    check("finetune", SAYS, mark, tmp_path)


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
