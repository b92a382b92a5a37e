"""State of a Keras model's optimizer by name.

Rules
- A name says where a variable belongs: the optimizer, within those that hold it, the weight whose slot it is, the slot.
  It does not depend on which scope the optimizer was built in, and on what else the process has built.
- What an optimizer holds but does not list, such as Nadam's product of momenta in mixed precision, is state, too.
- Everything is checked before anything is written. An optimizer that is not built yet is built, as training would.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import cast

import keras

from ..arrays import Array, checked, dtype_name
from ..errors import TensorNotFoundError
from .state import snapshot
from .vertices import Flattened, first_free

_UNNAMED = re.compile(r"(?<![^/])variable_\d+$")
"""A variable without a name of its own: Keras numbers it."""


def optimizer_tensors_of(model: keras.Model) -> dict[str, Array]:
    """Return the optimizer state of a model as read-only arrays, by name.

    An example of a name is "optimizer/adam/dense/kernel/momentum". The mapping is empty if the model is not compiled or
    its optimizer is not built. Keras builds the optimizer when training starts.
    """
    return snapshot({name: variable for name, (variable, _) in optimizer_state_of(model).items()})


def assign_optimizer(model: keras.Model, tensors: Mapping[str, object]) -> None:
    """Set the optimizer state of a model. Variables that are not in `tensors` keep their values.

    Names are those of `optimizer_tensors_of`. The optimizer is built first, if Keras has not built it yet. All tensors
    are checked before the first is written.

    Raises:
        TensorNotFoundError: if `tensors` contains a name that no variable of the model's optimizer has, or if the model
            is not compiled.
        TensorMismatchError: if a tensor differs in shape or dtype from the optimizer variable of the same name.
    """
    for variable, array in checked_optimizer(model, tensors):
        variable.assign(array)


def checked_optimizer(
    model: keras.Model, tensors: Mapping[str, object], *, whole: bool = False
) -> list[tuple[keras.Variable, Array]]:
    """Return the variables of the optimizer that `tensors` names, with arrays that fit.

    An optimizer that is not built yet is built.

    Args:
        model: a built model.
        tensors: the state by name; empty: nothing is done.
        whole: no state may be missing.

    Raises:
        TensorNotFoundError, TensorMismatchError: as `assign_optimizer`.
    """
    optimizer: keras.Optimizer | None = getattr(model, "optimizer", None)
    if tensors and optimizer is not None and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)
    state = {name: variable for name, (variable, _) in optimizer_state_of(model).items()}
    if not tensors.keys() <= state.keys():  # Keras' automatic number was part of names once
        tensors = {_UNNAMED.sub("variable", name): array for name, array in tensors.items()}
    expected = {name: (dtype_name(variable.dtype), tuple(variable.shape)) for name, variable in state.items()}
    arrays = checked(tensors, expected)
    missing = sorted(state.keys() - arrays.keys()) if whole and arrays else []
    if missing:
        raise TensorNotFoundError(f"expected all {len(state)} tensors of the optimizer; {missing[:8]} are missing")
    return [(state[name], array) for name, array in arrays.items()]


def optimizer_state_of(model: keras.Model, *, numbered: bool = True) -> dict[str, tuple[keras.Variable, str | None]]:
    """Return the variables of a model's optimizer by name, each with the name of the weight to which it belongs.

    Some variables belong to a single weight, such as the momentum of a kernel. The name of such a variable contains the
    name of the weight.

    Args:
        model: A built model.
        numbered: Whether weight names keep the numbers of automatic Keras layer names, as in "dense_7". Keras counts
            these numbers per process. If false, layers are numbered per model instead, as in "dense#2" (see
            `weights_in_call_order`).

    Returns:
        A mapping from variable names to pairs. The first item of a pair is the variable. The second item is the name of
        the weight to which the variable belongs, or None if the variable does not belong to a single weight, such as
        the learning rate. The mapping is empty if there is no built optimizer.
    """
    optimizer: keras.Optimizer | None = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return {}
    names = Flattened(model, configs=False, renamed=not numbered).names
    by_path: defaultdict[str, list[str]] = defaultdict(list)
    for weight in model.trainable_variables:
        by_path[weight.path.replace("/", "_")].append(names[id(weight)])
    met: defaultdict[str, int] = defaultdict(int)
    owners = dict(_owners(optimizer, ""))
    listed = cast("list[keras.Variable]", optimizer.variables)
    state: dict[str, tuple[keras.Variable, str | None]] = {}
    for variable in [*listed, *_unlisted(optimizer, {id(variable) for variable in listed})]:
        place, _, slot = variable.path.rpartition("/")
        owner = owners.get(id(variable), _plain(place))
        name, weight = f"optimizer/{owner}/{_UNNAMED.sub('variable', slot)}", None
        path = max((path for path in by_path if slot.startswith(path + "_")), key=len, default="")
        if path:
            weights = by_path[path]  # several weights may have one path; their slots come in their order
            weight = weights[met[slot] % len(weights)]
            name = f"optimizer/{owner}/{weight}/{slot[len(path) + 1 :]}"
            met[slot] += 1
        state[first_free(name, state)] = (variable, weight)
    return state


def _owners(optimizer: keras.Optimizer, within: str) -> Iterator[tuple[int, str]]:
    """id of a variable -> its optimizer's name, after those of the optimizers that hold this one.

    What an optimizer has from the start is named by itself alone, as Keras names it.
    """
    own = _plain(optimizer.name)
    for variable in [*cast("list[keras.Variable]", optimizer._variables), *_held(optimizer)]:
        began = variable is optimizer._iterations or variable is optimizer._learning_rate
        yield id(variable), own if began else within + own
    for other in _inner(optimizer):
        yield from _owners(other, f"{within}{own}/")


def _unlisted(optimizer: keras.Optimizer, listed: Set[int]) -> Iterator[keras.Variable]:
    yield from (variable for variable in _held(optimizer) if id(variable) not in listed)
    for other in _inner(optimizer):
        yield from _unlisted(other, listed)


def _held(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [value for value in vars(optimizer).values() if isinstance(value, keras.Variable)]


def _inner(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else list(getattr(optimizer, "_inner_optimizers", ()))


def _plain(name: str) -> str:
    """Return a name, or a path of them, without automatic numbers: adam_7 is numbered like layers."""
    return re.sub(r"_\d+(?=/|$)", "", name)
