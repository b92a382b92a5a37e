"""Tensors of a repository on Ray as Dask's arrays: in threads, and in workers of Ray."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from ray.util.dask import ray_dask_get
from tensorvine.actors import Repository
from tensorvine.actors.tasks.arrays import load_arrays
from tensorvine.actors.tasks.saving import save_arrays

pytestmark = pytest.mark.ray
TENSOR = np.arange(60_000.0).reshape(600, 100)


@pytest.mark.parametrize("scheduler", ["threads", ray_dask_get], ids=["threads", "ray"])
def test_a_tensor_is_what_was_saved(repository: Repository, scheduler: object) -> None:
    with dask.config.set(scheduler=scheduler):
        save_arrays(repository, "m", {"w": da.from_array(TENSOR, (200, 70))})
        np.testing.assert_array_equal(repository.load("m")["w"], TENSOR)
        np.testing.assert_array_equal(load_arrays(repository, "m", chunks=(20, -1))["w"].compute(), TENSOR)
