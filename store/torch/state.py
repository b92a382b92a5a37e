"""The state of a module: what `state_dict()` has, read and set.

Rules
- Names are those of `state_dict()`. What wraps a module is seen through: DistributedDataParallel and DataParallel
  (`module.`), and what `torch.compile` gives (`_orig_mod.`).
- Tensors of the module itself are read as they lie in memory, and filled in place. All else goes through
  `load_state_dict`: values that are no tensors, quantised tensors, and what hooks put there.
- What cannot be kept is an error that names it. An error leaves the module as it was.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial, and its own code sets tensors on the device "meta" in the same way)

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from ..arrays import Array, as_numpy, checked, read_only
from ..errors import TensorMismatchError, TensorNotFoundError
from ..values import base_of
from .copies import is_compiled
from .signature import STATE_HOOKS, tells_all
from .values import as_tensor, packed, unpacked

_Place = tuple[dict[str, Any], str, torch.Tensor]
"""A mapping of a module, a name in it, and what is there."""
_EXTRA = "_extra_state"
"""Ends the name of what a module's `get_extra_state` gives, of any shape."""


class State:
    """The state of a module at one time.

    Args:
        module: wrapped or not.

    Raises:
        TensorMismatchError: `state_dict()` fails, or the module does not know yet which tensors it has.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = bare(module)
        try:
            found: dict[str, Any] = self.module.state_dict(keep_vars=True)
        except Exception as exc:  # whatever a hook raises
            kind = type(self.module).__qualname__
            raise TensorMismatchError(f"state_dict() of {kind}: expected its state; it raises {exc!r}") from exc
        self.tensors: dict[str, torch.Tensor] = {}
        """Plain tensors."""
        self.values: dict[str, object] = {}
        """All else."""
        self.real: dict[str, str] = {}
        """Name -> what `state_dict()` calls it."""
        for real, value in found.items():
            name = plain_name(real)
            self.real[name] = real
            if isinstance(value, UninitializedTensorMixin):
                raise TensorMismatchError(
                    f"tensor {name!r}: expected a tensor with a shape; it is of a lazy module that was never called"
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
        """Tell whether a tensor is a parameter or a buffer of the module, and no copy of one."""
        return id(self.tensors[name]) in self._own

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and the shape of each plain tensor, but of extra state, which may have any."""
        return {
            name: (_name_of(item.dtype), tuple(item.shape))
            for name, item in self.tensors.items()
            if not name.endswith(_EXTRA) or self.is_own(name)
        }


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bare(module: nn.Module) -> nn.Module:
    """Return the module that is wrapped for several devices or by `torch.compile`, or the module itself."""
    while True:
        kind = type(module)
        if is_compiled(module):
            module = module._orig_mod  # pyright: ignore[reportAssignmentType]
        elif kind.__module__.startswith("torch.nn.parallel.") and kind.__name__ in (
            "DataParallel",
            "DistributedDataParallel",
        ):
            module = module.module  # pyright: ignore[reportAssignmentType]
        else:
            return module


def plain_name(name: str) -> str:
    """Return the name of a tensor without what `torch.compile` adds.

    >>> plain_name("body._orig_mod.0.weight")
    'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own tensors, parameters and persistent buffers, by name."""
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
    """Parameters and persistent buffers by the names of `state_dict()`, read-only.

    On the CPU nothing is copied, and the arrays are live: a later in-place change, such as an optimizer's
    step, shows in them. What a state has beside plain tensors (extra state, quantised weights) is written as arrays
    `NAME:json`, `NAME:0` and so on, which are copies.

    Args:
        module: wrapped or not.
        state: the module's, read just now; None: it is read.

    Raises:
        TensorMismatchError: part of the state cannot be stored: a sparse, distributed or lazy tensor, one on the device
            "meta", or an object that is neither numbers, text, tensors nor made of such.

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


def assign(module: nn.Module, tensors: Mapping[str, object], state: State | None = None) -> None:
    """Copy `tensors` into the module's own memory; those that are not named keep their values.

    A module on the device "meta" gets memory on the CPU for all of its tensors.
    Everything is checked before anything is written, so that an error leaves the module as it was.

    Args:
        module: wrapped or not.
        tensors: by the names of `state_dict()`.
        state: the module's, read just now; None: it is read.

    Raises:
        TensorNotFoundError: the module has no tensor of a name, or, on the device "meta", one that is not given.
        TensorMismatchError: another shape or dtype than the tensor's, or the module's `load_state_dict` refuses it.
    """
    state = state if state is not None else State(module)
    given = {name: value for name, value in tensors.items() if base_of(name) is None}
    values = {name: unpacked(name, tensors) for name in {base_of(part) for part in tensors} if name is not None}
    values.update({name: given.pop(name) for name in list(given) if name in state.values or _is_extra(state, name)})
    unknown = sorted(values.keys() - state.real.keys())
    if unknown:
        raise TensorNotFoundError(f"value {unknown[0]!r}: expected a part of the model's state; found no such")
    arrays = checked(given, state.expected())
    _check_places(state, arrays)
    meta = _without_memory(state, arrays.keys() | values.keys())
    by_hooks = bool(values) or not all(state.is_own(name) for name in arrays)
    undo = _materialize(state, arrays) if meta else []
    if by_hooks:
        _load(state, arrays, values, undo)
        return
    for name, array in arrays.items():
        if name not in meta:
            _write(state.tensors[name], array)


def lacking(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return what of the module's state is not named; a tensor that has several names is, by any of them."""
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
    _check_dense(name, tensor)
    if tensor.is_meta:
        raise _refused(name, 'one on the device "meta", which has no values')
    return as_numpy(tensor, f"tensor {name!r}")


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    distributed = sys.modules.get("torch.distributed.tensor")
    if tensor.layout != torch.strided:
        raise _refused(name, f"one of layout {tensor.layout}: store its parts, or to_dense()")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise _refused(name, "a DTensor, of which each rank has a part: gather it with full_tensor()")
    if tensor.is_nested:
        raise _refused(name, "a nested one: store its parts")


def _refused(name: str, found: str) -> TensorMismatchError:
    return TensorMismatchError(f"tensor {name!r}: expected a dense tensor with values; found {found}")


def places(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Give each place where a module has a tensor: who has it, its name there, and the tensor."""
    for owner in module.modules():
        for found in (owner._parameters, owner._buffers):
            for name, tensor in found.items():
                if tensor is not None:
                    yield owner, name, tensor


def _is_extra(state: State, name: str) -> bool:
    return name in state.tensors and name.endswith(_EXTRA) and not state.is_own(name)


def _check_places(state: State, arrays: Mapping[str, Array]) -> None:
    """Refuse what cannot be filled, and elements that share memory: only some of what is given would be kept."""
    for name in arrays:
        tensor = state.tensors[name]
        _check_dense(name, tensor)
        if not tensor.is_contiguous() and any(
            step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise TensorMismatchError(
                f"tensor {name!r}: expected memory for each element; found strides {tensor.stride()}"
            )


def _without_memory(state: State, given: Collection[str]) -> set[str]:
    """Return the names of the tensors on the device "meta"; none of the module's may be left there."""
    if not any(tensor.is_meta for _, _, tensor in places(state.module)):
        return set()
    meta = {name for name, tensor in state.tensors.items() if tensor.is_meta}
    known = {id(state.tensors[name]) for name in meta.intersection(given)}
    paths = {id(owner): path for path, owner in state.module.named_modules()}
    for owner, name, tensor in places(state.module):
        path = plain_name(f"{paths[id(owner)]}.{name}".lstrip("."))
        if tensor.is_meta and id(tensor) not in known and path not in given:
            stored = "which is not stored: make it first" if name in owner._non_persistent_buffers_set else "not given"
            raise TensorNotFoundError(f'tensor {path!r}: expected values for all on the device "meta"; it is {stored}')
    return meta


def _materialize(state: State, arrays: Mapping[str, Array]) -> list[_Place]:
    """Give tensors on the device "meta" memory, one for all places of each; returns what was there."""
    given = {id(state.tensors[name]): array for name, array in arrays.items() if state.tensors[name].is_meta}
    made: dict[int, torch.Tensor] = {}
    undo: list[_Place] = []
    for owner, name, tensor in list(places(state.module)):
        if not tensor.is_meta:
            continue
        if id(tensor) not in made:
            found = given.get(id(tensor))  # else a hook will fill it
            value = as_tensor(found) if found is not None else torch.zeros_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            vars(made[id(tensor)]).update(vars(tensor))
        holder: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
        holder[name] = made[id(tensor)]
        undo.append((holder, name, tensor))
    return undo


def _load(state: State, arrays: Mapping[str, Array], values: Mapping[str, object], undo: list[_Place]) -> None:
    """Set the state through `load_state_dict`, all of it: hooks may want to see the rest, too."""
    try:
        _loaded(state, arrays, values)
    except Exception as exc:  # whatever a hook raises
        for holder, name, tensor in undo:
            holder[name] = tensor
        kind, names = type(state.module).__qualname__, sorted({**arrays, **values})
        raise TensorMismatchError(f"load_state_dict of {kind}: expected it to take {names}; {exc!r}") from exc


def _loaded(state: State, arrays: Mapping[str, Array], values: Mapping[str, object]) -> None:
    module = state.module
    now = module.state_dict()
    before, given = copy.copy(now), copy.copy(now)  # with the versions of the modules' formats, its attribute
    for name, value in now.items():
        before[name] = given[name] = _kept(value)
    tied: dict[int, Array] = {id(state.tensors[name]): array for name, array in arrays.items()}
    also = {name: tied[id(item)] for name, item in state.tensors.items() if id(item) in tied}  # by all of its names
    for name, value in {**also, **arrays, **values}.items():
        given[state.real[name]] = as_tensor(value) if isinstance(value, np.ndarray) else value
    try:
        module.load_state_dict(given)
    except Exception as exc:
        try:
            module.load_state_dict(before)
        except Exception as again:  # noqa: BLE001  the first error is raised, and says this
            exc.add_note(f"nor did it take back what it had: {again!r}")
        raise


def _kept(value: object) -> object:
    """Return a copy of part of a state."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple or type(value) is list:  # of quantised tensors, whose deepcopy warns
        items = [_kept(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)


def _write(tensor: torch.Tensor, array: Array) -> None:
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        np.copyto(as_numpy(tensor, "tensor"), array)
        torch.autograd.graph.increment_version(tensor)
        return
    with torch.no_grad():
        tensor.copy_(as_tensor(array))
