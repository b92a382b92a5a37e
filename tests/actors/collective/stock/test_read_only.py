"""Read-only arrays that get other memory: whose result nobody loses, and which are refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.collective.stock.read_only import is_read_only, replace_memory
from tensorvine.store.errors import TensorMismatchError


def deserialised(array: Any) -> Any:
    """Send an array as Ray does: its bytes apart, and not copied."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(one.raw()) for one in buffers])  # noqa: S301 - written one line above


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.float64, np.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3), (500, 40)])
def test_an_array_keeps_its_values_and_can_be_written_to(shape: tuple[int, ...], dtype: Any) -> None:
    original = (np.arange(int(np.prod(shape))) % 7).reshape(shape).astype(dtype)
    array = deserialised(original)
    assert is_read_only(array)
    replace_memory(array, "x")
    assert not is_read_only(array)
    assert (array.dtype, array.shape, array.tobytes()) == (original.dtype, shape, original.tobytes())
    array[...] = 1
    assert (array == 1).all()
    assert original.tobytes() == deserialised(original).tobytes()


@pytest.mark.parametrize("length", [10, 100_000])
def test_what_looked_at_the_bytes_before_sees_what_it_saw(length: int) -> None:
    stored = np.arange(length).tobytes()
    array = np.frombuffer(stored, int).reshape(length)
    before = memoryview(array)
    replace_memory(array, "x")
    array += 1
    assert before.tobytes() == stored
    assert array[0] == 1


def fixed(array: Any) -> Any:
    array.flags.writeable = False
    return array


class Kind(np.ndarray[Any, Any]):
    """Not quite NumPy's."""


REFUSED = {
    "its own memory": lambda: (fixed(np.zeros(3)),),
    "a view of an array": lambda: (fixed(np.zeros(6)[:3]),),
    "a view of memory that can be written to": lambda: (fixed(np.frombuffer(bytearray(8), np.uint8).reshape(8)),),
    "a buffer of somebody": lambda: (np.frombuffer(bytes(8), np.uint8),),
    "a kind of array": lambda: (deserialised(np.zeros(3)).view(Kind),),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_was_made_read_only_otherwise_is_refused(what: str) -> None:
    (array,) = REFUSED[what]()
    with pytest.raises(TensorMismatchError, match=r"x: expected .*; found an array made read-only in another way"):
        replace_memory(array, "x")
    assert is_read_only(array)


@pytest.mark.parametrize("view", [lambda array: array[:2], lambda array: array.reshape(-1), lambda array: array.T])
def test_an_array_at_whose_bytes_another_looks_is_refused(view: Any) -> None:
    array = deserialised(np.zeros((3, 1)))
    other = view(array)
    for one in (array, other):
        with pytest.raises(TensorMismatchError, match="another array that uses the same memory"):
            replace_memory(one, "x")
    del other, one
    replace_memory(array, "x")


def test_a_strided_one_is_refused() -> None:
    array = deserialised(np.zeros((3, 4)))[:, 0]
    with pytest.raises(TensorMismatchError, match="contiguous"):
        replace_memory(array, "x")
