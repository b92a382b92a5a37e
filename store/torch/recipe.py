"""A recipe of a module: text from which its class builds it again.

Rules
- It has the names of classes, and what their constructors were given as far as the modules tell (`constructors`), as
  JSON. Nothing is pickled. To build it, the classes' files are imported and the constructors called.
- What is no module, such as a function or a configuration, must be of PyTorch, or of the package of the module's class
  or of one of its bases.
- A constructor may have been given what the module does not tell, and a module may have been changed afterwards. So the
  recipe has digests of what each module holds (`contents`); what is built and differs is an error that names it.
- Flags (`training`, `requires_grad`) and dtypes are set after it is built. Buffers that are not stored must be what the
  constructor makes of them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import nn

from ..bounds import jsontext
from ..errors import GraphError, TensorMismatchError
from ..facts import Json
from ..recipes import TORCH, building
from ..values import decode, encode
from .constructors import arguments_of, is_container
from .contents import contents_of, unsaved_of
from .importable import allowed_name, name_of, named, packages_of
from .inference import to_inference
from .signature import Known, signature
from .state import bare
from .values import dtype_called
from .vertices import Architecture

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict))
_known: Known[str] = Known()


class _Content(TypedDict):
    """What a recipe says."""

    model: Json
    contents: Mapping[str, str]
    dtypes: Mapping[str, str]
    training: bool
    otherwise: Sequence[str]
    frozen: Sequence[str]
    hooks: Mapping[str, int]
    unsaved: Mapping[str, str]
    whole: NotRequired[bool]
    """Digests are of whole tensors; earlier versions have no such entry, and digests of samples."""


def recipe_of(module: nn.Module, architecture: Architecture | None = None) -> str:
    """Return the recipe of a module: JSON text from which `build` creates the same module with initial weights.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.
        architecture: Result of `architecture_of` for the module, if already available.

    Raises:
        GraphError: if a class cannot be imported by name, or a constructor argument cannot be read from the module's
            attributes or written as JSON. The message names the class or the argument.

    >>> build(recipe_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
    Sequential(
      (0): Linear(in_features=4, out_features=2, bias=True)
      (1): ReLU()
    )
    """
    module = bare(module)
    try:
        if not is_container(module):
            arguments_of(module)  # where the module itself does not tell, it is not looked into
        key = architecture.key if architecture is not None else signature(module)
        made = _known.find(key)
        if made is None:
            made = _made_of(module)
            if key is not None and signature(module) == key:  # no other thread has changed it meanwhile
                _known.keep(key, made)
        return f'{{"{TORCH}":{{{made},{_flags_of(module)}}}}}'
    except GraphError:
        raise
    except Exception as exc:  # of the user's properties and configurations
        raise GraphError(f"{type(module).__qualname__}: expected attributes that can be read; found {exc!r}") from exc


def _made_of(module: nn.Module) -> str:
    """Write what follows from the signature."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    made = {
        "model": _Writer(packages_of(type(module))).module(module, type(module).__qualname__),
        "contents": contents_of(module),
        "whole": True,
        "dtypes": {name: str(item.dtype) for name, item in tensors},
    }
    return json.dumps(made, separators=(",", ":"))[1:-1]


def _flags_of(module: nn.Module) -> str:
    mode, modules = module.training, list(module.named_modules())
    flags = {
        "training": mode,
        "otherwise": [path for path, item in modules if item.training is not mode],
        "frozen": [
            f"{path}.{name}" if path else name
            for path, item in modules
            for name, tensor in item._parameters.items()
            if tensor is not None and not tensor.requires_grad
        ],
        "hooks": _hooks_of(modules),
        "unsaved": unsaved_of(module),
    }
    return json.dumps(flags, separators=(",", ":"))[1:-1]


def _hooks_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    counts = ((path, _hooks_at(item)) for path, item in modules)
    return {path: count for path, count in counts if count}


def _hooks_at(module: nn.Module) -> int:
    """Return how many hooks a module and its parameters have."""
    held: list[Any] = [vars(module)[name] for name in _HOOKS]
    for tensor in module._parameters.values():
        held += [getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return sum(hook is not to_inference for hooks in held if hooks for hook in hooks.values())


class _Writer:
    """Writes modules as JSON, each once.

    Args:
        allowed: the packages of which functions and configurations may be.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._written: dict[int, int] = {}
        """id of a module -> how many were written before it."""
        self._open: set[int] = set()
        """ids of the modules that are being written."""

    def module(self, module: nn.Module, where: str) -> Json:
        if id(module) in self._written:
            return {"again": self._written[id(module)]}
        if id(module) in self._open:
            raise GraphError(f"{where}: expected modules without cycles; found a module that contains itself")
        self._open.add(id(module))
        found: dict[str, Json] = {"class": name_of(type(module))}
        if is_container(module):
            found["children"] = [[n, self._value(item, f"{where}.{n}")] for n, item in module._modules.items()]
        else:
            told = arguments_of(module)
            found["arguments"] = {name: self._value(value, f"{where}({name}=)") for name, value in told.items()}
        self._written[id(module)] = len(self._written)
        return {"module": found}

    def _value(self, value: object, where: str) -> Json:
        try:
            return encode(value, where, self._further)
        except TensorMismatchError as exc:
            raise GraphError(str(exc)) from exc

    def _further(self, value: object, where: str) -> Json | None:
        if isinstance(value, nn.Module):
            return self.module(value, where)
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if isinstance(value, type) and issubclass(value, nn.Module):
            return {"class": name_of(value)}
        if isinstance(value, partial):
            given = cast("partial[object]", value)
            if not (isinstance(given.func, type) and issubclass(given.func, nn.Module)):
                raise GraphError(f"{where}: expected a partial application of the class of a module; found {value!r}")
            parts = [self._value(part, where) for part in (list(given.args), given.keywords)]
            return {"partial": [name_of(given.func), *parts]}
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return {"named": self._name(value, where)}
        if isinstance(value, Enum):
            return {"member": [self._name(type(value), where), value.name]}
        return self._configuration(value, where)

    def _configuration(self, value: object, where: str) -> Json | None:
        kind = type(value)
        to_dict = getattr(value, "to_dict", None)
        if callable(to_dict) and callable(getattr(kind, "from_dict", None)):
            return {"configuration": [self._name(kind, where), self._value(to_dict(), where)]}
        if is_dataclass(value):
            given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
            return {"fields": [self._name(kind, where), self._value(given, where)]}
        return None

    def _name(self, value: object, where: str) -> str:
        try:
            return allowed_name(value, self._allowed)
        except GraphError as exc:
            raise GraphError(f"{where}: {exc}") from exc


def build(recipe: str, custom_objects: Mapping[str, object] | None = None) -> nn.Module:
    """Build a module from a recipe, on the CPU.

    The dtypes and the `training` and `requires_grad` flags are those of the original module. The weights have the
    values that the constructors set. Use `assign` to set other values.

    Args:
        recipe: Text from `recipe_of`.
        custom_objects: Mapping of names, such as "Block", to classes and functions. If the recipe contains a class or
            function of one of these names, the object from the mapping is used, and nothing is imported for this name.

    Raises:
        GraphError: if the text is not a recipe, a class is not available in this process, a constructor raises an
            error, or the built module differs from the saved module. The message names the class or the submodule.
    """
    with building("recipe: expected a text from recipe_of"):
        content = cast(_Content, jsontext.mapping(recipe, "recipe")[TORCH])
        builder = _Builder(custom_objects or {})
        with torch.device("cpu"):
            module = builder.value(content["model"])
        if not isinstance(module, nn.Module):
            raise TypeError(type(module).__name__)
        _compare(module, content)
        _finish(module, content)
        _compare_buffers(module, content)
        return module


class _Builder:
    """Builds what `_Writer` wrote, in its order."""

    def __init__(self, custom: Mapping[str, object]) -> None:
        self._custom = custom
        self._built: list[nn.Module] = []
        self._allowed: frozenset[str] | None = None
        """The packages of the class of the whole, once it is known."""

    def value(self, written: object) -> object:
        return decode(written, self._further)

    def _further(self, kind: str, content: Any) -> object:
        if kind == "module":
            return self._module(content)
        if kind == "again":
            return self._built[content]
        if kind == "class":
            return named(content, None, self._custom)
        if kind == "named":
            return named(content, self._allowed, self._custom)
        if kind == "partial":
            args, keywords = (self.value(part) for part in content[1:])
            of = cast("type[nn.Module]", named(content[0], None, self._custom))
            return partial(of, *cast("Sequence[object]", args), **cast("Mapping[str, object]", keywords))
        if kind in ("member", "configuration", "fields"):
            return self._object(kind, *content)
        return {"size": torch.Size, "dtype": dtype_called}[kind](content)

    def _object(self, kind: str, name: str, written: object) -> object:
        of = named(name, self._allowed, self._custom)
        if not isinstance(of, type) or not (kind == "configuration" or _is_of_kind(of, kind)):
            raise GraphError(f"{name}: expected a configuration class, a dataclass or an Enum; found {of!r:.80}")
        given = self.value(written)
        if kind == "member":
            return cast("type[Enum]", of)[cast(str, given)]
        with building(f"{name}: expected the constructor to succeed"):
            if kind == "configuration":
                return cast("Any", of).from_dict(given)
            return cast("Callable[..., object]", of)(**cast("Mapping[str, object]", given))

    def _module(self, content: Mapping[str, object]) -> nn.Module:
        kind = cast("type[nn.Module]", named(cast(str, content["class"]), None, self._custom))
        if self._allowed is None:
            self._allowed = packages_of(kind)
        if "children" in content:
            module = kind()
            for name, child in cast("Sequence[tuple[str, object]]", content["children"]):
                module.add_module(name, cast("nn.Module | None", self.value(child)))
        else:
            told = cast("Mapping[str, object]", content["arguments"])
            arguments = {name: self.value(value) for name, value in told.items()}
            module = _constructed(kind, arguments)
        self._built.append(module)
        return module


def _is_of_kind(found: type, kind: str) -> bool:
    return issubclass(found, Enum) if kind == "member" else is_dataclass(found)


def _constructed(kind: type[nn.Module], arguments: Mapping[str, object]) -> nn.Module:
    with building(f"{kind.__qualname__}({', '.join(arguments)}): expected the constructor to succeed"):
        return kind(**arguments)


def _compare(module: nn.Module, content: _Content) -> None:
    """Refuse what is not what was saved."""
    hooks = content["hooks"]
    stored = {path: (digest, hooks.get(path, 0)) for path, digest in content["contents"].items()}
    modules = dict(module.named_modules())
    counts = _hooks_of(modules.items())
    digests = contents_of(module, sampled=not content.get("whole"))
    built = {path: (digest, counts.get(path, 0)) for path, digest in digests.items()}
    differ = [path for path in {**stored, **built} if stored.get(path) != built.get(path)]
    if differ:
        path = max(differ, key=lambda path: path.count(".") + bool(path))  # the innermost: others hold it
        kind = type(modules[path]).__qualname__ if path in modules else "not built"
        raise GraphError(
            f"recipe: expected {type(module).__qualname__} to build the saved module; its module {path!r} "
            f"({kind}) differs: the constructor had an argument that the module does not keep in an attribute, or the "
            "module was changed afterwards"
        )


def _compare_buffers(module: nn.Module, content: _Content) -> None:
    unsaved, built = content["unsaved"], unsaved_of(module, sampled=not content.get("whole"))
    differ = [path for path in {**unsaved, **built} if unsaved.get(path) != built.get(path)]
    if differ:
        raise GraphError(
            f"recipe: expected {type(module).__qualname__} to build the saved module; its buffer {differ[0]!r}, which "
            "is not stored, has other values: the constructor had an argument that the module does not keep in an "
            "attribute, or the buffer was changed afterwards"
        )


def _finish(module: nn.Module, content: _Content) -> None:
    """Set flags and dtypes."""
    otherwise, mode = set(content["otherwise"]), bool(content["training"])
    for path, item in module.named_modules():
        item.training = mode is not (path in otherwise)
    frozen, dtypes = set(content["frozen"]), content["dtypes"]
    for name, item in module.named_parameters():
        item.requires_grad_(name not in frozen)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        dtype = dtype_called(dtypes[name])
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
