"""Weights and optimizer state of a Keras model by name.

Rules
- Tensors are those of `model.weights`: moving statistics are among them, states of random seeds are not.
- Everything is checked before anything is written, so that an error leaves the model as it was.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import keras

from ..arrays import Array, as_numpy, checked, dtype_name, read_only
from .vertices import Flattened, first_free


def tensors_of(model: keras.Model) -> dict[str, Array]:
    """Weights of a model by name, read-only, in the order of `model.weights`.

    On the CPU nothing is copied. Each array is a snapshot all the same: TensorFlow gives a variable a new
    buffer when it is written to while somebody still reads the old one, so training that goes on does not
    change the arrays, and the memory of a weight doubles only when it is written to while its array lives.

    Raises:
        GraphError: the model has no weights yet because its input shape is unknown.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")])
    >>> {name: array.shape for name, array in tensors_of(model).items()}
    {'out/kernel': (4, 2), 'out/bias': (2,)}
    """
    return snapshot(weights_of(model))


def assign(model: keras.Model, tensors: Mapping[str, object]) -> None:
    """Set the weights that `tensors` names; the others keep their values.

    Everything is checked before anything is written, so that an error leaves the model as it was.

    Raises:
        TensorNotFoundError: the model has no weight of a name.
        TensorMismatchError: another shape or dtype than the weight's.
        GraphError: the model has no weights yet because its input shape is unknown.
    """
    assign_to(weights_of(model), tensors)


def optimizer_tensors_of(model: keras.Model) -> dict[str, Array]:
    """State of the optimizer by name, as "optimizer/adam/dense/kernel/momentum"; as `tensors_of`.

    Empty if the model is not compiled, or was not trained since.
    """
    return snapshot(_optimizer_state(model))


def assign_optimizer(model: keras.Model, tensors: Mapping[str, object]) -> None:
    """Set the optimizer's state that `tensors` names, all or nothing; an optimizer not built yet is built.

    Raises:
        TensorNotFoundError: the optimizer has no state of a name, or the model is not compiled.
        TensorMismatchError: another shape or dtype.
    """
    optimizer: keras.Optimizer | None = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    assign_to(_optimizer_state(model), tensors)


def weights_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Variables of a model by the names that their tensors have."""
    names = Flattened(model, configs=False).names
    return {names[id(weight)]: weight for weight in model.weights}


def weights_in_call_order(model: keras.Model) -> dict[str, keras.Variable]:
    """Variables of a model by name, in the order in which a forward pass reads them.

    Layers without a name of their own are counted in this model alone ("dense", "dense#2"), whatever numbers Keras
    gave to them: a function that builds the model twice in a process gives the same names twice.
    """
    return Flattened(model, configs=False, renamed=True).weights


def optimizer_state_of(model: keras.Model, *, numbered: bool = True) -> dict[str, tuple[keras.Variable, str | None]]:
    """State of a built optimizer: name -> variable, and the weight whose slot it is, None if it is no slot.

    A slot's name has its weight's name in place of Keras's path; empty if the optimizer is not built.

    Args:
        model: a built model.
        numbered: name weights as `weights_of` does; False: as `weights_in_call_order`.
    """
    optimizer: keras.Optimizer | None = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return {}
    names = Flattened(model, configs=False, renamed=not numbered).names
    by_path: defaultdict[str, list[str]] = defaultdict(list)
    for weight in model.trainable_variables:
        by_path[weight.path.replace("/", "_")].append(names[id(weight)])
    met: defaultdict[str, int] = defaultdict(int)
    state: dict[str, tuple[keras.Variable, str | None]] = {}
    for variable in optimizer.variables:
        owner, _, slot = variable.path.rpartition("/")
        owner = re.sub(r"_\d+(?=/|$)", "", owner)  # adam_7: numbered like layers
        name, weight = f"optimizer/{owner}/{slot}", None
        path = max((path for path in by_path if slot.startswith(path + "_")), key=len, default="")
        if path:
            weights = by_path[path]  # several weights may have one path; their slots come in their order
            weight = weights[met[slot] % len(weights)]
            name = f"optimizer/{owner}/{weight}/{slot[len(path) + 1 :]}"
            met[slot] += 1
        state[first_free(name, state)] = (variable, weight)
    return state


def _optimizer_state(model: keras.Model) -> dict[str, keras.Variable]:
    return {name: variable for name, (variable, _) in optimizer_state_of(model).items()}


def snapshot(variables: Mapping[str, object]) -> dict[str, Array]:
    """Values of variables by name, as `tensors_of` gives them."""
    return {name: read_only(as_numpy(variable, f"tensor {name!r}")) for name, variable in variables.items()}


def assign_to(variables: Mapping[str, keras.Variable], tensors: Mapping[str, object]) -> None:
    """Set variables by name, as `assign` sets a model's."""
    expected = {name: (dtype_name(variable.dtype), tuple(variable.shape)) for name, variable in variables.items()}
    for name, array in checked(tensors, expected).items():
        variables[name].assign(array)
