"""A classifier that answers while it learns: `examples/online_cancer`, run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.example_runs import check

SAYS = (r"552/552 loss 0\.\d+  published @\d+", r"planned +\d+ ", r"230 answers each")
"""As regular expressions."""


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_it_runs_draws_its_picture_and_leaves_no_process(mark: str, tmp_path: Path) -> None:
    check("online_cancer", SAYS, mark, tmp_path, modules="keras")
