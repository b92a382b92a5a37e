"""What a module's constructor was given, as far as the module tells.

Rules
- An argument is the module's attribute of the parameter's name, as in most modules of torch.nn and in models of
  Hugging Face (`config`); else what `hparams` has under that name (Lightning's `save_hyperparameters`). A few modules
  of torch.nn that tell it otherwise are known.
- An attribute that is a module made of the argument (`self.norm = norm(width)`) does not tell it, but for dropout.
- An argument that is not told is left out where the parameter has a default: whether the module is the same without it
  is seen when it is built.
- Where the module is, and in which precision, is no argument: parameters `device` are left out, and `dtype`, but where
  the module has it in an attribute.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial)

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

from ..errors import GraphError

_Dropout = nn.modules.dropout._DropoutNd
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MISSING = object()
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def is_container(module: nn.Module) -> bool:
    """Tell whether a module is made of the modules in it, and of nothing else."""
    return any(type(module).__init__ is kind.__init__ for kind in _CONTAINERS)


def arguments_of(module: nn.Module) -> dict[str, object]:
    """Return the arguments from which a module's class makes one like it.

    Raises:
        GraphError: the module does not tell one that its constructor needs.

    >>> arguments_of(nn.Linear(4, 2, bias=False))
    {'in_features': 4, 'out_features': 2, 'bias': False}
    """
    kind = type(module)
    special = _SPECIAL.get(cast("Callable[..., None]", kind.__init__))
    if special is not None:
        return special(module)
    found: dict[str, object] = {}
    for parameter in _parameters(kind):
        value = _told(module, parameter)
        if value is not _MISSING:
            found[parameter.name] = value
        elif parameter.default is parameter.empty:
            raise GraphError(
                f"{kind.__qualname__}: expected attributes with the names of its constructor's parameters; "
                f"found none for {parameter.name!r}"
            )
    return found


@lru_cache(maxsize=1024)
def _parameters(kind: type[nn.Module]) -> tuple[inspect.Parameter, ...]:
    try:
        found = list(inspect.signature(kind.__init__).parameters.values())[1:]
    except (TypeError, ValueError) as exc:
        raise GraphError(f"{kind.__qualname__}: expected a constructor with a signature; {exc}") from exc
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple([parameter for parameter in found if parameter.kind not in several])


def _told(module: nn.Module, parameter: inspect.Parameter) -> object:
    name, optional = parameter.name, parameter.default is not parameter.empty
    if optional and (name == "device" or (name == "dtype" and name not in vars(module))):
        return _MISSING
    for held in (vars(module), module._modules, module._parameters, module._buffers, _hyperparameters(module)):
        if name in held:
            return _given(held[name], parameter)
    return _MISSING


def _given(value: object, parameter: inspect.Parameter) -> object:
    """Return what was given, where an attribute may be what the constructor made of it."""
    default, plain = parameter.default, _is_plain(parameter)
    if _is_of(parameter, bool) and (value is None or isinstance(value, torch.Tensor)):
        return value is not None  # such as `bias`
    if isinstance(value, _Dropout) and plain:
        return value.p  # self.dropout = nn.Dropout(dropout)
    given = default is parameter.empty or default is None or isinstance(default, nn.Module)
    return _MISSING if isinstance(value, nn.Module) and (plain or not given) else value  # self.norm = norm(width)


def _is_plain(parameter: inspect.Parameter) -> bool:
    return any(_is_of(parameter, kind) for kind in (bool, int, float, str))


def _is_of(parameter: inspect.Parameter, kind: type) -> bool:
    return type(parameter.default) is kind or parameter.annotation in (kind, kind.__name__)


def _hyperparameters(module: object) -> Mapping[str, object]:
    found = getattr(module, "hparams", None)
    return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}


# ---- modules of torch.nn that tell it otherwise ------------------------------------------------------------------


def _recurrent(*more: str) -> Callable[[nn.Module], dict[str, object]]:
    return lambda module: {name: getattr(module, name) for name in (*_RECURRENT, *more)}


def _attention(module: nn.MultiheadAttention) -> dict[str, object]:
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    biases = {"bias": _is_there(module.in_proj_bias), "add_bias_kv": module.bias_k is not None}
    return {**{name: getattr(module, name) for name in names}, **biases}


def _transformer_layer(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict[str, object]:
    return {
        "d_model": module.self_attn.embed_dim,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        "activation": module.activation,
        "layer_norm_eps": module.norm1.eps,
        "batch_first": module.self_attn.batch_first,
        "norm_first": module.norm_first,
        "bias": _is_there(module.linear1.bias),
    }


def _is_there(bias: nn.Parameter | None) -> bool:
    return bias is not None


def _encoder(module: nn.TransformerEncoder) -> dict[str, object]:
    layer = {"encoder_layer": _first(module)}
    return {**layer, **{name: getattr(module, name) for name in ("num_layers", "norm", "enable_nested_tensor")}}


def _decoder(module: nn.TransformerDecoder) -> dict[str, object]:
    return {"decoder_layer": _first(module), "num_layers": module.num_layers, "norm": module.norm}


def _first(module: nn.TransformerEncoder | nn.TransformerDecoder) -> nn.Module:
    if not len(module.layers):
        raise GraphError(f"{type(module).__qualname__}: expected a layer, which its constructor needs; found none")
    return module.layers[0]


def _transformer(module: nn.Transformer) -> dict[str, object]:
    layers = {"num_encoder_layers": len(module.encoder.layers), "num_decoder_layers": len(module.decoder.layers)}
    first = cast(nn.TransformerEncoderLayer, _first(module.encoder))
    return {**_transformer_layer(first), **layers}


_SPECIAL: dict[Callable[..., None], Callable[[Any], dict[str, object]]] = {
    nn.RNN.__init__: _recurrent("nonlinearity"),
    nn.LSTM.__init__: _recurrent("proj_size"),
    nn.GRU.__init__: _recurrent(),
    nn.MultiheadAttention.__init__: _attention,
    nn.TransformerEncoderLayer.__init__: _transformer_layer,
    nn.TransformerDecoderLayer.__init__: _transformer_layer,
    nn.TransformerEncoder.__init__: _encoder,
    nn.TransformerDecoder.__init__: _decoder,
    nn.Transformer.__init__: _transformer,
}
