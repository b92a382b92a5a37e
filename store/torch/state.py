"""The state of a module: what `state_dict()` has, as it is read.

Rules
- Names are those of `state_dict()`. What wraps a module is seen through: DistributedDataParallel and DataParallel
  (`module.`), and what `torch.compile` gives (`_orig_mod.`).
- Tensors of the module itself are read as they lie in memory.
- What cannot be kept is an error that names it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial, and its own code sets tensors on the device "meta" in the same way)

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from ..arrays import Array, as_numpy, read_only
from ..errors import TensorMismatchError
from ..values import base_of
from .signature import STATE_HOOKS, tells_all
from .values import packed

EXTRA = "_extra_state"
"""Ends the name of what a module's `get_extra_state` gives, of any shape."""


class State:
    """The `state_dict()` of a module, read when this object is created.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.

    Raises:
        TensorMismatchError: if `state_dict()` raises an exception, if a lazy module has no shapes yet because it was
            never called, or if the name of a tensor or other value ends in ":json" or in ":" and a number.
    """

    def __init__(self, module: nn.Module) -> None:
        self.whole = module
        """The module as it was passed, wrapped or not."""
        self.prefix, self.module = _unwrapped(module)
        try:
            found: dict[str, Any] = self.module.state_dict(keep_vars=True)
        except Exception as exc:  # whatever a hook raises
            kind = type(self.module).__qualname__
            raise TensorMismatchError(f"state_dict() of {kind}: expected its state; found {exc!r}") from exc
        self.tensors: dict[str, torch.Tensor] = {}
        """Plain tensors, by name."""
        self.values: dict[str, object] = {}
        """Other values, such as extra state and quantised tensors, by name."""
        self.real: dict[str, str] = {}
        """Keys in `state_dict()`, by name. A name is a key without the prefixes of `torch.compile`."""
        for real, value in found.items():
            name = plain_name(real)
            self.real[name] = real
            if isinstance(value, UninitializedTensorMixin):
                raise TensorMismatchError(
                    f"tensor {name!r}: expected a shape; found that of a lazy module that was never called"
                )
            if base_of(name) is not None:
                raise TensorMismatchError(f"tensor {name!r}: expected a name that does not end in ':json' or ':NUMBER'")
            if isinstance(value, torch.Tensor) and not value.is_quantized:
                self.tensors[name] = value
            else:
                self.values[name] = value

    @cached_property
    def _own(self) -> set[int]:
        return {id(tensor) for _, _, tensor in places(self.module)}

    def is_own(self, name: str) -> bool:
        """Return whether the tensor `name` is a parameter or buffer of the module, and not a copy made by a hook."""
        return id(self.tensors[name]) in self._own

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a mapping of tensor names to dtype names and shapes.

        Quantised tensors are left out. Extra state (from `get_extra_state`) is left out, because it may have any dtype
        and shape.
        """
        return {
            name: (_name_of(item.dtype), tuple(item.shape))
            for name, item in self.tensors.items()
            if not name.endswith(EXTRA) or self.is_own(name)
        }


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a wrapper from `torch.compile`. If so, the original module is `module._orig_mod`."""
    return type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")


def bare(module: nn.Module) -> nn.Module:
    """Return the module that is wrapped for several devices or by `torch.compile`, or the module itself."""
    return _unwrapped(module)[1]


def _unwrapped(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the wrapped module, and the prefix of its names in the state of what wraps it."""
    prefix = ""
    while True:
        kind = type(module)
        if is_compiled(module):
            attribute = "_orig_mod"
        elif kind.__module__.startswith("torch.nn.parallel.") and kind.__name__ in (
            "DataParallel",
            "DistributedDataParallel",
        ):
            attribute = "module"
        else:
            return prefix, module
        prefix, module = f"{prefix}{attribute}.", getattr(module, attribute)


def plain_name(name: str) -> str:
    """Return the name of a tensor without what `torch.compile` adds.

    >>> plain_name("body._orig_mod.0.weight")
    'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in a module's `state_dict()`, by name. Quantised tensors are left out.

    Parameters and buffers are not copied.
    """
    found = _of_part(module)
    return State(module).tensors if found is None else found


def _of_part(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a module that has no parts and says nothing of its own about its state; None: it does."""
    held = vars(module)
    if held["_modules"] or any(held.get(hooks) for hooks in STATE_HOOKS) or not tells_all(type(module)):
        return None
    found = {
        name: tensor
        for place in (held["_parameters"], held["_buffers"])
        for name, tensor in place.items()
        if tensor is not None and name not in held["_non_persistent_buffers_set"]
    }
    plain = all(not item.is_quantized and not isinstance(item, UninitializedTensorMixin) for item in found.values())
    return found if plain and not any(base_of(name) is not None for name in found) else None


def tensors_of(module: nn.Module, state: State | None = None) -> dict[str, Array]:
    """Return the parameters, persistent buffers and extra state of a module as read-only arrays.

    The names of the arrays are those in `state_dict()`, without the prefixes of wrappers, such as `_orig_mod.`.

    Plain tensors on the CPU are not copied, so in-place changes, such as an optimizer step, also change the arrays.
    Quantised tensors and non-tensor extra state are copied into arrays named `NAME:json`, `NAME:0` and so on.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.
        state: Current state of the module, if already available. If None, the state is read from the module.

    Raises:
        TensorMismatchError: if a tensor is sparse, nested, distributed, lazy or on the device "meta", or if extra state
            contains an unsupported object. Supported objects are None, numbers, strings, bytes, tensors, arrays,
            dtypes, devices, and lists, tuples, sets and dicts of supported objects.

    >>> {name: array.shape for name, array in tensors_of(nn.Linear(4, 2)).items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    state = state if state is not None else State(module)
    found: dict[str, Array] = {}
    first: dict[int, Array] = {}  # a tied tensor is one array, also where it is copied from another device
    for name in state.real:
        if name in state.tensors:
            tensor = state.tensors[name]
            if id(tensor) not in first:
                first[id(tensor)] = read_only(array_of(name, tensor))
            found[name] = first[id(tensor)]
        else:
            found.update({part: read_only(array) for part, array in packed(name, state.values[name]).items()})
    return found


def lacking(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return those names in a module's `state_dict()` that are missing from `names`.

    If a tensor has several names, one of them in `names` is enough.
    """
    state, given = State(module), {base_of(name) or name for name in names}
    known = {id(state.tensors[name]) for name in given & state.tensors.keys()}
    return [
        name
        for name in state.real
        if name not in given and (name not in state.tensors or id(state.tensors[name]) not in known)
    ]


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """Return a plain tensor as an array, on the CPU without a copy.

    Raises:
        TensorMismatchError: it cannot be stored; says what to do.
    """
    check_dense(name, tensor)
    if tensor.is_meta:
        raise _refused(name, 'a tensor on the device "meta", which has no values')
    return as_numpy(tensor, f"tensor {name!r}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values do not all lie in one memory of this process: sparse, distributed, nested."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if tensor.layout != torch.strided:
        raise _refused(name, f"a tensor of layout {tensor.layout}: store its parts, or the result of to_dense()")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise _refused(name, "a DTensor, which is split over the ranks: gather it with full_tensor()")
    if tensor.is_nested:
        raise _refused(name, "a nested tensor: store its parts")


def _refused(name: str, found: str) -> TensorMismatchError:
    return TensorMismatchError(f"tensor {name!r}: expected a dense tensor with values; found {found}")


def places(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Give each place where a module has a tensor: who has it, its name there, and the tensor."""
    for owner in module.modules():
        for found in (owner._parameters, owner._buffers):
            for name, tensor in found.items():
                if tensor is not None:
                    yield owner, name, tensor
