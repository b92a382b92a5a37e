"""Arrays as bytes: what is taken, without a copy, and what is refused."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors.collective.buffers import readable, typed, writable
from tensorvine.store.errors import TensorMismatchError

from tests.support.ranks import DTYPES, numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_the_array_s_own(dtype: str) -> None:
    whole = numbers(dtype, 24, 1).reshape(4, 6)
    for part in (whole, whole[1:3], whole[2], whole[2:2], whole[3, 5:6]):
        found = readable(part, "x")
        assert found.tobytes() == part.tobytes()
        assert found.dtype == np.uint8
        assert found.nbytes == 0 or np.shares_memory(found, whole)
    writable(whole[1], "x")[:] = 0
    assert whole[1].tobytes() == bytes(whole[1].nbytes)
    assert typed(whole, "x").dtype == whole.dtype
    assert typed(whole, "x").shape == (24,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((4, 4))[:, 0], "contiguous"),
        (np.zeros((4, 4), order="F")[:2], "contiguous"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.array(["a"]), "numbers"),
        (np.array([object()]), "numbers"),
        (np.zeros(2, "datetime64[s]"), "numbers"),
        ([1.0], "CPU"),
        (3.5, "CPU"),
        (None, "CPU"),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused(given: Any, message: str) -> None:
    for view in (readable, writable, typed):
        with pytest.raises(TensorMismatchError, match=f"tensor 'x': .*{message}"):
            view(given, "tensor 'x'")


def test_what_is_read_only_is_not_written_to() -> None:
    given = np.frombuffer(b"abcd", np.uint8)
    assert readable(given, "x").tobytes() == b"abcd"
    with pytest.raises(TensorMismatchError, match="read-only"):
        writable(given, "x")


def test_anything_with_a_buffer_is_taken() -> None:
    for given in (bytearray(8), memoryview(bytearray(8)), array.array("d", [0.0])):
        writable(given, "x")[:] = 1
        assert bytes(given) == b"\1" * 8
    assert readable(b"ab", "x").tobytes() == b"ab"


def test_anything_with_dlpack_on_the_cpu_is_taken() -> None:
    class Elsewhere:
        def __init__(self, device: int) -> None:
            self.array, self._device = np.zeros(3), device

        def __dlpack_device__(self) -> tuple[int, int]:
            return self._device, 0

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    given = Elsewhere(1)
    writable(given, "x")[:] = 0xFF
    assert np.isnan(given.array).all()
    with pytest.raises(TensorMismatchError, match="another device"):
        readable(Elsewhere(2), "x")


def test_pytorch_tensors_are_taken_where_they_lie() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        given = torch.zeros(6, dtype=dtype).view(2, 3)
        found = writable(given[1], "x")
        assert found.ctypes.data == given[1].data_ptr()
        found[:] = 1
        assert not given[0].view(torch.uint8).any()
        assert given[1].view(torch.uint8).all()
    assert typed(torch.nn.Parameter(torch.ones(2)), "x").tolist() == [1, 1]
    assert typed(torch.zeros(2, dtype=torch.bfloat16), "x").dtype == ml_dtypes.bfloat16
    for refused, message in [
        (torch.zeros(4, 4).t()[:2], "contiguous"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(3).to_sparse(), "contiguous"),
        (torch.zeros(3, device="meta"), "found one on meta"),
        (torch.float32, "CPU"),
    ]:
        with pytest.raises(TensorMismatchError, match=message):
            readable(refused, "x")


def test_tensorflow_tensors_are_read_and_not_written_to() -> None:
    tf = pytest.importorskip("tensorflow")
    for dtype in ("float32", "bfloat16", "bool"):
        given = tf.cast(tf.constant([[1.0, 0.0], [1.0, 1.0]]), dtype)
        assert readable(given, "x").tobytes() == given.numpy().tobytes()
        with pytest.raises(TensorMismatchError, match="read-only"):
            writable(given, "x")
    variable = tf.Variable([1.0, 2.0])
    assert readable(variable, "x").view(np.float32).tolist() == [1, 2]
    with pytest.raises(TensorMismatchError, match="read-only"):
        typed(variable, "x")
    keras = pytest.importorskip("keras")
    assert readable(keras.Variable([3.0]), "x").view(np.float32).tolist() == [3]
