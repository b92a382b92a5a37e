"""Configs of Keras layers: what an operation computes, without names, trainable flags and dtype policies."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import cast

import keras

from ..facts import Json, fact
from .kept import without_learned


def config_of(operation: keras.Operation) -> dict[str, Json]:
    """What an operation computes: its config without name, trainable flag and dtype policy."""
    try:
        config: Mapping[str, object] = operation.get_config()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        names = list(signature(type(operation).__init__).parameters)[1:]
        config = {name: getattr(operation, name) for name in names if hasattr(operation, name)}
    kind = next((base.__name__ for base in type(operation).__mro__ if base.__module__.startswith("keras.")), "")
    config = without_learned(kind, config)
    kept = {key: value for key, value in config.items() if key not in ("name", "trainable")}
    if isinstance(operation, keras.layers.Lambda):
        kept["function"] = operation.function  # Keras's own encoding depends on the file's lines
    if isinstance(operation, keras.Layer) and not isinstance(operation, keras.layers.InputLayer):
        kept.pop("dtype", None)
    return cast("dict[str, Json]", fact(_without_noise(kept)))


def _without_noise(value: object) -> object:
    """Drop names, trainable flags, dtype policies and built shapes from objects that Keras serialized."""
    if isinstance(value, (list, tuple)):
        return [_without_noise(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, object]", value)
    given = entries.get("config")
    if isinstance(given, dict) and "class_name" in entries:
        noise = ("name", "trainable", "dtype") if "name" in given else ()
        told = without_learned(str(entries["class_name"]), cast("dict[str, object]", given))
        config = {key: item for key, item in told.items() if key not in noise}
        entries = {"class_name": entries["class_name"], "config": _numbered(config)}
    return {key: _without_noise(item) for key, item in entries.items()}


def _numbered(config: dict[str, object]) -> object:
    """In the config of a model inside a layer, call its layers by number, for their names are automatic."""
    layers = config.get("layers")
    if not isinstance(layers, list):
        return config
    listed = cast("list[dict[str, object]]", layers)
    numbers = {entry["name"]: f"layer {index}" for index, entry in enumerate(listed) if "name" in entry}

    def rename(value: object) -> object:
        if isinstance(value, dict):
            return {key: rename(item) for key, item in cast("dict[str, object]", value).items()}
        if isinstance(value, (list, tuple)):
            return [rename(item) for item in cast("list[object]", value)]
        return numbers.get(value, value) if isinstance(value, str) else value

    return rename(config)
