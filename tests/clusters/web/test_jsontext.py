"""JSON of the web page: every value becomes JSON that browsers read."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from tensorvine.clusters.web.jsontext import EXACT, dumps
from tensorvine.store import ModelRef

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def as_read(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    if isinstance(value, dict):
        return {key: as_read(one) for key, one in value.items()}
    return [as_read(one) for one in value] if isinstance(value, list) else value


@given(VALUES)
def test_every_value_is_read_back(value: object) -> None:
    text = dumps(value)
    assert text.isascii()
    assert json.loads(text, parse_constant=refuse) == as_read(value)


def test_a_reference_is_text() -> None:
    assert dumps({"ref": ModelRef("a/b", 3), "all": (ModelRef("c", 1),)}) == b'{"ref":"a/b@3","all":["c@1"]}'


def test_a_lone_surrogate_is_escaped() -> None:
    assert dumps("\ud800") == b'"\\ud800"'
