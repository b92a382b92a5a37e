"""Arrays of every framework become NumPy's without a copy, and bytes become arrays again."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib.stride_tricks import as_strided
from tensorvine.store.arrays import (
    as_bytes,
    as_numpy,
    checked,
    dtype_name,
    dtype_of,
    from_bytes,
    memory_of,
    read_only,
)
from tensorvine.store.errors import TensorMismatchError, TensorNotFoundError

TORCH_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.uint16: "uint16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
    torch.float8_e8m0fnu: "float8_e8m0fnu",
}
ALL_NAMES = sorted({*TORCH_DTYPES.values(), "uint32", "uint64", "float8_e3m4", "float4_e2m1fn", "int4", "uint4"})


class Raises:
    """An array of somebody's that cannot be converted."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise self.error


class InUnits(np.ndarray):
    """An array that says more than its numbers, as those of unit packages do."""

    unit: str


class Shown:
    """An object that shows its memory."""

    def __init__(self) -> None:
        self.array = np.zeros((2, 3))
        self.__array_interface__ = self.array.__array_interface__


class Copied:
    """An object that gives a copy of its numbers."""

    def __array__(self, dtype: object = None) -> np.ndarray:
        return np.zeros(2)


def in_units(unit: str, shape: tuple[int, ...] = (3,)) -> np.ndarray:
    array = np.arange(float(np.prod(shape))).reshape(shape).view(InUnits)
    array.unit = unit
    return array


def matrix(*rows: list[float]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(rows)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_importing_arrays_loads_no_framework() -> None:
    frameworks = "{'tensorflow', 'torch', 'cupy', 'keras'}"
    code = f"import sys, tensorvine.store.arrays; sys.exit(bool({frameworks} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_numpy_array_is_returned_as_it_is() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert as_numpy(array, "x") is array
    assert np.shares_memory(as_numpy(array[::2, ::-1], "x"), array)


@pytest.mark.parametrize(("dtype", "name"), TORCH_DTYPES.items(), ids=TORCH_DTYPES.values())
def test_a_torch_tensor_shares_its_memory_whatever_its_dtype(dtype: torch.dtype, name: str) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    array = as_numpy(tensor, "x")
    assert array.dtype.name == name
    assert array.shape == (2, 3)
    assert array.ctypes.data == tensor.data_ptr()
    expected = [[float(item.real) for item in row] for row in tensor.to(torch.complex64)]
    assert array.astype("complex64").real.tolist() == expected


def test_torch_parameters_scalars_empties_and_strides_are_understood() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    assert np.shares_memory(as_numpy(parameter, "x"), as_numpy(parameter.data, "x"))
    assert as_numpy(parameter.T, "x").strides == (2, 6)
    assert as_numpy(torch.tensor(2.5, dtype=torch.bfloat16), "x").shape == ()
    assert as_numpy(torch.empty(0, 3, dtype=torch.float8_e5m2), "x").shape == (0, 3)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert as_numpy(conjugate, "x").tolist() == [1 - 2j]


def test_numbers_and_nested_lists_become_arrays() -> None:
    assert as_numpy(3, "x").dtype == np.int64
    assert as_numpy(True, "x").dtype == np.bool_
    assert as_numpy([[1.0], [2.0]], "x").tolist() == [[1.0], [2.0]]


def test_big_endian_becomes_native_with_equal_values() -> None:
    array = np.array([1.5, -2.0], dtype=">f4")
    native = as_numpy(array, "x")
    assert native.dtype == np.dtype("float32")
    assert native.dtype.isnative
    assert native.tolist() == [1.5, -2.0]


def test_an_array_on_a_gpu_is_fetched_by_its_own_get() -> None:
    class OnGpu:
        def get(self) -> np.ndarray:
            return np.ones(3, "float16")

    OnGpu.__module__ = "cupy._core.core"
    assert as_numpy(OnGpu(), "x").dtype == np.float16


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        None,
        object(),
        [[1], [1, 2]],
        {"a": 1},
        np.array(["a"]),
        np.array([object()]),
        np.zeros(2, "datetime64[s]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, "V4"),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.nn.Linear(1, 1),
        np.array(["a"], np.dtypes.StringDType()),
        10**400,
        [[[1.0]] * 2, "text"],
        Raises(AttributeError),
        Raises(KeyError),
        Raises(OverflowError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_numbers_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TensorMismatchError, match=r"tensor 'w': expected .* found"):
        as_numpy(value, "tensor 'w'")


def test_a_lack_of_memory_is_said_as_it_is() -> None:
    for call in (as_numpy, memory_of):
        with pytest.raises(MemoryError):
            call(Raises(MemoryError), "x")


def masked(**options: object) -> np.ndarray:
    return np.ma.MaskedArray([1.0, 2.0], **options)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize(
    ("value", "lost"),
    [
        (masked(mask=[False, True]), "MaskedArray, of which its mask would be lost"),
        (masked(), "MaskedArray"),
        ([[1.0, 2.0], masked(mask=[False, True])], "MaskedArray"),
        ([(np.ma.masked,)], "MaskedConstant"),
        (in_units("m"), "InUnits, of which unit would be lost"),
        ([in_units("m")], "InUnits"),
        (pa.array([1, None]), "its missing values would be lost"),
        (nested(5000), "deeper lists"),
    ],
    ids=range(8),
)
def test_what_says_more_than_its_numbers_is_refused_by_name(value: object, lost: str) -> None:
    with pytest.raises(TensorMismatchError, match=f"tensor 'w': expected .* found .*{lost}|{lost}"):
        as_numpy(value, "tensor 'w'")


@pytest.mark.parametrize("kind", ["Series", "DataFrame", "Index"])
def test_labels_are_not_lost(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(TensorMismatchError, match=f"found {kind}, of which the labels, missing values or units"):
        as_numpy(getattr(pandas, kind)([1.0, 2.0]), "x")


@pytest.mark.parametrize(
    "value",
    [
        matrix([1, 2], [3, 4]),
        np.broadcast_to(np.float32(3), (2, 3)),
        np.arange(6)[::-2],
        np.arange(6).reshape(2, 3).T,
        np.frombuffer(bytes(range(9)), np.uint8)[1:].view("f4"),
        np.frombuffer(bytes(8)),
        np.array(3, ">i2"),
        np.arange(3, dtype=">c16"),
        np.arange(3.0).view(InUnits),
        pa.array([1.5, 2.5]),
        bytearray(b"ab"),
        np.float32(1.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_shape_are_kept_however_they_lie(value: Any) -> None:
    found, plain = as_numpy(value, "x"), np.asarray(value)
    assert type(found) is np.ndarray
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype.newbyteorder("="))
    assert as_bytes(found).tobytes() == plain.astype(found.dtype).tobytes()


def test_a_mapped_file_is_its_numbers(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", "f4", "w+", shape=(4,))
    assert np.shares_memory(as_numpy(mapped, "x"), mapped)


class TestMemoryOf:
    """Arrays that are to be filled."""

    @pytest.mark.parametrize(
        "value",
        [
            np.zeros((2, 3), ">f8"),
            np.zeros((4, 6))[::2, ::-2],
            np.zeros((3, 2)).T,
            matrix([0.0] * 3, [0.0] * 3),
            np.zeros(2 * 3 * 8 + 1, np.uint8)[1:].view("f8").reshape(2, 3),
            torch.zeros(2, 3, dtype=torch.float64),
            torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)).T,
            in_units("m", (2, 3)),
            Shown(),
        ],
        ids=["big-endian", "strided", "transposed", "matrix", "unaligned", "torch", "parameter", "unit", "shown"],
    )
    def test_what_is_written_is_in_the_callers_array(self, value: Any) -> None:
        given = np.arange(6.0).reshape(2, 3)
        np.copyto(memory_of(value, "x"), given)
        assert np.asarray(value.detach() if isinstance(value, torch.Tensor) else value).tolist() == given.tolist()

    def test_buffers_and_bfloat16_of_torch_are_memory_too(self) -> None:
        buffer, tensor = bytearray(3), torch.zeros(2, dtype=torch.bfloat16)
        memory_of(buffer, "x")[:] = [1, 2, 3]
        memory_of(tensor, "x")[:] = 1.5
        assert (bytes(buffer), tensor.tolist()) == (b"\1\2\3", [1.5, 1.5])

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            ([0.0, 0.0], "found list"),
            (1.5, "found float"),
            (None, "found NoneType"),
            (b"ab", "found a read-only bytes"),
            (read_only(np.zeros(2)), "read-only"),
            (np.broadcast_to(np.zeros(1), (3,)), "read-only"),
            (as_strided(np.zeros(1), (3,), (0,)), r"share memory: strides \(0,\)"),
            (as_strided(np.zeros(4), (3, 2), (8, 8)), "share memory"),
            (torch.zeros(1).expand(3), "share memory"),
            (torch.zeros(2, dtype=torch.complex64).conj(), "have to be copied"),
            (masked(), "its mask"),
            (Copied(), "found Copied"),
            (np.array([None]), "dtype object"),
            (np.array(["a"], np.dtypes.StringDType()), "StringDType"),
            (Raises(ValueError), "found Raises"),
        ],
    )
    def test_what_would_not_be_filled_is_refused(self, value: object, found: str) -> None:
        with pytest.raises(TensorMismatchError, match=f"x: expected .*{found}"):
            memory_of(value, "x")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_dtype_name_names_its_dtype(name: str) -> None:
    assert dtype_name(dtype_of(name)) == name


def test_a_dtype_name_does_not_depend_on_byte_order() -> None:
    assert dtype_name(">c16") == dtype_name("<c16") == "complex128"


@pytest.mark.parametrize("name", ["f4", "float12", "object", "str", "datetime64", ">f4", "", "void", "M8[s]"])
def test_an_unknown_dtype_name_is_refused(name: str) -> None:
    with pytest.raises(TensorMismatchError, match="dtype: expected"):
        dtype_of(name)


@pytest.mark.parametrize("dtype", ["O", "U3", [("a", "i4")], "no such", 3.5])
def test_a_dtype_without_a_name_is_refused(dtype: object) -> None:
    with pytest.raises(TensorMismatchError, match="dtype: expected"):
        dtype_name(dtype)


@given(
    name=st.sampled_from(ALL_NAMES),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    offset=st.integers(0, 3),
)
def test_bytes_of_any_array_give_it_back_without_a_copy(name: str, shape: tuple[int, ...], offset: int) -> None:
    dtype = dtype_of(name)
    memory = np.zeros(offset + int(np.prod(shape)) * dtype.itemsize, np.uint8)
    memory[:] = np.arange(memory.size) % 2
    array = from_bytes(memory[offset:], name, shape)
    assert array.dtype == dtype
    assert array.shape == shape
    back = as_bytes(array)
    assert back.tolist() == memory[offset:].tolist()
    if array.size and offset == 0:
        assert np.shares_memory(back, memory)


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::-1], lambda a: a[:, 0]])
def test_bytes_of_a_strided_array_are_those_in_c_order(view) -> None:
    array = view(np.arange(12, dtype="int32").reshape(3, 4))
    assert as_bytes(array).tobytes() == array.tobytes()


def test_a_read_only_buffer_gives_a_read_only_array() -> None:
    buffer = read_only(np.zeros(8, np.uint8))
    assert not from_bytes(buffer, "bfloat16", (4,)).flags.writeable
    assert from_bytes(np.zeros(8, np.uint8), "bfloat16", (4,)).flags.writeable


@pytest.mark.parametrize("shape", [(1,), (3,), (-1, -2), ()])
def test_bytes_of_another_length_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorMismatchError, match=r"array of float32.*: expected .* found (8|2: \(-1, -2\))"):
        from_bytes(np.zeros(8, np.uint8), "float32", shape)


def test_checked_refuses_unknown_names_and_other_shapes_and_dtypes() -> None:
    expected = {"kernel": ("float32", (2,))}
    assert checked({"kernel": np.zeros(2, "float32")}, expected)["kernel"].shape == (2,)
    with pytest.raises(TensorNotFoundError, match=r"'bias'.*kernel"):
        checked({"bias": np.zeros(2, "float32")}, expected)
    with pytest.raises(TensorMismatchError, match=r"'kernel': expected float32 of shape \(2,\); found .*\(3,\)"):
        checked({"kernel": np.zeros(3, "float32")}, expected)
    with pytest.raises(TensorMismatchError, match=r"'kernel': expected float32 .*; found float64"):
        checked({"kernel": np.zeros(2)}, expected)


def test_ml_dtypes_are_stored_by_their_own_names() -> None:
    assert dtype_name(ml_dtypes.float8_e4m3fn) == "float8_e4m3fn"


NO_NAMES = ["3)", "(3,)f4", "f4,f4", "i4," * 100_000, "float32 ", "f4", "<f4", "a" * 100, "", "O", "V8"]


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: name[:10])
def test_a_text_that_numpy_would_evaluate_is_no_dtype(name: str) -> None:
    with pytest.raises(TensorMismatchError, match=r"dtype: expected a name such as 'float32'; found '.{,100}$"):
        dtype_of(name)
