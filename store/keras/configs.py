"""Configs of Keras layers: what an operation computes, without names, trainable flags and dtype policies."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

from inspect import signature
from typing import Any, cast

import keras

from ..facts import fact


def config_of(operation: Any) -> dict[str, Any]:
    """What an operation computes: its config without name, trainable flag and dtype policy."""
    try:
        config: dict[str, Any] = operation.get_config()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        names = list(signature(type(operation).__init__).parameters)[1:]
        config = {name: getattr(operation, name) for name in names if hasattr(operation, name)}
    config = {key: value for key, value in config.items() if key not in ("name", "trainable")}
    if isinstance(operation, keras.layers.Lambda):
        config["function"] = operation.function  # Keras's own encoding depends on the file's lines
    if isinstance(operation, keras.Layer) and not isinstance(operation, keras.layers.InputLayer):
        config.pop("dtype", None)
    return cast("dict[str, Any]", fact(_without_noise(config)))


def _without_noise(value: object) -> Any:
    """Drop names, trainable flags, dtype policies and built shapes from objects that Keras serialized."""
    if isinstance(value, (list, tuple)):
        return [_without_noise(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if isinstance(entries.get("config"), dict) and "class_name" in entries:
        noise = ("name", "trainable", "dtype") if "name" in entries["config"] else ()
        config = {key: item for key, item in entries["config"].items() if key not in noise}
        entries = {"class_name": entries["class_name"], "config": _numbered(config)}
    return {key: _without_noise(item) for key, item in entries.items()}


def _numbered(config: dict[str, Any]) -> dict[str, Any]:
    """In the config of a model inside a layer, call its layers by number, for their names are automatic."""
    layers = config.get("layers")
    if not isinstance(layers, list):
        return config
    listed = cast("list[dict[str, Any]]", layers)
    numbers = {entry["name"]: f"layer {index}" for index, entry in enumerate(listed) if "name" in entry}

    def rename(value: object) -> Any:
        if isinstance(value, dict):
            return {key: rename(item) for key, item in cast("dict[str, Any]", value).items()}
        if isinstance(value, (list, tuple)):
            return [rename(item) for item in cast("list[Any]", value)]
        return numbers.get(value, value) if isinstance(value, str) else value

    return rename(config)
