"""Tensors of a repository on Ray as Dask's arrays: in threads, and in workers of Ray."""

from __future__ import annotations

import numpy as np
import pytest
from ray.util.dask import ray_dask_get
from tensorvine.actors import Repository
from tensorvine.actors.tasks.arrays import load_arrays

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("scheduler", ["threads", ray_dask_get], ids=["threads", "ray"])
def test_a_tensor_is_what_was_saved(repository: Repository, scheduler: object) -> None:
    tensor = np.arange(600.0).reshape(60, 10)
    repository.save("m", {"w": tensor})
    made = load_arrays(repository, "m", chunks=(20, -1))["w"]
    np.testing.assert_array_equal(made.compute(scheduler=scheduler), tensor)
