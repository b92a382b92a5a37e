"""Messages: what is copied, what travels after the pickle, and what travels by value."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tensorvine.actors.engine.sockets.packing import APART_BYTES, Packed, immutable, pack


def unpacked(message: Packed) -> Any:
    return pickle.loads(message.pickled, buffers=message.buffers)  # noqa: S301  packed by this test


def test_a_large_buffer_that_can_change_is_copied() -> None:
    array = np.ones(APART_BYTES, np.uint8)
    message = pack(array)
    array[:] = 0
    assert unpacked(message).all()
    assert message.nbytes == len(message.pickled) + array.nbytes


@pytest.mark.parametrize("shape", [(APART_BYTES,), (2, APART_BYTES // 2)])
def test_an_immutable_buffer_is_not_copied(shape: tuple[int, ...]) -> None:
    array = immutable(np.ones(shape, np.uint8))
    (buffer,) = pack([array[:]]).buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 0


def test_a_small_buffer_is_in_the_pickle() -> None:
    message = pack(np.ones(APART_BYTES - 1, np.uint8))
    assert not message.buffers
    assert unpacked(message).all()


def test_arrays_of_every_layout_are_unchanged() -> None:
    array = np.arange(4 * APART_BYTES).reshape(4, -1)
    for given in (array, array.T, array[:, ::2], array[::-1], np.asfortranarray(array)):
        assert np.array_equal(unpacked(pack(given)), given)


def test_a_function_without_a_name_travels_by_value_with_its_arrays() -> None:
    array = np.ones(APART_BYTES, np.uint8)
    message = pack((lambda: 42, array))
    function, found = unpacked(message)
    assert function() == 42
    assert len(message.buffers) == 1
    assert np.array_equal(found, array)


@pytest.mark.parametrize("module", ["__main__", "registered"])
def test_functions_of_a_program_and_of_registered_modules_travel_by_value(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = types.ModuleType(module)
    exec("def answer():\n    return 42", program.__dict__)  # noqa: S102  a program of this test
    monkeypatch.setitem(sys.modules, module, program)
    if module == "registered":
        cloudpickle.register_pickle_by_value(program)
    try:
        message = pack(program.answer)
    finally:
        if module == "registered":
            cloudpickle.unregister_pickle_by_value(program)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert unpacked(message)() == 42
