"""A recipe of a module: JSON text from which the module is built again.

Rules
- A recipe has a stated factory with arguments, the config of a Hugging Face model, the hyperparameters of a Lightning
  module, or the kinds and arguments of modules of torch.nn (`layers`). Other modules have no recipe.
- Nothing is pickled. The names in a recipe need the caller's permission (`factories`), except torch.nn.
- Flags (`training`, `requires_grad`) and dtypes are set after the module is built. Hooks, and buffers that are not
  stored, must be those of the saved module.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypedDict, cast

import torch
import xxhash
from torch import nn

from ..arrays import as_bytes, as_numpy
from ..bounds import jsontext
from ..errors import GraphError, TensorMismatchError
from ..facts import Json
from ..recipes import TORCH, building, is_note
from ..values import decode, encode
from . import layers
from .factories import Factory, checked_name, given_factory, name_of, permitted
from .inference import to_inference
from .state import bare
from .values import dtype_called

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict))
_NAMED = ("factory", "config", "hparams")
"""Kinds of recipes with a name and arguments. The key of the name is the kind."""
_REMOTE_CODE = "auto_map"
"""Key of a config that names code in a repository of Hugging Face."""


class _Flags(TypedDict):
    """The part of a recipe that all kinds have."""

    dtypes: Mapping[str, str]
    training: bool
    otherwise: Sequence[str]
    frozen: Sequence[str]
    hooks: Mapping[str, int]
    unsaved: Mapping[str, str]


def recipe_of(module: nn.Module, factory: str | None = None, arguments: Mapping[str, object] | None = None) -> str:
    """Return the recipe of a module: JSON text from which `build` creates the same module with initial weights.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.
        factory: Name of the function or class that builds the module, such as "package.module:function". It is not
            imported. None uses the Hugging Face `config`, Lightning's `hparams`, or the modules of torch.nn.
        arguments: Keyword arguments of `factory`: None, bools, numbers, strings, bytes, and lists, tuples, sets and
            dicts of these.

    Raises:
        GraphError: if the name has another form, an argument cannot be stored, or without `factory`, if the module is
            of another kind.

    >>> build(recipe_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
    Sequential(
      (0): Linear(in_features=4, out_features=2, bias=True)
      (1): ReLU()
    )
    """
    module = bare(module)
    try:
        found = _stated(factory, arguments or {}) if factory is not None else _found(module)
        return json.dumps({TORCH: {**found, **_flags_of(module)}}, separators=(",", ":"))
    except (GraphError, TensorMismatchError) as exc:
        raise GraphError(str(exc)) from exc
    except Exception as exc:  # of the user's properties and configurations
        raise GraphError(f"{type(module).__qualname__}: expected attributes that can be read; found {exc!r}") from exc


def _stated(factory: str, arguments: Mapping[str, object]) -> dict[str, Json]:
    return {"factory": checked_name(factory), "arguments": _written(factory, arguments)}


def _found(module: nn.Module) -> dict[str, Json]:
    """Return what the module itself says about its construction."""
    kind = type(module)
    config, hparams = getattr(module, "config", None), getattr(module, "hparams", None)
    config_class = getattr(kind, "config_class", None)
    if isinstance(config_class, type) and isinstance(config, config_class):
        return _of_class("config", kind, cast("Any", config).to_dict())
    if isinstance(hparams, Mapping) and hparams:
        parameters = inspect.signature(kind.__init__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        given = {name: value for name, value in hparams.items() if takes_all or name in parameters}
        return _of_class("hparams", kind, given)
    try:
        return {"model": layers.written(module)}
    except (GraphError, TensorMismatchError) as exc:
        raise GraphError(
            f"{kind.__qualname__}: expected factory= of save_model, a Hugging Face config, hparams of Lightning, or "
            f"only modules of torch.nn; found none of these ({exc})"
        ) from exc


def _of_class(how: str, kind: type[nn.Module], arguments: Mapping[str, object]) -> dict[str, Json]:
    name = checked_name(name_of(kind))
    _check_no_remote_code(name, arguments)
    return {how: name, "arguments": _written(name, arguments)}


def _written(name: str, arguments: Mapping[str, object]) -> dict[str, Json]:
    return {key: encode(value, f"argument {key!r} of {name}") for key, value in arguments.items()}


def _check_no_remote_code(name: str, value: object) -> None:
    """Reject a config with code that is not part of an installed package."""
    if isinstance(value, Mapping):
        held = cast("Mapping[object, object]", value)
        if _REMOTE_CODE in held:
            raise GraphError(
                f"{name}: expected a config without {_REMOTE_CODE!r}, which names code that is not installed; "
                f"found {held[_REMOTE_CODE]!r:.200}"
            )
        value = list(held.values())
    for item in cast("list[object]", value) if isinstance(value, (list, tuple)) else ():
        _check_no_remote_code(name, item)


def _flags_of(module: nn.Module) -> _Flags:
    mode, modules = module.training, list(module.named_modules())
    return {
        "dtypes": {name: str(item.dtype) for name, item in _tensors_of(module)},
        "training": mode,
        "otherwise": [path for path, item in modules if item.training is not mode],
        "frozen": [
            f"{path}.{name}" if path else name
            for path, item in modules
            for name, tensor in item._parameters.items()
            if tensor is not None and not tensor.requires_grad
        ],
        "hooks": _hooks_of(modules),
        "unsaved": _unsaved_of(modules),
    }


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _hooks_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    counts = ((path, _hooks_at(item)) for path, item in modules)
    return {path: count for path, count in counts if count}


def _hooks_at(module: nn.Module) -> int:
    """Return the number of hooks of a module and its parameters."""
    held: list[Any] = [vars(module)[name] for name in _HOOKS]
    for tensor in module._parameters.values():
        held += [getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return sum(hook is not to_inference for hooks in held if hooks for hook in hooks.values())


def _unsaved_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return digests of the values of buffers that are not stored, by their paths."""
    return {
        f"{path}.{name}" if path else name: _digest(buffer)
        for path, item in modules
        for name, buffer in item._buffers.items()
        if name in item._non_persistent_buffers_set and buffer is not None
    }


def _digest(tensor: torch.Tensor) -> str:
    found: list[Json] = [list(tensor.shape), str(tensor.dtype)]
    if not (tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided):
        found.append(xxhash.xxh3_128_hexdigest(as_bytes(as_numpy(tensor, "a buffer")).data))
    return blake2b(json.dumps(found, separators=(",", ":")).encode(), digest_size=6).hexdigest()


def build(recipe: str, factory: Factory | str | None = None, trusted_packages: Collection[str] = ()) -> nn.Module:
    """Build a module from a recipe, on the CPU.

    The dtypes and the `training` and `requires_grad` flags are those of the original module. The weights have the
    values that the constructors set. Use `assign` to set other values.

    Args:
        recipe: Text from `recipe_of`.
        factory: Function or class that builds the module, or its name "package.module:function". It is called with the
            stored arguments, instead of the function or class that the recipe names.
        trusted_packages: Packages, such as "transformers", whose functions and classes may be imported and called if
            the recipe names them. Functions from `register_factory` may always be called.

    Raises:
        GraphError: if the text is not a recipe, the recipe names a function or class without permission, the factory
            raises an error, or the built module has other tensors, hooks or unsaved buffers than the saved module.
    """
    with building("recipe: expected a text from recipe_of"):
        content: dict[str, Any] = {} if is_note(recipe) else jsontext.mapping(recipe, "recipe")[TORCH]
        with torch.device("cpu"):
            module = _built(content, factory, trusted_packages)
        if content:
            _finish(module, cast(_Flags, content))
        return module


def _built(content: Mapping[str, Any], factory: Factory | str | None, trusted: Collection[str]) -> nn.Module:
    kind = next((kind for kind in _NAMED if kind in content), None)
    if kind is None:
        return layers.built(content["model"]) if factory is None else _called(given_factory(factory))
    name, call = content[kind], permitted(content[kind], factory, trusted)
    arguments = {key: decode(value) for key, value in content["arguments"].items()}
    if kind == "factory":
        return _called(call, **arguments)
    _check_no_remote_code(name, arguments)
    if kind == "hparams":
        return _called(call, **arguments)
    with building(f"{name}: expected a class with the attribute config_class, as in transformers"):
        config = cast("Any", call).config_class.from_dict(arguments)
    return _called(call, config)


def _called(call: Factory, *args: object, **kwargs: object) -> nn.Module:
    what = f"{getattr(call, '__qualname__', call)}({', '.join([*(type(arg).__name__ for arg in args), *kwargs])})"
    with building(f"{what}: expected the call to succeed"):
        module = call(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise GraphError(f"{what}: expected a torch module; found {type(module).__name__}")
    return module


def _finish(module: nn.Module, flags: _Flags) -> None:
    """Set flags and dtypes, and reject a module that differs from the saved module."""
    tensors, modules, kind = dict(_tensors_of(module)), dict(module.named_modules()), type(module).__qualname__
    _compare(kind, "parameter or buffer", dict.fromkeys(flags["dtypes"]), dict.fromkeys(tensors))
    for name, tensor in tensors.items():
        dtype = dtype_called(flags["dtypes"][name])
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    _compare(kind, "number of hooks of module", flags["hooks"], _hooks_of(modules.items()))
    _compare(kind, "unsaved buffer", flags["unsaved"], _unsaved_of(modules.items()))
    otherwise, frozen, mode = set(flags["otherwise"]), set(flags["frozen"]), bool(flags["training"])
    for path, item in modules.items():
        item.training = mode is not (path in otherwise)
    for name, item in module.named_parameters():
        item.requires_grad_(name not in frozen)


def _compare(kind: str, what: str, saved: Mapping[str, object], built: Mapping[str, object]) -> None:
    differ = saved.items() ^ built.items()
    if differ:
        name = min(name for name, _ in differ)
        raise GraphError(f"recipe: expected {kind} to be built as it was saved; the {what} {name!r} differs")
