"""A recipe of a Keras model: text from which it is built again.

Rules
- It is what a `.keras` file holds beside the weights: configs, built shapes, and how the model was compiled.
- Code inside a recipe is refused, unless the process allowed it.
- Keras calls the public function of Keras that a recipe names, with arguments of the recipe, and some of them write
  files, use the network or change the process. So a recipe is walked before Keras reads it: it may name Keras' classes,
  its functions of tensors, and what is registered or given by `custom_objects`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (keras's types are partial, and not all that is needed is public)

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import keras
from keras.src.api_export import get_symbol_from_name
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.saving.serialization_lib import ObjectSharingScope

from ..bounds import jsontext
from ..errors import GraphError
from ..recipes import building, check_module

_WITH_FUNCTIONS = ("activations", "losses", "metrics", "ops", "quantizers", "random", "utils.bounding_boxes")
"""Packages of Keras of which functions are allowed."""
_BY_NAME = ("deserialize", "get", "serialize")
"""Functions in each of these that are not of tensors."""


def recipe_of(model: keras.Model) -> str:
    """Write the architecture as JSON text, from which `build` makes an equal model with other weights.

    It is what a `.keras` file holds beside the weights: configs, built shapes, and how it was compiled.

    Raises:
        GraphError: a part of the model has no config.
    """
    try:
        with ObjectSharingScope():
            entries = cast("dict[str, Any]", keras.saving.serialize_keras_object(model))
        flags = [layer.trainable for layer in all_layers(model)]
        return json.dumps({**entries, "trainable_flags": flags}, separators=(",", ":"))
    except (NotImplementedError, TypeError, ValueError) as exc:
        found = " ".join(str(exc).partition("Example:")[0].split())
        raise GraphError(f"recipe of model {model.name!r}: expected parts with a config; found: {found}") from exc


def build(recipe: str, custom_objects: Mapping[str, object] | None = None, *, compiled: bool = True) -> keras.Model:
    """Build the model of a recipe: architecture, names, trainable flags, and compiled if it was.

    Weights have their initial values; `assign` sets them. Code inside a recipe (a Lambda layer) is refused
    unless the process allowed it by `keras.config.enable_unsafe_deserialization()`.

    Args:
        recipe: what `recipe_of` wrote.
        custom_objects: classes and functions by name that are not registered with Keras; those of the thread's
            `keras.saving.CustomObjectScope` are known as well.
        compiled: False: it is not compiled, whether it was or not.

    Raises:
        GraphError: the text is no recipe, a class in it is not known here, or it names a function that is not of
            tensors.
    """
    expected = (
        "recipe: expected what recipe_of writes, of classes that can be imported, or are given by custom_objects="
    )
    with building(expected, _cause):
        entries = jsontext.mapping(recipe, "recipe")
        flags, how = entries.pop("trainable_flags"), entries.pop("compile_config", None)
        with ObjectSharingScope(), knowing(custom_objects):
            _check({**entries, "compile_config": how})
            model = keras.saving.deserialize_keras_object(entries)
            layers = all_layers(model)
            if len(layers) != len(flags):
                raise GraphError(
                    f"recipe: expected configs of {len(flags)} layers; found that they build {len(layers)}"
                )
            for layer, flag in zip(layers, flags, strict=True):
                if layer.trainable != flag:
                    layer.trainable = flag
            if how and compiled:  # after the flags, which say what the optimizer holds
                model.compile_from_config(how)
        if not isinstance(model, keras.Model):
            raise GraphError(f"recipe: expected that of a keras.Model; found {type(model).__name__}")
        return model


def _check(entries: object) -> None:
    """Refuse a recipe that names a function of Keras which is not of tensors, or a program."""
    left = [entries]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += cast("list[object]", value)
        elif isinstance(value, dict):
            entry = cast("dict[str, object]", value)
            left += entry.values()
            module, kind = entry.get("module"), entry.get("class_name")
            if isinstance(module, str) and isinstance(kind, str):
                _check_entry(entry, module, kind)


def _check_entry(entry: Mapping[str, object], module: str, kind: str) -> None:
    """Refuse the name of a class or function that Keras would look for in a module; what is registered goes before."""
    if kind == "function":
        names = [entry.get("config"), entry.get("registered_name")]
        names = [name for name in names if keras.saving.get_registered_object(name) is None]
    elif keras.saving.get_registered_object(entry.get("registered_name", kind)) is None:
        names = [kind, entry.get("spec_name")]
    else:
        return
    check_module(module)
    package, _, within = module.partition(".")
    for name in [name for name in names if package == "keras" and isinstance(name, str)]:
        found = get_symbol_from_name(f"{module}.{name}")
        if not (found is None or isinstance(found, type) or _is_of_tensors(within, name)):
            raise GraphError(
                "recipe: expected classes and functions of tensors of Keras, or what custom_objects= gives; "
                f"found {module}.{name}"
            )


def _is_of_tensors(package: str, name: str) -> bool:
    if package.startswith("applications."):
        return name == "preprocess_input"
    return name not in _BY_NAME and f"{package}.".startswith(tuple(f"{allowed}." for allowed in _WITH_FUNCTIONS))


def _cause(exc: BaseException) -> str:
    """Return what Keras says went wrong, without what it says of all that is around it, and whole configs."""
    inner = str(exc).rpartition("Exception encountered:")[2].partition("Full object config:")[0]
    return f"{' '.join(inner.split()):.600}" or type(exc).__name__


def knowing(custom_objects: Mapping[str, object] | None) -> AbstractContextManager[object]:
    """Have Keras know these by name, beside those of this thread's scope: an inner scope of Keras hides the outer."""
    held = cast("Mapping[str, object]", get_global_attribute("custom_objects_scope_dict", {}))
    return keras.saving.CustomObjectScope({**held, **(custom_objects or {})})


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers in it, outer before inner; an InputLayer comes and goes with building."""
    return [layer for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)]
