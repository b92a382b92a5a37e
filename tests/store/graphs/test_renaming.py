"""Several stored tensors that go to one tensor of a model are the same, or are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from tensorvine.store.errors import TensorMismatchError
from tensorvine.store.graphs.renaming import by_own_names


def test_stored_tensors_that_are_the_same_go_to_one() -> None:
    value = np.float32([np.nan, -0.0])
    found = by_own_names([("a", "x", value), ("b", "y", np.ones(1)), ("a", "z", value.copy())])
    assert found["a"] is value
    assert list(found) == ["a", "b"]


@pytest.mark.parametrize("other", [np.float32([2]), np.float64([1]), np.float32([[1]])])
def test_others_are_refused(other: np.ndarray) -> None:
    with pytest.raises(TensorMismatchError, match=r"'x' and 'z': expected one value.*one tensor 'a' for both"):
        by_own_names([("a", "x", np.float32([1])), ("a", "z", other)])
