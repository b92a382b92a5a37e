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
    """Return the recipe of a model: JSON text from which `build` creates the same model with initial weights.

    The recipe contains the configs and input shapes of the layers, the trainable flags and the arguments of `compile`.
    The recipe does not contain weights.

    Raises:
        GraphError: if a part of the model, such as a layer or a loss, cannot be written as a config.
    """
    try:
        with ObjectSharingScope():
            entries = cast("dict[str, Any]", keras.saving.serialize_keras_object(model))
        flags = [layer.trainable for layer in all_layers(model)]
        return json.dumps({**entries, "trainable_flags": flags}, separators=(",", ":"))
    except (NotImplementedError, TypeError, ValueError) as exc:
        found = " ".join(str(exc).partition("Example:")[0].split())
        raise GraphError(f"recipe of model {model.name!r}: expected all parts to have a config; found {found}") from exc


def build(recipe: str, custom_objects: Mapping[str, object] | None = None, *, compiled: bool = True) -> keras.Model:
    """Build a model from a recipe, with the architecture, names and trainable flags of the original model.

    The weights have initial values. Use `assign` to set saved values. Recipes that contain Python code (Lambda layers)
    are rejected unless this process has called `keras.config.enable_unsafe_deserialization()`.

    Args:
        recipe: Text from `recipe_of`.
        custom_objects: Mapping of names to classes and functions that are not registered with Keras. Objects of the
            active `keras.saving.CustomObjectScope` do not need to be passed.
        compiled: Whether to compile the model. Ignored if the original model was not compiled.

    Raises:
        GraphError: if the text is not a recipe, the recipe contains Python code that is not allowed, a class in the
            recipe is not available in this process, or the recipe names a Keras function that does not operate on
            tensors.
    """
    expected = "recipe: expected a text from recipe_of with classes that can be imported or are in custom_objects="
    with building(expected, _cause):
        entries = jsontext.mapping(recipe, "recipe")
        flags, how = entries.pop("trainable_flags"), entries.pop("compile_config", None)
        with ObjectSharingScope(), knowing(custom_objects):
            _check({**entries, "compile_config": how})
            model = keras.saving.deserialize_keras_object(entries)
            layers = all_layers(model)
            if len(layers) != len(flags):
                raise GraphError(f"recipe: expected configs of {len(flags)} layers; found configs of {len(layers)}")
            for layer, flag in zip(layers, flags, strict=True):
                if layer.trainable != flag:
                    layer.trainable = flag
            if how and compiled:  # after the flags, which say what the optimizer holds
                model.compile_from_config(how)
        if not isinstance(model, keras.Model):
            raise GraphError(f"recipe: expected the recipe of a keras.Model; found that of a {type(model).__name__}")
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
                "recipe: expected classes of Keras, its functions on tensors, and names in custom_objects=; "
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
    """Return a context manager that registers classes and functions with Keras.

    Objects of a surrounding `keras.saving.CustomObjectScope` stay registered.

    Args:
        custom_objects: Mapping of names to classes and functions, or None.
    """
    held = cast("Mapping[str, object]", get_global_attribute("custom_objects_scope_dict", {}))
    return keras.saving.CustomObjectScope({**held, **(custom_objects or {})})


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the model and all its nested layers except input layers. Each layer precedes the layers inside it.

    Input layers are left out because Keras can add an input layer when it builds the model.
    """
    return [layer for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)]
