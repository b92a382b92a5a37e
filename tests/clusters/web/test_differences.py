"""Differences of tensors, held against NumPy, and which layers and tensors are compared with which."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorvine.clusters.web import differences as module
from tensorvine.clusters.web.compare import matched
from tensorvine.clusters.web.differences import BINS, difference
from tensorvine.store import Layer, ModelGraph

NUMBERS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([float("nan"), float("inf"), -float("inf")])


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=NUMBERS)] * 2)))
def test_it_says_what_numpy_says(pair: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = pair
    found = difference(before, after)
    assert found.equal == (before.tobytes() == after.tobytes())
    if found.equal:
        return
    with np.errstate(all="ignore"):
        delta = after.astype(np.float64) - before.astype(np.float64)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    finite = delta[np.isfinite(delta)]
    assert found.norm == pytest.approx(np.linalg.norm(finite))
    assert found.largest == pytest.approx(np.abs(finite).max(initial=0))
    assert found.changed == int((~same).sum())
    assert found.not_finite == int((~np.isfinite(delta) & ~same).sum())
    assert len(found.histogram) == BINS
    assert sum(found.histogram) == int((finite != 0).sum())


@given(st.integers(1, 30))
def test_it_does_not_matter_in_which_chunks_tensors_are_compared(size: int) -> None:
    dice = np.random.default_rng(size)
    before, after = dice.standard_normal((2, 30))
    whole = difference(before, after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", size)
        cut = difference(before, after)
    assert cut.histogram == whole.histogram
    assert cut.norm == pytest.approx(whole.norm)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, np.complex64, ml_dtypes.bfloat16])
def test_tensors_of_any_dtype_are_compared(dtype: type) -> None:
    found = difference(np.array([0, 1, 1]).astype(dtype), np.array([0, 1, 0]).astype(dtype))
    assert (found.equal, found.norm, found.changed, found.largest) == (False, 1.0, 1, 1.0)


def test_other_shapes_have_no_norm_and_other_dtypes_have() -> None:
    assert difference(np.zeros(3), np.zeros((3, 1))).norm is None
    assert difference(np.zeros(3, np.float32), np.ones(3)).norm == pytest.approx(3**0.5)
    assert difference(np.zeros((), np.float32), np.zeros((), np.float32)).equal


def dense(name: str, units: int, above: str) -> Layer:
    return Layer(name, {"class": "Dense", "units": units}, (above,), (f"{name}/w", f"{name}/b"))


def graph(*layers: Layer) -> ModelGraph:
    return ModelGraph([Layer("in", {"class": "Input"}), *layers])


def test_layers_match_by_the_prefix_first_and_then_by_name() -> None:
    a = graph(dense("stem", 8, "in"), dense("head", 2, "stem"), dense("old", 1, "head"))
    b = graph(dense("first", 8, "in"), dense("head", 3, "first"), dense("fresh", 1, "head"))
    rows = matched(a, b, [*a.tensors, "loose"], [*b.tensors, "loose", "more"])
    shown = [(row.match, row.a and row.a.name, row.b and row.b.name) for row in rows]
    assert shown == [
        ("prefix", "in", "in"),
        ("prefix", "stem", "first"),
        ("name", "head", "head"),
        ("new", None, "fresh"),
        ("gone", "old", None),
        ("rest", None, None),
    ]
    assert rows[1].pairs == [("stem/w", "first/w"), ("stem/b", "first/b")]
    assert rows[-1].pairs == [("loose", "loose"), (None, "more")]


@given(st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(1, 3), max_size=6), st.sets(st.integers(0, 14)))
def test_each_tensor_is_in_one_row(a: list[int], b: list[int], lost: set[int]) -> None:
    graphs = [
        graph(*(dense(f"d{n}", units, f"d{n - 1}" if n else "in") for n, units in enumerate(sizes))) for sizes in (a, b)
    ]
    names = [[name for n, name in enumerate([*one.tensors, "loose"]) if n not in lost] for one in graphs]
    rows = matched(*graphs, *names)
    assert sorted(old for row in rows for old, _ in row.pairs if old) == sorted(names[0])
    assert sorted(new for row in rows for _, new in row.pairs if new) == sorted(names[1])
