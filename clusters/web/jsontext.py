"""JSON that every browser reads back without a loss.

Rules
- NaN and infinity are the strings "NaN", "Infinity" and "-Infinity"; JSON has no such numbers.
- Integers that a double cannot hold are strings.
- The text is ASCII, so a lone surrogate in a name does no harm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import cast

from ...store.refs import ModelRef

EXACT = 1 << 53
"""Integers up to this one are exact in a double."""


def dumps(value: object) -> bytes:
    """Write a value as JSON.

    >>> dumps({"a": [float("nan"), -float("inf"), 2**60, "<b>"]})
    b'{"a":["NaN","-Infinity","1152921504606846976","<b>"]}'
    """
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def plain(value: object) -> object:
    """Return a value made of what JSON has."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _number(value)
    if isinstance(value, int):
        return value if -EXACT <= value <= EXACT else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in cast("list[object]", value)]
    if is_dataclass(value) and not isinstance(value, type):
        return str(value) if isinstance(value, ModelRef) else plain(asdict(value))
    return str(value)


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
