"""The architecture search: `examples/nas`, run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.example_runs import check

SAYS = (
    r"1\.5e\+19 candidates in 18 decisions; 14 are evaluated",
    r"The best candidates, repository",
    r"\d+ of \d+ +\d+ \d\d\.\d% > \d+ \d\d\.\d%",
    r"candidates \(of these, failed\) +14 \(0\) +14 \(0\) +14 \(0\)",
    r"share of time for storing +- +\d+\.\d+% +\d+\.\d+%",
)
"""As regular expressions."""


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    check("nas", SAYS, mark, tmp_path, "--candidates", "14", modules="torch")
