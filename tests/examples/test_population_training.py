"""Population-based training: `examples/population_training`, run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.example_runs import check

SAYS = (
    r"\d\.\d s: \d becomes a copy of \d at step \d+, with learning rate 0\.\d+, after",
    r"exploits +[1-9]\d* +[1-9]\d*",
    r"accuracy of the best member at its end +9\d\.\d% +9\d\.\d%",
)
"""As regular expressions."""


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    check("population_training", SAYS, mark, tmp_path)
