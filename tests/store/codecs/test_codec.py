"""Codecs give back what they got, name what they did, and refuse bytes that are not theirs."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorvine.store import Codec, Delta, Encoded, Gzip, Quantize, Shuffle, Zstd
from tensorvine.store.arrays import Array, as_bytes, dtype_name, dtype_of
from tensorvine.store.codecs.blocks import BLOCK_ITEMS, Blocks
from tensorvine.store.codecs.codec import Chain, decode, from_spec
from tensorvine.store.errors import CodecError, CodecUnavailableError, CorruptDataError

from tests.support.memory import check_refused

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int64", "uint32", "complex64", "complex128", "int4"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", np.dtype("longdouble").name),
]
LOSSLESS = [
    Chain(),
    Zstd(),
    Zstd(9),
    Gzip(),
    Shuffle(),
    Shuffle() | Zstd(),
    Shuffle() | Gzip(1),
    Zstd() | Gzip(),
    Shuffle() | Zstd() | Shuffle() | Zstd(1),
    Delta(),
    Delta() | Zstd(),
    Delta() | Shuffle() | Zstd(),
    Delta() | Shuffle() | Gzip(),
]
LOSSY = [
    Quantize(),
    Quantize(2, 3) | Zstd(),
    Quantize(5, "channel") | Gzip(),
    Quantize(8) | Zstd(),
    Quantize(7) | Shuffle() | Zstd(),
    Quantize(16, 100) | Shuffle() | Zstd(),
    Quantize(16) | Shuffle(),
]
RNG = np.random.default_rng(7)


@st.composite
def tensors(draw: st.DrawFn) -> Array:
    """Arrays of any bits, dtype, shape and strides."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (data & 1 if dtype == np.bool_ else data.copy()).view(dtype).reshape(shape)
    return draw(st.sampled_from([array, np.asfortranarray(array), array[..., ::-1] if shape else array, array.T]))


def weights(count: int, dtype: str = "float32") -> Array:
    return RNG.standard_normal(count).astype(dtype_of(dtype))


def bits(array: Array) -> bytes:
    return as_bytes(array).tobytes()


def check_same(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bits(found) == bits(expected)
    assert found.flags.c_contiguous
    assert found.flags.writeable


# ---- round trips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSLESS, ids=lambda codec: codec.spec)
@given(tensor=tensors(), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_lossless_codecs_give_every_bit_back(codec: Codec, tensor: Array, seed: int) -> None:
    assert codec.lossless
    base = tensor.copy()
    base.reshape(-1)[seed::3] = base.dtype.type(1)
    for given_base in (None, base):
        encoded = codec.encode(tensor, given_base)
        assert encoded.error == 0.0
        assert (encoded.dtype, encoded.shape) == (dtype_name(tensor.dtype), tensor.shape)
        assert encoded.data.dtype == np.uint8
        assert encoded.data.flags.c_contiguous
        assert encoded.nbytes == encoded.data.nbytes <= tensor.nbytes
        check_same(codec.decode(encoded, base), tensor)
        check_same(decode(encoded, base), tensor)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.spec)
@given(tensor=tensors())
@settings(max_examples=25, deadline=None)
def test_what_cannot_be_quantised_comes_back_bit_for_bit(codec: Codec, tensor: Array) -> None:
    encoded = codec.encode(tensor)
    found = decode(encoded)
    assert not codec.lossless
    if "quantize" in encoded.codec:
        assert tensor.dtype.name in ("float16", "bfloat16", "float32", "float64")
        assert np.isfinite(tensor.astype(np.float64)).all()
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    else:
        check_same(found, tensor)
        assert encoded.error == 0.0


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("count", [BLOCK_ITEMS - 1, BLOCK_ITEMS, 2 * BLOCK_ITEMS + 3])
def test_tensors_of_several_blocks_come_back(dtype: str, count: int) -> None:
    tensor = (100 * RNG.standard_normal(count)).astype(dtype)
    for spec in ("zstd(3)", "shuffle", "shuffle|zstd(3)", "shuffle|gzip(1)", "delta|shuffle|zstd(3)"):
        encoded = from_spec(spec).encode(tensor, np.roll(tensor, 1))
        check_same(decode(encoded, np.roll(tensor, 1)), tensor)


def test_big_endian_and_unaligned_tensors_come_back() -> None:
    swapped = np.arange(1000, dtype=">f4")
    unaligned = np.frombuffer(b"x" + np.arange(1000, dtype="f4").tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    for spec in ("zstd(3)", "shuffle|zstd(3)", "delta|zstd(3)"):
        for tensor in (swapped, unaligned):
            check_same(decode(from_spec(spec).encode(tensor, np.zeros(1000, "f4")), np.zeros(1000, "f4")), unaligned)
    for per in ("tensor", 64):
        assert bits(decode(Quantize(8, per).encode(unaligned))) == bits(decode(Quantize(8, per).encode(swapped)))


def test_a_payload_may_lie_anywhere_in_memory() -> None:
    tensor = weights(5000)
    for codec in (*LOSSLESS, *LOSSY):
        encoded = codec.encode(tensor, np.zeros_like(tensor))
        moved = np.concatenate([np.zeros(3, np.uint8), encoded.data])[3:]
        moved.flags.writeable = False
        found = decode(replace(encoded, data=moved), np.zeros_like(tensor))
        assert bits(found) == bits(decode(encoded, np.zeros_like(tensor)))


def test_plain_bytes_are_a_view_and_decoding_makes_a_copy() -> None:
    tensor = weights(100)
    encoded = Chain().encode(tensor)
    assert np.shares_memory(encoded.data, tensor)
    assert not np.shares_memory(decode(encoded), tensor)


def test_compressors_that_do_not_pay_are_left_out() -> None:
    noise = RNG.integers(0, 256, 10_000, np.uint8)
    for codec in (Zstd(), Gzip(), Shuffle() | Zstd()):
        encoded = codec.encode(noise)
        assert encoded.codec == ""
        assert np.shares_memory(encoded.data, noise)
    assert (Quantize() | Zstd()).encode(weights(20)).codec == "quantize(8,tensor)"
    assert (Shuffle() | Zstd()).encode(np.zeros((0, 3))).codec == ""


def test_payloads_are_frames_that_other_tools_read() -> None:
    tensor = np.repeat(weights(1000), 50)
    assert zstandard.ZstdDecompressor().decompress(Zstd().encode(tensor).data) == tensor.tobytes()
    assert gzip.decompress(Gzip().encode(tensor).data) == tensor.tobytes()


def test_shuffle_and_zstd_make_weights_smaller_than_gzip_does() -> None:
    tensor = weights(300_000)
    assert (Shuffle() | Zstd()).encode(tensor).nbytes < 0.95 * Gzip().encode(tensor).nbytes


@pytest.mark.parametrize("codec", [Shuffle() | Zstd(), Zstd(), Delta() | Shuffle() | Zstd()], ids=lambda c: c.spec)
def test_no_second_copy_of_a_large_tensor_is_made(codec: Codec) -> None:
    tensor = weights(1 << 22)
    base = tensor + np.float32(1e-3)
    encoded = codec.encode(tensor, base)  # whatever is loaded once is loaded now
    for work in (lambda: codec.encode(tensor, base), lambda: codec.decode(encoded, base)):
        tracemalloc.start()
        try:
            work()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # A delta is compared with the dense tensor: two results may be there at once.
        assert peak < (2.3 if codec.needs_base else 1.3) * tensor.nbytes


def test_threads_share_a_codec() -> None:
    inputs = [weights(count, dtype) for count in (10, 40_000) for dtype in ("float32", "float16", "int64")]
    for codec in (Quantize() | Zstd(), Shuffle() | Zstd(), Delta() | Zstd(), Shuffle() | Gzip(1)):
        alone = [codec.encode(tensor, tensor[::-1]) for tensor in inputs]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda t, c=codec: c.encode(t, t[::-1]), inputs * 3))
            decoded = list(pool.map(lambda e, t: decode(e, t[::-1]), together, inputs * 3))
        for found, array, (expected, tensor) in zip(
            together, decoded, itertools.cycle(zip(alone, inputs, strict=True)), strict=False
        ):
            assert (found.codec, found.data.tobytes()) == (expected.codec, expected.data.tobytes())
            assert bits(array) == bits(decode(expected, tensor[::-1]))


# ---- specs and chains -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY], ids=lambda codec: codec.spec)
def test_a_codec_is_its_spec_and_its_repr(codec: Codec) -> None:
    assert from_spec(codec.spec) == codec
    assert hash(from_spec(codec.spec)) == hash(codec)
    assert eval(repr(codec)) == codec  # noqa: S307 - the repr is what one would type
    assert codec.needs_base == ("delta" in codec.spec)


def test_specs_are_written_as_documented() -> None:
    assert (Quantize(4, 64) | Gzip()).spec == "quantize(4,64)|gzip(6)"
    assert (Delta() | Shuffle() | Zstd()).spec == "delta|shuffle|zstd(3)"
    assert from_spec("zstd") == Zstd()
    assert from_spec("quantize(8)") == Quantize()
    assert repr(Shuffle() | Zstd()) == "Shuffle() | Zstd(level=3)"


@pytest.mark.parametrize(
    "text",
    [
        *("zip", "zstd(", "zstd)", "zstd(3)|", "|zstd(3)", "zstd(x)", "zstd(0)", "zstd(23)", "zstd(3,4)", "zstd()(3)"),
        *("gzip(0)", "gzip(10)", "shuffle(4)", "quantize(1)", "quantize(9)", "quantize(8,row)", "quantize(8,0)"),
        *("quantize(8,-4)", "quantize(8,8,8)", "delta(1)", "Zstd(3)", "zstd(3) | gzip(6)", "zstd(3.0)", " "),
        *("zstd(99999999999999999999)", "quantize(tensor)", "\n"),
    ],
)
def test_nonsense_is_no_codec(text: str) -> None:
    with pytest.raises(CodecError, match="expected"):
        from_spec(text)


@given(text=st.text(alphabet="quantizedelshfg|(),0123456789 ", max_size=30))
def test_any_text_is_a_codec_or_a_codec_error(text: str) -> None:
    try:
        codec = from_spec(text)
    except CodecError:
        return
    assert from_spec(codec.spec) == codec


def test_each_order_of_stages_works_or_is_refused() -> None:
    stages = [Quantize(), Delta(), Shuffle(), Zstd(), Gzip()]
    tensor = weights(3000)
    for length in (2, 3):
        for order in itertools.product(stages, repeat=length):
            allowed = not any(isinstance(stage, (Quantize, Delta)) for stage in order[1:])
            try:
                codec = from_spec("|".join(stage.spec for stage in order))
            except CodecError:
                assert not allowed, order
            else:
                assert allowed, order
                found = codec.decode(codec.encode(tensor, tensor + 1), tensor + 1)
                assert np.abs(found - tensor).max() <= codec.encode(tensor, tensor + 1).error


@pytest.mark.parametrize(("first", "second"), [(Quantize(), Delta()), (Delta(), Quantize())])
def test_a_delta_is_not_joined_with_quantising_and_the_error_says_why(first: Codec, second: Codec) -> None:
    with pytest.raises(CodecError, match="exact bits"):
        first | second


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        *((Zstd, level) for level in (0, 23, 3.0, True, "3", None)),
        *((Gzip, level) for level in (0, 10, 6.0)),
        *((Quantize, level) for level in (0, 1, 9, 15, 17, 8.0, True, "8")),
        *((lambda per: Quantize(8, per), per) for per in (0, -1, 2.0, True, "row", None, ("tensor",), 10**18)),
    ],
)
def test_impossible_arguments_are_refused(make: type, argument: object) -> None:
    with pytest.raises(CodecError, match="expected"):
        make(argument)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Zstd().decode(None),  # pyright: ignore[reportArgumentType]
        lambda: decode(b"bytes"),  # pyright: ignore[reportArgumentType]
        lambda: Zstd() | 3,  # pyright: ignore[reportOperatorIssue]
        lambda: from_spec(None),  # pyright: ignore[reportArgumentType]
        lambda: from_spec(b"zstd(3)"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_of_another_kind_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(CodecError, match="expected"):
        call()


def test_the_longest_block_reads_back() -> None:
    tensor = weights(1000)
    encoded = Quantize(8, 10**18 - 1).encode(tensor)
    assert np.abs(decode(encoded) - tensor).max() <= encoded.error


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = Zstd().encode(np.zeros(1000))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for work in (lambda: Zstd().encode(np.zeros(1000)), lambda: decode(encoded)):
        with pytest.raises(CodecUnavailableError, match=r"'zstd'.*package zstandard"):
            work()
    check_same(decode(Gzip().encode(np.zeros(1000))), np.zeros(1000))


def test_a_codec_decodes_only_what_it_could_have_encoded() -> None:
    tensor = np.zeros(1000, np.float32)
    encoded = Zstd().encode(tensor)
    check_same((Shuffle() | Zstd()).decode(encoded), tensor)
    for other in (Gzip(), Zstd(4), Chain()):
        with pytest.raises(CodecError, match="zstd"):
            other.decode(encoded)


# ---- bytes that are not what was written ----------------------------------------------------------------

CASES = [(codec, kind, change) for codec in (*LOSSLESS, *LOSSY) for kind in range(3) for change in ("all", "few")]


@cache
def sample(case: tuple[Codec, int, str]) -> tuple[Encoded, Array]:
    """Encode a small tensor against a base of which all or few elements differ."""
    codec, kind, change = case
    rng = np.random.default_rng(kind)
    repeated, walk = np.repeat(rng.standard_normal(40), 5), np.cumsum(rng.standard_normal(400))
    tensor = (repeated.astype(np.float32), np.arange(60, dtype=np.int16).reshape(5, 12), walk)[kind]
    base = tensor + tensor.dtype.type(1)
    if change == "few":
        base = np.where(np.arange(tensor.size).reshape(tensor.shape) % 9, tensor, base)
    return codec.encode(tensor, base), base


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].spec}-{case[1]}-{case[2]}")
def test_shortened_and_lengthened_payloads_are_corrupt(case: tuple[Codec, int, str]) -> None:
    encoded, base = sample(case)
    data = encoded.data
    for cut in {*range(0, len(data), max(1, len(data) // 40)), max(0, len(data) - 1)}:
        with pytest.raises(CorruptDataError, match="expected"):
            decode(replace(encoded, data=data[:cut].copy()), base)
    for extra in (b"\0", b"\xff\x08", b"garbage behind the end", data.tobytes()):
        with pytest.raises(CorruptDataError, match="expected"):
            decode(replace(encoded, data=np.append(data, np.frombuffer(extra, np.uint8))), base)


@given(case=st.sampled_from(CASES), data=st.data())
@settings(max_examples=400, deadline=None)
def test_changed_payloads_are_corrupt_or_decode_to_other_values(
    case: tuple[Codec, int, str], data: st.DataObject
) -> None:
    encoded, base = sample(case)
    payload = encoded.data.copy()
    if data.draw(st.booleans()):
        for place in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
            payload[place] ^= data.draw(st.integers(1, 255))
    else:
        payload = np.frombuffer(data.draw(st.binary(max_size=200)), np.uint8)
    try:
        found = decode(replace(encoded, data=payload), base)
    except CorruptDataError:
        return
    assert (found.dtype.name, found.shape) == (encoded.dtype, encoded.shape)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (199,)},
        {"shape": (-200,)},
        {"shape": (2, 200)},
        {"shape": (1 << 40, 1 << 40)},
        {"dtype": "int8"},
        {"dtype": "float64"},
        {"dtype": "int32x"},
        {"dtype": "object"},
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", [Chain(), Zstd(), Shuffle() | Gzip(), Quantize(), Quantize() | Zstd()], ids=str)
def test_metadata_that_does_not_fit_the_payload_is_corrupt(codec: Codec, change: dict[str, object]) -> None:
    encoded = codec.encode(np.repeat(weights(40), 5))
    with pytest.raises(CorruptDataError, match="expected"):
        decode(replace(encoded, **change))


@pytest.mark.parametrize("compress", [Zstd(), Gzip()], ids=str)
def test_a_small_payload_that_would_become_huge_is_stopped(compress: Codec) -> None:
    bomb = compress.encode(np.zeros(1 << 27, np.uint8)).data
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match="expected at most 400 bytes"):
            decode(Encoded(compress.spec, "float32", (100,), bomb))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


HUGE = (1 << 20, 1 << 14)
"""A shape of 64 GiB of float32."""


@pytest.mark.parametrize(
    "codec", [Chain(), Zstd(), Gzip(), Shuffle() | Zstd(), Quantize(), Quantize(2) | Zstd()], ids=str
)
def test_a_shape_that_the_payload_is_too_short_for_takes_no_memory(codec: Codec) -> None:
    encoded = codec.encode(np.repeat(weights(4000), 5))
    assert encoded.codec == codec.spec
    check_refused(lambda: decode(replace(encoded, shape=HUGE)), encoded.nbytes, r"expected .* or more; found")


def test_a_delta_is_compared_with_its_base_before_memory_is_taken() -> None:
    encoded = Delta().encode(np.zeros(1000, np.float32), np.zeros(1000, np.float32))
    with pytest.raises(CodecError, match="base of a delta: expected float32 of shape"):
        decode(replace(encoded, shape=HUGE), np.zeros(1000, np.float32))


WITHOUT_ROOM = """
import resource
import numpy as np
from tensorvine.store.codecs import blocks, codec

resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
try:
    codec.decode(blocks.Encoded("zstd(3)", "float32", (1 << 20, 1 << 14), np.zeros(20 << 20, np.uint8)))
except Exception as exc:
    print(type(exc).__name__, exc)
"""


def test_a_shape_that_memory_has_no_room_for_is_corrupt() -> None:
    """In a process of its own, for others' threads may need memory, too."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, timeout=200)
    assert "CorruptDataError" in done.stdout, done.stderr
    assert "expected the shape of an array; found one of 68719476736 bytes" in done.stdout


def test_what_passes_between_two_compressors_is_bounded() -> None:
    """Between them, empty frames would pass for hours."""
    empty = Zstd().pack(Blocks([np.empty(0, np.uint8)]))
    frame = b"".join(part.tobytes() for part in empty.parts)
    bomb = gzip.compress(frame * 4_000_000, 9)
    encoded = Encoded("zstd(3)|gzip(6)", "float32", (100,), np.frombuffer(bomb, np.uint8))
    check_refused(lambda: decode(encoded), len(bomb), r"expected at most .* bytes between its stages")


def test_a_codec_has_few_stages() -> None:
    with pytest.raises(CodecError, match="expected at most 8 stages; found 100000"):
        from_spec("|".join(["shuffle"] * 100_000))
    with pytest.raises(CodecError, match="expected at most 8 stages; found 9"):
        Chain((Shuffle(),) * 8) | Zstd()


def test_a_frame_that_claims_a_larger_window_than_its_level_has_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = np.frombuffer(compressor.compress(bytes(5000)) + compressor.flush(), np.uint8)
    assert not decode(Encoded("zstd(22)", "uint8", (5000,), frame)).any()
    with pytest.raises(CorruptDataError, match="expected a Zstandard frame"):
        decode(Encoded("zstd(3)", "uint8", (5000,), frame))
