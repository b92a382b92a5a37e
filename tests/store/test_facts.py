"""What configures a layer is written as JSON that is equal for values that do the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensorvine.store.facts import call_facts, fact


def _vertex(value: object) -> tuple[str, int] | None:
    return (value[0], int(value[1:] or 0)) if isinstance(value, str) else None


def _attention(query, value, key=None, training=None):
    raise NotImplementedError


def test_facts_of_functions_depend_on_what_they_do_only() -> None:
    scale = 2

    def one(x: float) -> float:
        return x * scale

    def two(x: float) -> float:
        return x * scale

    assert fact(one) == fact(two)
    assert fact(one) != fact(lambda x: x + scale)
    scale = 3
    assert fact(one) == fact(two)


def test_facts_of_arrays_are_digests_of_their_content() -> None:
    assert fact(np.arange(3)) == fact(torch.arange(3))
    assert fact(np.arange(3)) != fact(np.arange(3)[::-1])
    assert fact(np.arange(3)) != fact(np.arange(3, dtype="int32"))


def test_facts_are_json_for_anything() -> None:
    values = [float("nan"), 1j, b"a", ..., {3: {2, 1}}, np.dtype("int8"), torch.float32, len, object(), Path]
    assert fact(values) == [
        "nan", "1j", "b'a'", "Ellipsis", {"3": [1, 2]}, "int8", "torch.float32", "builtins.len", "object",
        f"{Path.__module__}.Path",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "kwargs", "inputs", "call"),
    [
        (["q", "v"], {}, ["q", "v"], {}),
        ([], {"value": "v", "query": "q"}, ["q", "v"], {}),
        ([["q", "v"]], {}, ["q", "v"], {}),
        (["q", "v", "k"], {"training": False}, ["q", "v", "k"], {}),
        (["q"], {"key": "k"}, ["q", "k"], {"query": {"input": 0}, "key": {"input": 1}}),
        (["q1", "v"], {}, ["q", "v"], {"query": {"input": 0, "output": 1}, "value": {"input": 1}}),
        (["q", 2], {"training": True}, ["q"], {"query": {"input": 0}, "value": 2, "training": True}),
        (["q", "v", None, None], {}, ["q", "v"], {}),
    ],
)
def test_only_what_a_call_adds_is_written(args, kwargs, inputs, call) -> None:
    assert call_facts(_attention, args, kwargs, _vertex) == (inputs, call)
