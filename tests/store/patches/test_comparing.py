"""The difference between two tensors, held against NumPy's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.arrays import dtype_of
from tensorvine.store.errors import TensorMismatchError
from tensorvine.store.patches import comparing
from tensorvine.store.patches.comparing import TensorDiff, difference

DTYPES = ["bool", "int8", "uint64", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 40),
    bins=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_any_pair_of_tensors(data: st.DataObject, dtype: str, count: int, bins: int) -> None:
    kind = dtype_of(dtype)
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    new, old = (np.array(data.draw(numbers)).astype(kind) for _ in range(2))
    found = difference(new, old, bins)
    wide = np.complex128 if kind.kind == "c" else np.float64
    apart = new.astype(wide) - old.astype(wide)
    changed = apart[apart != 0]
    assert found.share == (len(changed) / count if count else 0.0)
    assert found.norm == pytest.approx(np.linalg.norm(apart))
    assert (len(found.counts), len(found.edges)) == (bins, bins + 1)
    assert sum(found.counts) == len(changed)
    if len(changed):
        finite = np.abs(changed) if kind.kind == "c" else changed
        assert found.counts == tuple(np.histogram(finite, bins)[0])


def test_blocks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    old = rng.normal(size=(30, 37))
    new = np.where(rng.random(old.shape) < 0.3, rng.normal(size=old.shape), old)
    whole = difference(new, old, 16)
    monkeypatch.setattr(comparing, "BLOCK_ELEMENTS", 100)
    parts = difference(new, old, 16)
    assert (parts.share, parts.counts, parts.edges) == (whole.share, whole.counts, whole.edges)
    assert parts.norm == pytest.approx(whole.norm)


def test_bits_differ_and_not_values() -> None:
    nan = np.array([np.nan, 1.0])
    assert difference(nan, nan.copy(), 4) == TensorDiff(0.0, 0.0, (0, 0, 0, 0), (-0.5, -0.25, 0.0, 0.25, 0.5))
    assert difference(np.array([-0.0]), np.array([0.0])) == TensorDiff(1.0, 0.0)


def test_differences_that_are_not_finite_are_in_no_bin() -> None:
    found = difference(np.array([np.inf, np.nan, 2.0]), np.array([0.0, 0.0, 1.0]), 3)
    assert math.isnan(found.norm)
    assert (found.share, sum(found.counts)) == (1.0, 1)
    most = np.finfo(np.float64).max
    assert sum(difference(np.array([most, -most]), np.array([0.0, 0.0]), 3).counts) == 2


def test_another_dtype_or_shape_is_refused() -> None:
    for other in (np.zeros(3, np.int32), np.zeros((3, 1), np.float32)):
        with pytest.raises(TensorMismatchError):
            difference(np.zeros(3, np.float32), other)
