"""What of a state is no array, as JSON: tuples, dicts, bytes and numbers.

Rules
- Nothing is pickled. A value that cannot be written is an error that names it.
- What is read has the types of what was written: a schedule may tell a tuple from a list, and needs numbers as keys. So
  a value of a class that is derived from one of these, such as a named tuple, is refused.
- What a framework adds, such as tensors, it writes and reads itself.
- Where a value is kept as arrays beside tensors, its text is the array "NAME:json", and those in it are "NAME:0" and
  so on.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from .arrays import dtype_of
from .errors import TensorMismatchError
from .facts import Json

_PART = re.compile(r"(.*):(json|0|[1-9][0-9]*)", re.DOTALL)
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
Writes = Callable[[object, str], "Json | None"]
"""Takes a value, and what it is, for errors; gives a mapping of a kind to its content, or None: it is no such value."""
Reads = Callable[[str, Any], Any]
"""Takes kind and content; a KeyError says that there is no such kind."""


def base_of(name: str) -> str | None:
    """Return the name of the value that an array is part of; None: it is a tensor by itself.

    >>> base_of("head._extra_state:json"), base_of("head.weight")
    ('head._extra_state', None)
    """
    found = _PART.fullmatch(name)
    return found[1] if found is not None else None


def encode(value: object, where: str, further: Writes | None = None) -> Json:
    """Write a value as JSON-like facts.

    Args:
        value: None, numbers, strings, bytes, and lists, tuples, sets and dicts of such.
        where: what it is, for the error's message.
        further: writes values of other types.

    Raises:
        TensorMismatchError: something else; names it.

    >>> encode({"betas": (0.9, 0.99), 3: None}, "a group")
    {'dict': [['betas', {'tuple': [0.9, 0.99]}], [3, None]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return cast(Json, value)
    more = _scalar(value) or (further(value, where) if further is not None else None)
    if more is not None:
        return more
    if type(value) in (list, tuple):
        found = [encode(v, f"{where}[{place}]", further) for place, v in enumerate(cast("list[object]", value))]
        return {"tuple": found} if type(value) is tuple else found
    kind = _KINDS.get(type(value))
    if kind is not None:
        entries = cast("Mapping[object, object]", value).items()
        return {kind: [[encode(k, where, further), encode(v, f"{where}[{k!r}]", further)] for k, v in entries]}
    if type(value) in (set, frozenset):
        members = (encode(member, where, further) for member in cast("Iterable[object]", value))
        return {type(value).__name__: sorted(members, key=json.dumps)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise TensorMismatchError(
        f"{where}: expected numbers, strings, and lists, tuples, sets and dicts of them; "
        f"found {type(value).__qualname__}"
    )


def _scalar(value: object) -> Json | None:
    if not isinstance(value, np.generic):
        return None
    scalar = cast(Any, value)
    return {"scalar": [scalar.dtype.name, scalar.item()]} if scalar.dtype.kind in "biuf" else None


def decode(value: object, further: Reads | None = None) -> Any:
    """Read what `encode` wrote; what is not that raises what Python raises.

    >>> decode(encode({"betas": (0.9, 0.99), 3: None}, "a group"))
    {'betas': (0.9, 0.99), 3: None}
    """
    if isinstance(value, list):
        return [decode(item, further) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = cast("Mapping[str, Any]", value).items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key, further): decode(item, further) for key, item in content})
    if kind == "tuple":
        return tuple(decode(item, further) for item in content)
    if kind in ("set", "frozenset"):
        return {"set": set, "frozenset": frozenset}[kind](decode(item, further) for item in content)
    if kind == "scalar":
        return dtype_of(content[0]).type(content[1])
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if further is None:
        raise KeyError(kind)
    return further(kind, content)
