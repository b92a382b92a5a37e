"""Facts about a layer and its call as JSON, which configs mention and fingerprints hash.

Rules
- Values that do the same are written the same, in every process and on every platform.
- Arrays and functions become digests of what they hold, never of where they lie in memory or in a file.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from .arrays import as_bytes, as_numpy

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""What JSON can write."""


def fact(value: object) -> Json:
    """Write any value that configures a layer as JSON, equal for values that do the same.

    Arrays and functions become digests of what they hold, never of where they lie in memory or in a file.

    >>> fact((1, slice(0, 2), np.float32(0.5)))
    [1, {'slice': [0, 2, None]}, 0.5]
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, np.dtype):
        return cast(Any, value).name
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return fact(cast(Any, value).item())
    if isinstance(value, slice):
        return {"slice": [fact(part) for part in _parts(cast(Any, value))]}
    if isinstance(value, Mapping):
        return {str(key): fact(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [fact(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted((fact(item) for item in cast("Iterable[object]", value)), key=json.dumps)
    if isinstance(value, (complex, bytes)) or value is Ellipsis:
        return repr(value)
    if isinstance(value, FunctionType):
        return {"function": _digest(_function_facts(value))}
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{cast(Any, value).__qualname__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = as_numpy(value, "constant of a layer")
        content = blake2b(as_bytes(array).data, digest_size=16).hexdigest()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "content": content}
    if type(value).__name__ in ("dtype", "device", "DType"):  # of torch and TensorFlow
        return str(getattr(value, "name", value))
    return type(value).__name__


def call_facts(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    reference: Callable[[object], tuple[str, int] | None],
) -> tuple[list[str], dict[str, Json]]:
    """Split the arguments of a layer's call into its inputs and what else matters about the call.

    Args:
        function: what is called; its signature puts keyword arguments in order.
        args: positional arguments, which may nest.
        kwargs: keyword arguments.
        reference: tells which vertex, and which of its outputs, an argument stands for; None for a constant.

    Returns:
        Names of the vertices it takes, in order; and the arguments, where an input is written as its number
        in that order. The latter is empty for a call that only hands over first outputs in the usual places.

    >>> call_facts(lambda x, y=None: x, ["a", 2.0], {}, lambda v: (v, 0) if isinstance(v, str) else None)
    (['a'], {'x': {'input': 0}, 'y': 2.0})
    """
    arguments, usual = _bound(function, args, kwargs)
    inputs: list[str] = []

    def write(value: object) -> Json:
        nonlocal usual
        source = reference(value)
        if source is not None:
            inputs.append(source[0])
            usual = usual and source[1] == 0
            index = len(inputs) - 1
            return {"input": index, "output": source[1]} if source[1] else {"input": index}
        if isinstance(value, (list, tuple)):
            return [write(item) for item in cast("Sequence[object]", value)]
        usual = False
        if isinstance(value, Mapping):
            return {str(key): write(item) for key, item in cast("Mapping[object, object]", value).items()}
        if isinstance(value, slice):
            return {"slice": [write(part) for part in _parts(cast(Any, value))]}
        return fact(value)

    written = {name: write(value) for name, value in arguments.items()}
    return inputs, {} if usual else written


def _parts(bounds: slice[object, object, object]) -> list[object]:
    return [bounds.start, bounds.stop, bounds.step]


def _bound(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[dict[str, object], bool]:
    """Arguments by parameter, those that are None left out; and whether they fill the first parameters."""
    try:
        taken = _signature(function)
        parameters = taken.parameters
        if taken.one_by_one and not kwargs and len(args) <= len(parameters):
            arguments = dict(zip(parameters, args, strict=False))
        else:
            arguments = dict(taken.signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # builtins without a signature, and calls through proxies
        arguments = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
        parameters = [str(index) for index in range(len(args))]
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None and not (name == "training" and value is False)
    }
    return given, list(given) == parameters[: len(given)]


class _Taken(NamedTuple):
    """What a function can be called with."""

    signature: inspect.Signature
    parameters: list[str]
    """Their names."""
    one_by_one: bool
    """Whether positional arguments fill them one by one."""


def _signature(function: Callable[..., object]) -> _Taken:
    """Return what a function takes. That of a method is read once for all objects of its class."""
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        return _signature_of_method(function.__func__)
    signature = inspect.signature(function)
    return _Taken(signature, list(signature.parameters), False)


@lru_cache(maxsize=1024)
def _signature_of_method(function: FunctionType) -> _Taken:
    signature = inspect.signature(MethodType(function, object()))
    parameters = signature.parameters
    one_by_one = all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters.values())
    return _Taken(signature, list(parameters), one_by_one)


def _function_facts(function: FunctionType) -> list[Json]:
    cells: list[Json] = []
    for cell in function.__closure__ or ():
        try:
            content: object = cell.cell_contents
        except ValueError:  # a name that is not bound yet
            content = None
        cells.append(content.__qualname__ if isinstance(content, FunctionType) else fact(content))
    defaults = [fact(function.__defaults__), fact(function.__kwdefaults__)]
    return [_code_facts(function.__code__), defaults, cells]


def _code_facts(code: CodeType) -> list[Json]:
    """What a code object does, without its file, its line numbers and its name."""
    constants = [_code_facts(item) if isinstance(item, CodeType) else fact(item) for item in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _digest(facts: object) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
