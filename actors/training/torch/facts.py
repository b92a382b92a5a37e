"""What of a PyTorch training is no tensor, as JSON-like facts: tuples, dicts and random generators.

Rules
- Nothing is pickled. A value that cannot be written is a ValueError that names it.
- What is read has the types of what was written: a schedule may tell a tuple from a list, and needs numbers as keys.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ....store.facts import Json


def encode(value: object, where: str) -> Json:
    """Write a value as JSON-like facts.

    Args:
        value: None, numbers, strings, and lists, tuples and dicts of such.
        where: what it is, for the error's message.

    Raises:
        ValueError: something else; names it.

    >>> encode({"betas": (0.9, 0.99), 3: None}, "a group")
    {'dict': [['betas', {'tuple': [0.9, 0.99]}], [3, None]]}
    """
    if isinstance(value, np.generic):
        value = cast(Any, value).item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{place}]") for place, item in enumerate(cast("list[object]", value))]
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return {"tuple": [encode(item, f"{where}[{place}]") for place, item in enumerate(items)]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        entries = cast("Mapping[object, object]", value).items()
        return {kind: [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in entries]}
    raise ValueError(
        f"{where}: expected numbers, strings, and lists, tuples and dicts of them; found {type(value).__qualname__}"
    )


def decode(value: object) -> Any:
    """Read what `encode` wrote.

    >>> decode(encode({"betas": (0.9, 0.99), 3: None}, "a group"))
    {'betas': (0.9, 0.99), 3: None}
    """
    if isinstance(value, list):
        return [decode(item) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = cast("Mapping[str, Any]", value).items()
    if kind == "tuple":
        return tuple(decode(item) for item in content)
    items = {decode(key): decode(item) for key, item in content}
    return Counter(items) if kind == "counter" else items


def random_facts() -> dict[str, object]:
    """Return the states of Python's and NumPy's global generators."""
    kind, key, *rest = np.random.get_state()
    return {
        "python": encode(random.getstate(), "Python's random state"),
        "numpy": [kind, np.asarray(key).tolist(), *rest],
    }


def set_random(facts: Mapping[str, Any]) -> None:
    """Set Python's and NumPy's global generators to what `random_facts` gave."""
    random.setstate(decode(facts["python"]))
    kind, key, *rest = facts["numpy"]
    np.random.set_state((kind, np.asarray(key, np.uint32), *rest))
