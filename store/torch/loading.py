"""Sets the state of a module: what `state_dict()` has, whole or in part.

Rules
- Everything is checked before anything is written, and an error leaves the module as it was.
- Plain tensors of the module itself are filled in place. The module's own `load_state_dict` sets all else: values that
  are no tensors, quantised tensors, and what hooks put into the state. It also sets the whole state of a module that
  runs code of its own when it is loaded (`loads_itself`), since that may derive values from weights.
- Two names of one memory take one value: different values for them are refused.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# (torch's types are partial, and its own code sets tensors on the device "meta" in the same way)

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from ..arrays import Array, as_numpy, checked
from ..errors import TensorMismatchError, TensorNotFoundError
from ..graphs.renaming import are_same
from ..values import base_of
from .state import EXTRA, State, check_dense, places, plain_name
from .values import as_tensor, unpacked

_Place = tuple[dict[str, Any], str, torch.Tensor]
"""A mapping of a module, a name in it, and what is there."""
_LOADS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_COPYING = frozenset(
    {
        *(getattr(nn.Module, name) for name in _LOADS),
        nn.modules.batchnorm._NormBase._load_from_state_dict,
        nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
    }
)
"""Methods of PyTorch that copy values into parameters and buffers, and do nothing else."""


def assign(module: nn.Module, tensors: Mapping[str, object], state: State | None = None) -> None:
    """Copy tensors into a module. Parameters and buffers that are not in `tensors` keep their values.

    All tensors are checked before the first is written. If an error is raised, the module keeps its previous values. If
    the module has custom loading code (see `loads_itself`), its `load_state_dict` is called with `tensors` and with the
    current values of all other parameters and buffers. Tensors of the module that are on the device "meta" are replaced
    by tensors in CPU memory.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.
        tensors: Tensors by their names in `state_dict()`.
        state: Current state of the module, if already available. If None, the state is read from the module.

    Raises:
        TensorNotFoundError: if `tensors` contains a name that is not in the module's state, or lacks a tensor that the
            module has on the device "meta".
        TensorMismatchError: if a tensor differs in shape or dtype from the module's tensor of the same name, if tensors
            that share memory get different values, or if `load_state_dict` rejects the state.
    """
    state = state if state is not None else State(module)
    given = {name: value for name, value in tensors.items() if base_of(name) is None}
    values = {name: unpacked(name, tensors) for name in {base_of(part) for part in tensors} if name is not None}
    values.update({name: given.pop(name) for name in list(given) if name in state.values or _is_extra(state, name)})
    unknown = sorted(values.keys() - state.real.keys())
    if unknown:
        raise TensorNotFoundError(f"value {unknown[0]!r}: expected a name in the model's state; found no such name")
    arrays = checked(given, state.expected())
    _check_places(state, arrays)
    check_tied(tied({name: state.tensors[name] for name in arrays}), arrays)
    meta = _without_memory(state, arrays.keys() | values.keys())
    by_hooks = bool(values) or not all(state.is_own(name) for name in arrays) or loads_itself(state.whole)
    undo = _materialize(state, arrays) if meta else []
    if by_hooks:
        _load(state, arrays, values, undo)
        return
    for name, array in arrays.items():
        if name not in meta:
            _write(state.tensors[name], array)


def tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the groups of names whose tensors share memory. A tensor with only one name is left out.

    >>> weight = torch.zeros(2)
    >>> tied({"embed": weight, "bias": torch.zeros(2), "head": weight})
    [['embed', 'head']]
    """
    found: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        found[_memory_of(tensor)].append(name)
    return [names for names in found.values() if len(names) > 1]


def check_tied(groups: Iterable[Iterable[str]], arrays: Mapping[str, Array]) -> None:
    """Check that tensors that share memory get equal values.

    Args:
        groups: Groups of names from `tied`.
        arrays: New values by name, with the dtypes and shapes of the tensors. Names without a value are ignored.

    Raises:
        TensorMismatchError: if two values in a group differ.
    """
    for names in groups:
        first, *others = [name for name in names if name in arrays] or [""]
        for other in others:
            if not are_same(arrays[first], arrays[other]):
                raise TensorMismatchError(
                    f"tensors {first!r} and {other!r}: expected one value, because the module stores both in the same "
                    "memory; found different values. Untie them in the module, or pass only one of them"
                )


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors that are the same memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def loads_itself(module: nn.Module) -> bool:
    """Return whether `load_state_dict` runs custom code of the module or a submodule: overridden methods, or hooks.

    Custom code can derive other values from the loaded weights.

    >>> loads_itself(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    False
    """
    return any(
        not _only_copies(type(item))
        or any(vars(item).get(hooks) for hooks in _LOAD_HOOKS)
        or not vars(item).keys().isdisjoint(_LOADS)
        for item in module.modules()
    )


@lru_cache(maxsize=1024)
def _only_copies(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) in _COPYING for name in _LOADS)


def _is_extra(state: State, name: str) -> bool:
    return name in state.tensors and name.endswith(EXTRA) and not state.is_own(name)


def _check_places(state: State, arrays: Mapping[str, Array]) -> None:
    """Refuse what cannot be filled, and elements that share memory: only some of what is given would be kept."""
    for name in arrays:
        tensor = state.tensors[name]
        check_dense(name, tensor)
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
            missing = "it is not stored: create it first" if name in owner._non_persistent_buffers_set else "found none"
            raise TensorNotFoundError(f'tensor {path!r} on the device "meta": expected a value for it; {missing}')
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
        raise TensorMismatchError(f"load_state_dict of {kind}: expected it to accept {names}; found {exc!r}") from exc


def _loaded(state: State, arrays: Mapping[str, Array], values: Mapping[str, object]) -> None:
    module = state.whole
    now = module.state_dict()
    before, given = copy.copy(now), copy.copy(now)  # with the versions of the modules' formats, its attribute
    for name, value in now.items():
        before[name] = given[name] = _kept(value)
    known = {_memory_of(state.tensors[name]): array for name, array in arrays.items()}
    places = {name: _memory_of(tensor) for name, tensor in state.tensors.items()}
    also = {name: known[place] for name, place in places.items() if place in known}  # by all names of a memory
    for name, value in {**also, **arrays, **values}.items():
        given[state.prefix + state.real[name]] = as_tensor(value) if isinstance(value, np.ndarray) else value
    try:
        module.load_state_dict(given)
    except Exception as exc:
        try:
            module.load_state_dict(before)
        except Exception as again:  # noqa: BLE001  the first error is raised, and says this
            exc.add_note(f"restoring the previous state failed, too: {again!r}")
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
