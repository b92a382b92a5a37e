"""A training that is forked: `examples/fork_training`, run to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray.util
from tensorvine.clusters import LocalCluster

from tests.support.example_runs import address, check

SAYS = (
    r"MB of state were there \d+\.\d s after the fork was ordered; the original was at step \d+ by then",
    r"learning rate × 4 +1 +\d\.\d{4} .* rate-up@1 +original@1",  # noqa: RUF001  the sign is meant
    r"Original and control: 150 losses of each rank and 25 tensors are the same, bit for bit",
)
"""As regular expressions."""


@pytest.mark.timeout(900)
@pytest.mark.workers_import("torch")
def test_it_runs_on_a_ray_of_others_draws_its_picture_and_leaves_nothing_there(
    cluster: LocalCluster, mark: str, tmp_path: Path
) -> None:
    check("fork_training", SAYS, mark, tmp_path, "--address", address())
    assert not [one for one in ray.util.list_named_actors(all_namespaces=True) if "fork_training" in one["name"]]
