"""Deltas are small where few values changed, never larger than the dense tensor, and exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store import Codec, Delta, Gzip, Shuffle, Zstd
from tensorvine.store.arrays import Array, as_bytes, dtype_of
from tensorvine.store.codecs import delta
from tensorvine.store.codecs.blocks import BLOCK_ITEMS
from tensorvine.store.codecs.codec import Chain, decode, from_spec
from tensorvine.store.errors import CodecError, CorruptDataError

TAILS = [Chain(), Zstd(), Shuffle() | Zstd(), Shuffle() | Gzip(1)]
DTYPES = ["uint8", "int16", "bfloat16", "float16", "float32", "float64", "complex128"]
RNG = np.random.default_rng(13)


def noise(count: int, dtype: str) -> Array:
    """Tensor of bytes that no compressor makes smaller."""
    return RNG.integers(0, 256, count * dtype_of(dtype).itemsize, np.uint8).view(dtype_of(dtype))


def changed(tensor: Array, places: np.ndarray) -> Array:
    """Copy a tensor with other bits at some places."""
    found = tensor.copy()
    size = tensor.dtype.itemsize
    as_bytes(found).reshape(-1, size)[places] ^= RNG.integers(1, 256, (len(places), size), np.uint8)
    return found


def lengths(codec: Codec, tensor: Array, base: Array) -> tuple[int, int]:
    """Encode with and without the base, and check that both come back."""
    encoded, dense = codec.encode(tensor, base), codec.encode(tensor)
    assert decode(encoded, base).tobytes() == tensor.tobytes()
    assert decode(dense).tobytes() == tensor.tobytes()
    assert not dense.codec.startswith("delta")
    assert encoded.error == 0.0
    return encoded.nbytes, dense.nbytes


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("tail", TAILS, ids=lambda codec: codec.spec)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["anywhere", "together", "evenly"])
def test_few_changes_take_at_most_30_percent(dtype: str, tail: Codec, share: float, where: str) -> None:
    base = noise(50_000, dtype)
    count = int(share * len(base))
    places = {
        "anywhere": RNG.choice(len(base), count, replace=False),
        "together": 20_000 + np.arange(count),
        "evenly": np.arange(count) * (len(base) // count),
    }[where]
    mine, dense = lengths(Delta() | tail, changed(base, places), base)
    assert mine <= 0.3 * dense


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("tail", TAILS, ids=lambda codec: codec.spec)
@pytest.mark.parametrize("kind", ["noise", "zeros", "weights"])
def test_any_changes_take_no_more_than_the_dense_tensor(kind: str, tail: Codec, share: float) -> None:
    count = 30_000
    made = {"noise": noise(count, "float32"), "zeros": np.zeros(count, "f4"), "weights": RNG.normal(size=count)}
    base = made[kind].astype(np.float32)
    mine, dense = lengths(Delta() | tail, changed(base, RNG.choice(count, int(share * count), replace=False)), base)
    assert mine <= dense


@given(data=st.data(), dtype=st.sampled_from(DTYPES), tail=st.sampled_from(TAILS))
@settings(max_examples=150, deadline=None)
def test_any_pair_of_tensors_takes_no_more_than_the_dense_one(data: st.DataObject, dtype: str, tail: Codec) -> None:
    size = dtype_of(dtype).itemsize * data.draw(st.integers(0, 200))
    pair = [np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8) for _ in range(2)]
    tensor, base = (each.view(dtype_of(dtype)) for each in pair)
    mine, dense = lengths(Delta() | tail, tensor, base)
    assert mine <= dense


@pytest.mark.parametrize("kind", ["few", "slight", "other", "half zeros"])
def test_long_tensors_are_judged_by_a_sample_and_still_never_larger(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SAMPLED_BYTES", 0)
    base = RNG.normal(size=9 * BLOCK_ITEMS).astype(np.float32)
    if kind == "half zeros":
        base[: len(base) // 2] = 0
    tensor = {
        "few": changed(base, np.arange(0, len(base), 50)),
        "slight": base * np.float32(1.0001),
        "other": base[::-1].copy(),
        "half zeros": changed(base, np.arange(0, len(base), 2)),
    }[kind]
    for tail in TAILS[:3]:
        mine, dense = lengths(Delta() | tail, tensor, base)
        assert mine <= 1.01 * dense
        if kind == "few":
            assert mine <= 0.1 * dense


def test_a_slight_change_of_every_weight_is_stored_as_what_differs() -> None:
    base = RNG.normal(size=200_000).astype(np.float32)
    tensor = base * np.float32(1 + 1e-5)
    encoded = (Delta() | Shuffle() | Zstd()).encode(tensor, base)
    assert encoded.codec == "delta|shuffle|zstd(3)"
    assert encoded.nbytes < 0.6 * (Shuffle() | Zstd()).encode(tensor).nbytes
    assert decode(encoded, base).tobytes() == tensor.tobytes()


def test_equal_tensors_take_a_few_bytes() -> None:
    for dtype in DTYPES:
        tensor = noise(10_000, dtype)
        for tail in TAILS:
            assert lengths(Delta() | tail, tensor, tensor)[0] <= 9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bits_count_and_not_values(dtype: str) -> None:
    kind = dtype_of(dtype)
    base = np.zeros(1000, kind)
    tensor = base.copy()
    tensor[:3] = np.array([-0.0, np.nan, -np.nan]).astype(kind)
    encoded = Delta().encode(tensor, base)
    assert encoded.codec == "delta"
    assert decode(encoded, base).tobytes() == tensor.tobytes()
    assert Delta().encode(tensor, tensor).nbytes == 9, "NaN equals itself"


@pytest.mark.parametrize("count", [1, 7, 8, 9, 255, 256, 257, 70_000])
def test_gaps_and_masks_of_every_length_come_back(count: int) -> None:
    base = noise(count, "uint16")
    for places in ([0], [count - 1], [0, count - 1], range(count), range(0, count, 3), range(0, count, 300)):
        tensor = changed(base, np.unique(places))
        data = delta.sparse(tensor, base, limit=10 * count + 100)
        assert data is not None
        out = base.copy()
        delta._apply(data, out, Delta().encode(tensor, base))
        np.testing.assert_array_equal(out, tensor)


def test_the_layout_of_strides_does_not_matter() -> None:
    base = RNG.normal(size=(50, 40)).astype(np.float32)
    tensor = base.copy()
    tensor[::7, 3] += 1
    expected = Delta().encode(tensor, base)
    for mine, other in ((np.asfortranarray(tensor), base), (tensor, np.asfortranarray(base)), (tensor.tolist(), base)):
        array = np.asarray(mine, np.float32) if isinstance(mine, list) else mine
        assert Delta().encode(array, other).data.tobytes() == expected.data.tobytes()
    assert decode(expected, np.asfortranarray(base)).tobytes() == tensor.tobytes()


@pytest.mark.parametrize("base", [np.zeros(9, "f4"), np.zeros((10, 1), "f4"), np.zeros(10, "f8"), np.zeros(10, "i4")])
def test_a_base_of_another_shape_or_dtype_is_refused(base: Array) -> None:
    tensor = np.ones(10, np.float32)
    with pytest.raises(CodecError, match=r"expected float32 of shape \(10,\)"):
        (Delta() | Zstd()).encode(tensor, base)
    with pytest.raises(CodecError, match=r"expected float32 of shape \(10,\)"):
        decode(Delta().encode(tensor, tensor), base)


def test_a_delta_without_its_base_is_refused() -> None:
    tensor = np.ones(100, np.float32)
    with pytest.raises(CodecError, match="as base; found none"):
        Delta().decode(Delta().encode(tensor, tensor))


def test_a_base_is_ignored_where_nothing_needs_it() -> None:
    tensor = np.ones(100, np.float32)
    encoded = from_spec("zstd(3)").encode(tensor, np.zeros(3))
    assert encoded.codec == "zstd(3)"
    np.testing.assert_array_equal(decode(encoded, np.zeros(3)), tensor)


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        ([0] * 8, "found 8"),
        ([0, 0, 0, 0, 0, 0, 0, 0, 3], "gaps of 3 bytes"),
        ([255, 255, 255, 255, 255, 255, 255, 255, 1], "changes"),
        ([1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 1], "expected 14 bytes"),
        ([9, 9, 9, 9, 200, 1, 0, 0, 0, 0, 0, 0, 0, 1], "rising places"),
        ([9, 9, 9, 9, *[255] * 8, 1, 0, 0, 0, 0, 0, 0, 0, 8], "rising places"),
        ([9] * 8 + [0, 255] + [2, 0, 0, 0, 0, 0, 0, 0, 1], "rising places"),
    ],
)
def test_a_sparse_delta_that_leads_out_of_bounds_is_corrupt(payload: list[int], found: str) -> None:
    base = np.arange(100, dtype=np.float32)
    encoded = Delta().encode(changed(base, np.array([3])), base)
    assert encoded.codec == "delta"
    broken = type(encoded)("delta", "float32", (100,), np.array(payload, np.uint8))
    with pytest.raises(CorruptDataError, match=found):
        decode(broken, base)


def test_a_mask_with_too_many_or_too_few_bits_is_corrupt() -> None:
    base = np.zeros(64, np.uint8)
    tensor = changed(base, np.arange(40))
    encoded = Delta().encode(tensor, base)
    assert encoded.data[-1] == 0, "a mask"
    for place in range(40, 48):
        broken = encoded.data.copy()
        broken[place] ^= 1
        with pytest.raises(CorruptDataError, match="40 rising places"):
            decode(type(encoded)("delta", "uint8", (64,), broken), base)
