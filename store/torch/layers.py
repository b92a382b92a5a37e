"""Modules of torch.nn as JSON: kinds, arguments of constructors, and the children of containers.

Rules
- Only modules of torch.nn, and functions of `torch.nn.functional`, can be written and built. Nothing is imported.
- An argument is the attribute of the same name; a few kinds keep it elsewhere. `device` and `dtype` are left out.
- A module that was changed after its construction is rejected: each module is built on the device "meta" and compared.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from ..errors import GraphError
from ..facts import Json
from ..recipes import building
from ..values import decode, encode
from .values import dtype_called

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WITHOUT_ARGUMENTS = (nn.Module, nn.ParameterList, nn.ParameterDict)
"""Kinds whose constructors say nothing about their content."""
_FUNCTIONS = "torch.nn.functional"
_MISSING = object()


def written(module: nn.Module) -> Json:
    """Return JSON from which `built` makes the same module with initial weights.

    Raises:
        GraphError: if a module is not one of torch.nn, an argument cannot be written, or a module was changed.

    >>> written(nn.ReLU())
    {'module': {'class': 'torch.nn.modules.activation:ReLU', 'arguments': {'inplace': False}}}
    """
    found = _Writer().value(module, type(module).__qualname__)
    _check(json.dumps(found), _facts(module))
    return found


@lru_cache(maxsize=128)  # building takes about a millisecond per layer
def _check(text: str, facts: Hashable) -> None:
    with torch.device("meta"):
        again = built(json.loads(text))
    if _facts(again) != facts:
        raise GraphError("expected modules of torch.nn as their constructors make them; found a changed module")


def _facts(module: nn.Module) -> Hashable:
    """Return the facts by which two modules are compared. A shared tensor has only one name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    public = [[name for name in vars(part) if not name.startswith("_")] for part in module.modules()]
    return repr(module), str([(name, item.shape) for name, item in tensors]), str(public)


def built(content: object) -> nn.Module:
    """Build a module on the current default device.

    Raises:
        GraphError: if a class or a function is not one of torch.nn, or a constructor raises an error.
        Exception: if `content` is not from `written`.
    """
    return cast(nn.Module, _Builder().value(content))


def _is_own(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind and kind.__module__.startswith("torch.nn.modules.")


class _Writer:
    """Writes modules as JSON, each once."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """id of a module -> the number of modules that were written before it."""

    def value(self, value: object, where: str) -> Json:
        return encode(value, where, self._further)

    def _further(self, value: object, where: str) -> Json | None:
        if isinstance(value, nn.Module):
            return self._module(value, where)
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        name = getattr(value, "__name__", "")
        return {"named": f"{_FUNCTIONS}:{name}"} if getattr(nn.functional, name, None) is value and name else None

    def _module(self, module: nn.Module, where: str) -> Json:
        if id(module) in self._places:
            return {"again": self._places[id(module)]}
        kind = type(module)
        if not _is_own(kind) or kind in _WITHOUT_ARGUMENTS:
            raise GraphError(f"{where}: expected a module of torch.nn; found {kind.__module__}.{kind.__qualname__}")
        found: dict[str, Json] = {"class": f"{kind.__module__}:{kind.__qualname__}"}
        if kind in _CONTAINERS:
            found["children"] = [[n, self.value(item, f"{where}.{n}")] for n, item in module._modules.items()]
        else:
            given = _SPECIAL.get(kind, _arguments)(module)
            found["arguments"] = {name: self.value(value, f"{where}({name}=)") for name, value in given.items()}
        self._places[id(module)] = len(self._places)
        return {"module": found}


class _Builder:
    """Builds the modules of a `_Writer`, in its order."""

    def __init__(self) -> None:
        self._built: list[nn.Module] = []

    def value(self, content: object) -> object:
        return decode(content, self._further)

    def _further(self, kind: str, content: Any) -> object:
        if kind == "module":
            return self._module(content)
        if kind == "again":
            return self._built[content]
        return {"size": torch.Size, "dtype": dtype_called, "named": _function}[kind](content)

    def _module(self, content: Mapping[str, Any]) -> nn.Module:
        kind = _kind(content["class"])
        if "children" in content:
            module = kind()
            for name, child in cast("Sequence[tuple[str, object]]", content["children"]):
                module.add_module(name, cast("nn.Module | None", self.value(child)))
        else:
            given = {name: self.value(value) for name, value in content["arguments"].items()}
            with building(f"{kind.__name__}({', '.join(given)}): expected the constructor to succeed"):
                module = kind(**given)
        self._built.append(module)
        return module


def _kind(name: str) -> type[nn.Module]:
    found = getattr(nn, name.rpartition(":")[2], None)
    if isinstance(found, type) and issubclass(found, nn.Module) and _is_own(found):
        return found
    raise GraphError(f"{name}: expected a module of torch.nn; this version calls no other class that a model names")


def _function(name: str) -> object:
    place, _, own = name.partition(":")
    found = getattr(nn.functional, own, None) if place == _FUNCTIONS else None
    if not isinstance(found, (FunctionType, BuiltinFunctionType)):
        raise GraphError(f"{name}: expected a function of {_FUNCTIONS}; found {found!r:.80}")
    return found


# ---- arguments of constructors -----------------------------------------------------------------------------------


def _arguments(module: nn.Module) -> dict[str, object]:
    """Return the attributes that have names of the constructor's parameters."""
    found: dict[str, object] = {}
    for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
        if parameter.name in ("device", "dtype"):
            continue
        value = getattr(module, parameter.name, _MISSING)
        if type(parameter.default) is bool and (value is None or isinstance(value, torch.Tensor)):
            value = value is not None  # such as `bias`
        if value is not _MISSING:
            found[parameter.name] = value
    return found


def _named(module: nn.Module, names: str) -> dict[str, object]:
    return {name: getattr(module, name) for name in names.split()}


def _recurrent(module: nn.Module) -> dict[str, object]:
    more = "nonlinearity" if isinstance(module, nn.RNN) else "proj_size" if isinstance(module, nn.LSTM) else ""
    return _named(module, f"input_size hidden_size num_layers bias batch_first dropout bidirectional {more}")


def _attention(module: nn.MultiheadAttention) -> dict[str, object]:
    biases = {"bias": module._parameters["in_proj_bias"] is not None, "add_bias_kv": module.bias_k is not None}
    return {**_named(module, "embed_dim num_heads dropout add_zero_attn kdim vdim batch_first"), **biases}


def _layer(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict[str, object]:
    return {
        "d_model": module.self_attn.embed_dim,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        "layer_norm_eps": module.norm1.eps,
        "batch_first": module.self_attn.batch_first,
        "bias": getattr(module.linear1, "bias", None) is not None,
        **_named(module, "activation norm_first"),
    }


def _encoder(module: nn.TransformerEncoder) -> dict[str, object]:
    return {"encoder_layer": module.layers[0], **_named(module, "num_layers norm enable_nested_tensor")}


def _decoder(module: nn.TransformerDecoder) -> dict[str, object]:
    return {"decoder_layer": module.layers[0], **_named(module, "num_layers norm")}


def _transformer(module: nn.Transformer) -> dict[str, object]:
    layers = {"num_encoder_layers": len(module.encoder.layers), "num_decoder_layers": len(module.decoder.layers)}
    return {**_layer(cast(nn.TransformerEncoderLayer, module.encoder.layers[0])), **layers}


_SPECIAL: dict[type[nn.Module], Callable[[Any], dict[str, object]]] = {
    nn.RNN: _recurrent,
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _layer,
    nn.TransformerDecoderLayer: _layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""Kinds that do not keep all arguments in attributes of the same names."""
