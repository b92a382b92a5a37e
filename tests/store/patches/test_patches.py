"""Patches give the bits back, are as short as what changed, and are never trusted."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.store.arrays import Array, as_bytes, dtype_of
from tensorvine.store.codecs.blocks import Bytes
from tensorvine.store.errors import CorruptDataError, TensorMismatchError, TensorVineError
from tensorvine.store.patches import PatchHeader, apply_patch, header_of, kernels, make_patch
from tensorvine.store.patches.format import BLOCK_WORDS, Form, blocks_of
from tensorvine.store.versions.manifest import digest_of

DTYPES = ["bool", "uint8", "float8_e4m3fn", "int16", "bfloat16", "float16", "float32", "int64", "float64", "complex128"]
RNG = np.random.default_rng(23)
FORMAT_PAGE = Path(__file__).parents[3] / "docs/reference/format.md"
Shape = tuple[int, ...]


def noise(shape: Shape, dtype: str) -> Array:
    """Tensor of bytes that no compressor makes smaller; of booleans, bytes that are none."""
    kind = dtype_of(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    return RNG.integers(0, 256, count, np.uint8).view(kind).reshape(shape)


def changed(base: Array, where: np.ndarray) -> Array:
    """Copy a tensor with other bits in the elements that a mask, or a list of indices, names."""
    found = base.copy()
    elements = as_bytes(found).reshape(-1, base.dtype.itemsize)
    elements[where] ^= RNG.integers(1, 256, elements[where].shape, np.uint8)
    return found


def forms(patch: Bytes) -> list[Form]:
    """Return the form of each block."""
    header, end = header_of(patch)
    return [block.form for block in blocks_of(patch, end, header)]


def made(tensor: Array, base: Array, **options: Any) -> Bytes:
    """Make a patch, and check that it leads from the base to the tensor."""
    patch = make_patch(tensor, base, **options)
    assert patch is not None
    before = base.tobytes()
    found = apply_patch(patch, base)
    assert (found.dtype, found.shape, found.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
    assert base.tobytes() == before
    return patch


# ---- bits ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 9), max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_pair_of_tensors_gives_the_bits_back(data: st.DataObject, dtype: str, shape: list[int]) -> None:
    kind = dtype_of(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    pair = [np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8) for _ in range(2)]
    tensor, base = (each.view(kind).reshape(shape) for each in pair)
    made(tensor, base)
    made(base, base)


@given(
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.3, 0.8, 1.0]),
    count=st.integers(1, 70_000),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_any_share_of_changes_gives_the_bits_back(dtype: str, share: float, count: int, seed: int) -> None:
    base = noise((count,), dtype)
    made(changed(base, np.random.default_rng(seed).random(count) < share), base)


def test_nan_payloads_and_negative_zero_are_bits() -> None:
    base = np.array([0x7FC00000, 0x00000000, 0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    tensor = np.array([0x7FC00001, 0x80000000, 0xFFC00000, 0x3F800000], np.uint32).view(np.float32)
    made(tensor, base)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_tensors_of_no_axis_and_of_no_element(shape: Shape) -> None:
    made(noise(shape, "float32"), noise(shape, "float32"))


def test_strided_tensors() -> None:
    base = noise((40, 30), "float32")
    made(np.asfortranarray(changed(base, np.arange(5))), base[::1])
    made(base[::2, ::-1], base[1::2])


def test_a_tensor_of_several_blocks_by_several_threads() -> None:
    base = noise((2 * BLOCK_WORDS + 5,), "uint8")
    tensor = base.copy()
    tensor[7::100] ^= 1
    tensor[-1] ^= 1
    tensor[BLOCK_WORDS : 2 * BLOCK_WORDS] = base[:BLOCK_WORDS]
    with ThreadPoolExecutor(2) as workers:
        patch = made(tensor, base, workers=workers)
        assert forms(patch) == [Form.GAPS_1, Form.ALL, Form.MASK]
        assert apply_patch(patch, base, workers=workers).tobytes() == tensor.tobytes()
    assert made(tensor, base).tobytes() == patch.tobytes()


def test_a_tensor_of_more_than_two_gib() -> None:
    base = np.zeros((1 << 31) + 77, np.uint8)  # pages that nobody writes take no memory
    tensor = np.zeros_like(base)
    tensor[[0, 1 << 20, -1]] = 1, 2, 3
    patch = make_patch(tensor, base)
    assert patch is not None
    assert len(patch) < 50_000
    found = apply_patch(patch, base)
    assert np.flatnonzero(found).tolist() == [0, 1 << 20, (1 << 31) + 76]
    assert found[[0, 1 << 20, -1]].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_numba_and_numpy_make_and_apply_the_same_patches(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    word = dtype_of(dtype).itemsize
    if not kernels.wait_until_compiled(word, 120.0):
        pytest.skip("Numba is not installed")
    base = noise((300_001,), dtype)
    for where in (RNG.random(len(base)) < 0.02, np.arange(900, 1100), np.array([5, 299_000, 300_000])):
        tensor = changed(base, where)
        patches: list[bytes] = []
        for least in (0, len(base) + 1):
            monkeypatch.setattr(kernels, "COMPILES_FROM", least)
            patches.append(made(tensor, base).tobytes())
        made(tensor[1:], base[1:])  # memory at no multiple of eight
        assert patches[0] == patches[1]


# ---- lengths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.02), (0.05, 0.08)])
def test_random_changes_of_bfloat16_take_little_more_than_their_entropy(share: float, most: float) -> None:
    base = noise((1 << 20,), "bfloat16")
    patch = made(changed(base, RNG.random(len(base)) < share), base)
    assert len(patch) <= most * base.nbytes


@pytest.mark.parametrize("run", [64, 1024])
def test_runs_and_rows_take_what_changed(run: int) -> None:
    base = noise((1 << 20,), "bfloat16")
    where = np.repeat(RNG.random(len(base) // run) < 0.1, run)
    patch = made(changed(base, where), base)
    assert len(patch) <= 1.1 * 2 * where.sum()


def test_steps_of_a_training_shrink_by_xor() -> None:
    base = RNG.normal(size=1 << 20).astype(np.float32)
    tensor = base.copy()
    tensor[::50] *= np.float32(1 + 1e-6)
    patch = made(tensor, base)
    header, end = header_of(patch)
    assert blocks_of(patch, end, header)[0].xor
    assert len(patch) < 0.5 * 4 * (len(base) // 50)


def test_equal_tensors_take_a_header_and_empty_blocks() -> None:
    base = noise((1 << 20,), "bfloat16")
    assert len(made(base, base)) < 100


def test_a_patch_that_would_be_too_long_is_given_up() -> None:
    base = noise((10_000,), "float32")
    tensor = changed(base, np.arange(5000))
    length = len(made(tensor, base))
    assert make_patch(tensor, base, limit=length - 1) is None
    assert make_patch(tensor, base, limit=length) is not None


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_base_of_another_dtype_or_shape_is_refused() -> None:
    base = noise((4, 6), "float32")
    patch = made(changed(base, np.arange(3)), base)
    for other in (base.view(np.int32), base.reshape(6, 4), base[:2], np.zeros((4, 6), np.float64)):
        with pytest.raises(TensorMismatchError, match="base of a patch: expected float32 of shape"):
            apply_patch(patch, other)
        with pytest.raises(TensorMismatchError, match="base of a patch"):
            make_patch(base, other)


def test_a_base_of_other_content_is_found_out() -> None:
    base = noise((100,), "float32")
    patch = made(changed(base, np.arange(3)), base)
    with pytest.raises(CorruptDataError, match="expected to make content"):
        apply_patch(patch, changed(base, np.array([50])))


def test_memory_of_the_base_is_not_written_to() -> None:
    base = noise((100,), "float32")
    patch = made(changed(base, np.arange(3)), base)
    with pytest.raises(TensorMismatchError, match="memory apart from the base"):
        apply_patch(patch, base, into=as_bytes(base))
    into = np.empty(400, np.uint8)
    assert np.shares_memory(apply_patch(patch, base, into=into), into)


def test_a_header_says_what_the_patch_is() -> None:
    base = noise((10, 10), "bfloat16")
    tensor = changed(base, np.arange(3))
    hashes = digest_of(as_bytes(base)), digest_of(as_bytes(tensor))
    header, _ = header_of(made(tensor, base, hashes=hashes))
    assert header == PatchHeader("bfloat16", (10, 10), *hashes)
    assert (header.nbytes, header.word) == (200, 2)


def seeds() -> list[tuple[Array, Array, Bytes]]:
    """Return small tensors with a patch of each form."""
    found: list[tuple[Array, Array, Bytes]] = []
    for share in (0.0, 0.01, 0.05, 0.3, 1.0):
        base = noise((2000,), "bfloat16")
        tensor = changed(base, RNG.random(len(base)) < share)
        found.append((tensor, base, made(tensor, base)))
    wide = np.zeros(600_000, np.uint8)
    far = changed(wide, np.array([3, 500_000]))
    return [*found, (far, wide, made(far, wide))]


def test_the_patches_that_are_damaged_below_have_all_forms() -> None:
    assert {form for _, _, patch in seeds() for form in forms(patch)} == set(Form)


def test_ten_thousand_damaged_patches_give_an_error_or_the_right_bits() -> None:
    dice = np.random.default_rng(51)
    given_patches, refused = seeds(), 0
    for turn in range(10_000):
        tensor, base, patch = given_patches[turn % 5 if turn % 50 else 5]
        broken = damaged(patch, dice)
        try:
            assert apply_patch(broken, base).tobytes() == tensor.tobytes()
        except TensorVineError:
            refused += 1
    assert refused > 8000


def damaged(patch: Bytes, dice: np.random.Generator) -> Bytes:
    """Damage a patch: bytes changed, most often in a header; cut off; inserted; or a number made large."""
    broken, kind = patch.copy(), dice.integers(5)
    near = min(len(patch), 80)
    if kind == 0:
        broken[dice.integers(near)] ^= dice.integers(1, 256)
    elif kind == 1:
        broken[dice.integers(len(patch))] ^= dice.integers(1, 256)
    elif kind == 2:
        return broken[: dice.integers(len(patch))]
    elif kind == 3:
        at = dice.integers(len(patch))
        return np.concatenate([broken[:at], dice.integers(0, 256, dice.integers(1, 9), np.uint8), broken[at:]])
    else:
        at = dice.integers(near - 4)
        broken[at : at + 4] = np.frombuffer(dice.choice([0, 1, 1 << 31, (1 << 32) - 1]).astype("<u4"), np.uint8)
    return broken


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_reader_of_the_page_reads_patches_of_all_forms() -> None:
    code = next(
        each for each in re.findall(r"```python\n(.*?)```", FORMAT_PAGE.read_text(), re.DOTALL) if "TVPA" in each
    )
    assert len(code.splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(compile(code, str(FORMAT_PAGE), "exec"), names)  # noqa: S102  the page's own code
    for tensor, base, patch in seeds():
        assert names["read_patch"](patch.tobytes(), base.tobytes()) == tensor.tobytes()
    steps = RNG.normal(size=300_000).astype(np.float32)
    tensor = steps * np.float32(1 + 1e-6)
    assert names["read_patch"](made(tensor, steps).tobytes(), steps.tobytes()) == tensor.tobytes()
