"""Quantising follows equations 1 and 2 of Check-QZP, keeps its bound on the error, and says what the error was."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorvine.store import Gzip, Quantize, Shuffle, Zstd
from tensorvine.store.arrays import Array, dtype_of
from tensorvine.store.codecs import codes, kernels, quantize
from tensorvine.store.codecs.bits import pack_bits, packed_bytes, unpack_bits
from tensorvine.store.codecs.codec import decode
from tensorvine.store.codecs.groups import TILE
from tensorvine.store.codecs.kernels import FAST_GROUP, SLICE

FLOATS = ("float16", "bfloat16", "float32", "float64")
BITS = (2, 3, 4, 5, 6, 7, 8, 16)
PER = ("tensor", "channel", 1, 5, 64)
RNG = np.random.default_rng(11)


def weights(*shape: int, dtype: str = "float32") -> Array:
    return RNG.laplace(scale=0.05, size=shape).astype(dtype_of(dtype))


def groups_of(array: Array, per: str | int) -> list[np.ndarray]:
    """Cut a tensor into its groups, as float64, in another way than the codec does."""
    wide = array.astype(np.float64)
    if per == "channel" and array.ndim > 1:
        return [wide[..., channel].ravel() for channel in range(array.shape[-1])]
    if isinstance(per, int):
        return np.split(wide.ravel(), range(per, array.size, per))
    return [wide.ravel()]


def check_bound(array: Array, codec: Quantize, found: Array) -> None:
    """Each error is at most half a step, and what rounding to the dtype adds."""
    dtype = array.dtype
    eps, tiny = {
        "float16": (2.0**-10, 2.0**-24),
        "bfloat16": (2.0**-7, 2.0**-133),
        "float32": (2.0**-23, 2.0**-149),
        "float64": (2.0**-52, 2.0**-1074),
    }[dtype.name]
    for values, decoded in zip(groups_of(array, codec.per), groups_of(found, codec.per), strict=True):
        levels = 2**codec.bits - 1
        step = values.max() / levels - values.min() / levels
        unit = max(np.abs(values).max() * eps, tiny)
        rounding = unit * (2.5 if dtype == np.float64 else 0.5)
        # The stored scale is rounded up in float32, by a unit in its last place at most.
        assert np.abs(values - decoded).max() <= step / 2 * (1 + 2.0**-22) + 2.0**-149 + rounding


@st.composite
def floats(draw: st.DrawFn) -> Array:
    """Finite tensors of the dtypes that are quantised, of small to huge numbers."""
    name = draw(st.sampled_from(FLOATS))
    width = {"float64": 64, "float16": 16}.get(name, 32)
    limit = draw(st.sampled_from([1.0, 1e-4, 6e4, *([] if width == 16 else [1e-38, 1e38])]))
    element = st.floats(allow_nan=False, allow_infinity=False, width=width).map(lambda x: max(-limit, min(limit, x)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=12))
    array = draw(hnp.arrays(np.float64, shape, elements=element)).astype(dtype_of(name))
    assume(np.isfinite(array.astype(np.float64)).all())
    return draw(st.sampled_from([array, np.asfortranarray(array), array.T]))


# ---- the bound and the error ----------------------------------------------------------------------------


@given(array=floats(), bits=st.sampled_from(BITS), per=st.sampled_from(PER))
@settings(max_examples=120, deadline=None)
def test_the_error_is_within_half_a_step_and_is_told(array: Array, bits: int, per: str | int) -> None:
    encoded = Quantize(bits, per).encode(array)
    found = decode(encoded)
    real = np.abs(array.astype(np.float64) - found.astype(np.float64)).max()
    assert encoded.error == real
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    check_bound(array, Quantize(bits, per), found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per", ["tensor", "channel", 64, 1000, FAST_GROUP])
@pytest.mark.parametrize("bits", [3, 8])
def test_large_tensors_keep_the_bound_too(dtype: str, per: str | int, bits: int) -> None:
    for array in (weights(2 * TILE + 77, dtype=dtype), weights(331, 3, 67, dtype=dtype)):
        encoded = (Quantize(bits, per) | Zstd()).encode(array)
        found = decode(encoded)
        assert encoded.codec.startswith("quantize")
        assert encoded.error == np.abs(array.astype(np.float64) - found.astype(np.float64)).max()
        check_bound(array, Quantize(bits, per), found)


def test_codes_are_those_of_the_equations() -> None:
    array = weights(70_000)
    payload = Quantize().encode(array).data
    low = np.float64(array.min())
    scale = (np.float64(array.max()) - low) / 255
    expected = np.rint((array.astype(np.float64) - low) / scale)
    # The stored scale is a float32 that is not below: only values next to the middle may fall to the other side.
    middle = np.abs((array.astype(np.float64) - low) / scale % 1 - 0.5) < 1e-4
    codes_found = payload[: array.size]
    np.testing.assert_array_equal(codes_found[~middle], expected[~middle])
    assert np.abs(codes_found - expected).max() <= 1
    np.testing.assert_allclose(payload[-9:-1].view(np.float32), [low, scale], rtol=1e-7)


def test_minimum_and_maximum_come_back() -> None:
    array = weights(10_000)
    found = decode(Quantize().encode(array))
    assert found.min() == array.min()
    np.testing.assert_allclose(found.max(), array.max(), rtol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_sizes_are_those_of_packed_codes(bits: int) -> None:
    array = weights(1003, 7)
    for per, groups in (("tensor", 1), ("channel", 7), (64, 110)):
        assert Quantize(bits, per).encode(array).nbytes == -(-7021 * bits // 8) + 8 * groups + 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e-5])
def test_constant_tensors_are_exact(dtype: str, value: float) -> None:
    for shape in ((), (1,), (300, 5)):
        array = np.full(shape, value).astype(dtype_of(dtype))
        for codec in (Quantize(2, "channel"), Quantize(), Quantize() | Zstd()):
            encoded = codec.encode(array)
            np.testing.assert_array_equal(decode(encoded), array)
            assert encoded.error == 0.0


def test_denormal_ranges_keep_the_bound() -> None:
    array = (np.arange(1000) * 1e-45).astype(np.float32)
    encoded = Quantize().encode(array)
    assert encoded.codec == "quantize(8,tensor)"
    check_bound(array, Quantize(), decode(encoded))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_widest_range_decodes_to_finite_values(dtype: str) -> None:
    top = np.finfo(dtype).max
    array = np.array([-top, top, 0, top / 3, 1], dtype)
    for bits in BITS:
        encoded = Quantize(bits).encode(array)
        found = decode(encoded)
        assert np.isfinite(found).all()
        assert np.isfinite(encoded.error)
        check_bound(array, Quantize(bits), found)


def test_a_narrow_range_far_from_zero_keeps_the_bound() -> None:
    for dtype in FLOATS:
        array = (1000 + np.arange(500) / 500).astype(dtype_of(dtype))
        check_bound(array, Quantize(), decode(Quantize().encode(array)))


# ---- what is left out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 5000, 69_999])
def test_tensors_with_nan_or_infinity_are_kept_lossless(dtype: str, bad: float, place: int) -> None:
    array = weights(TILE + 4464, dtype=dtype).reshape(175, 400)
    array.reshape(-1)[place] = bad
    for per in ("tensor", "channel", 64):
        encoded = (Quantize(8, per) | Zstd()).encode(array)
        assert "quantize" not in encoded.codec
        assert encoded.error == 0.0
        assert decode(encoded).tobytes() == array.tobytes()


def test_the_log_says_once_why_a_tensor_was_not_quantised(caplog: pytest.LogCaptureFixture) -> None:
    quantize._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "tensorvine.store.codecs.quantize"):
        for _ in range(3):
            Quantize().encode(np.array([1.0, np.nan]))
            Quantize().encode(np.arange(5))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "NaN or infinity" in record.getMessage()


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_integers_booleans_complex_numbers_and_short_floats_are_never_quantised(dtype: str) -> None:
    array = (10 * weights(5000)).astype(dtype_of(dtype))
    for codec in (Quantize(2), Quantize(8) | Zstd(), Quantize(16) | Shuffle() | Gzip()):
        encoded = codec.encode(array)
        assert "quantize" not in encoded.codec
        assert decode(encoded).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_not_quantised_to_sixteen(dtype: str) -> None:
    assert Quantize(16).encode(weights(100, dtype=dtype)).codec == ""


def test_an_error_beyond_half_a_step_is_noticed() -> None:
    one = np.ones(2)
    scales = kernels.Scales(np.zeros(2), one)
    for dtype in FLOATS:
        kind = dtype_of(dtype)
        assert codes.within_half_a_step(0.5 * one, scales, one, kind)
        for worst in (0.52, np.nan, np.inf):
            assert not codes.within_half_a_step(np.array([0.5, worst]), scales, one, kind)


# ---- with compressors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "normal", "laplace"])
@pytest.mark.parametrize("count", [40_000, 1_000_000])
def test_zstd_makes_codes_no_larger_than_gzip_does(kind: str, count: int) -> None:
    array = {"uniform": RNG.uniform(-1, 1, count), "normal": RNG.normal(size=count), "laplace": RNG.laplace(size=count)}
    tensor = array[kind].astype(np.float32)
    ours, theirs = ((Quantize() | stage).encode(tensor).nbytes for stage in (Zstd(), Gzip()))
    assert ours <= theirs
    assert ours <= 0.25 * tensor.nbytes + 9


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tail", [Zstd(), Gzip(), Shuffle(), Shuffle() | Zstd()], ids=str)
def test_compressors_change_no_code(bits: int, tail: Zstd) -> None:
    for array in (weights(150_001), RNG.uniform(size=200_003).astype(np.float32)):
        alone, packed = Quantize(bits, 1000).encode(array), (Quantize(bits, 1000) | tail).encode(array)
        assert decode(packed).tobytes() == decode(alone).tobytes()
        assert packed.error == alone.error
        assert packed.nbytes <= alone.nbytes


@given(count=st.integers(0, 70), bits=st.integers(1, 8), data=st.data())
@settings(max_examples=100, deadline=None)
def test_packed_codes_come_back_and_lie_bit_by_bit(count: int, bits: int, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    found = np.array(drawn, np.uint8)
    packed = pack_bits(found, bits)
    whole = sum(code << place * bits for place, code in enumerate(drawn))
    assert packed.tobytes() == whole.to_bytes(packed_bytes(count, bits), "little")
    np.testing.assert_array_equal(unpack_bits(packed, count, bits), found)


@pytest.mark.parametrize("bits", range(1, 9))
def test_many_codes_are_packed_as_few_are(bits: int) -> None:
    found = RNG.integers(0, 2**bits, 200_001, np.uint8)
    packed = pack_bits(found, bits)
    np.testing.assert_array_equal(packed[: 1000 * bits], pack_bits(found[:8000], bits))
    np.testing.assert_array_equal(unpack_bits(packed, len(found), bits), found)


# ---- Numba and NumPy ------------------------------------------------------------------------------------


def both(array: Array, codec: Quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode and decode with compiled loops and without, and compare every bit."""
    compiled = codec.encode(array)
    values = decode(compiled)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_kernels", lambda real, code: None)
        plain = codec.encode(array)
        assert (plain.codec, plain.error) == (compiled.codec, compiled.error)
        assert plain.data.tobytes() == compiled.data.tobytes()
        assert decode(plain).tobytes() == values.tobytes()


@pytest.mark.parametrize("per", ["tensor", "channel", 100, 40_000])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numba_and_numpy_make_the_same_bits(
    dtype: str, bits: int, per: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    both(weights(300, 271, dtype=dtype), Quantize(bits, per), monkeypatch)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_the_float32_loop_decides_as_the_exact_one(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    count = FAST_GROUP + SLICE // 2
    ties = np.arange(count) % 511 / 2  # halves of a step, where the least rounding decides
    for array in (ties, ties * 0.1, ties / 3 + 0.7, RNG.normal(size=count), RNG.normal(size=count).round(2)):
        both((array + offset).astype(np.float32), Quantize(8), monkeypatch)


def test_compiled_loops_release_the_gil() -> None:
    pytest.importorskip("numba", reason="Numba is not installed")
    found = kernels._kernels(np.dtype(np.float32), np.dtype(np.uint8))
    assert found is not None
    assert all(found(name).targetoptions["nogil"] for name in ("quantize_long_rows", "dequantize_rows"))


def test_without_numba_quantising_works_and_the_log_says_so() -> None:
    code = """
import sys, logging
sys.modules["numba"] = None
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import numpy as np
from tensorvine.store import Quantize
for _ in range(2):
    tensor = np.linspace(0, 1, 100_000, dtype=np.float32)
    assert abs(Quantize().decode(Quantize().encode(tensor)) - tensor).max() < 1 / 509
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("NumPy") == 1


def test_importing_the_store_loads_no_optional_package() -> None:
    optional = "{'numba', 'zstandard', 'cupy'}"
    code = f"import sys, tensorvine.store; sys.exit(bool({optional} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
