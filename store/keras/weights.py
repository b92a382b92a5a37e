"""Tensors of a Keras model by name: its weights, and what its layers keep beside them.

Rules
- Weights are those of `model.weights`: moving statistics are among them, states of random seeds are not.
- Everything is checked before anything is written, so that an error leaves the model as it was.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (keras's types are partial)

from __future__ import annotations

from collections.abc import Mapping

import keras

from ..arrays import Array
from ..errors import TensorMismatchError, TensorNotFoundError
from ..graphs.graph import ModelGraph
from .optimizers import checked_optimizer
from .state import ModelState
from .vertices import Flattened


def tensors_of(model: keras.Model) -> dict[str, Array]:
    """Weights of a model by name, read-only, in the order of `model.weights`; then what its layers keep beside them.

    On the CPU nothing is copied. Each array is a snapshot all the same: TensorFlow gives a variable a new
    buffer when it is written to while somebody still reads the old one, so training that goes on does not
    change the arrays, and the memory of a weight doubles only when it is written to while its array lives.

    Raises:
        GraphError: the model has no weights yet because its input shape is unknown, or a layer cannot give its state.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")])
    >>> {name: array.shape for name, array in tensors_of(model).items()}
    {'out/kernel': (4, 2), 'out/bias': (2,)}
    """
    return ModelState(model).tensors()


def assign(model: keras.Model, tensors: Mapping[str, object]) -> None:
    """Set the tensors that `tensors` names; the others keep their values.

    Everything is checked before anything is written, so that an error leaves the model as it was.

    Raises:
        TensorNotFoundError: the model has no tensor of a name.
        TensorMismatchError: another shape or dtype than the weight's.
        GraphError: the model has no weights yet because its input shape is unknown, or a layer refused its state.
        CorruptDataError: the path of a layer's file leads out of its folder.
    """
    ModelState(model).assign(tensors)


def fill(
    model: keras.Model,
    tensors: Mapping[str, Array],
    graph: ModelGraph,
    optimizer: Mapping[str, Array],
    *,
    strict: bool = True,
) -> None:
    """Give a model all tensors of a version, by name, or by architecture where the names differ; all or nothing.

    Args:
        model: a built model; its optimizer is built if it gets state.
        tensors: of the version's model.
        graph: the version's.
        optimizer: state of the version's optimizer; empty: the model's own stays as it is.
        strict: the model may have no weight that was not stored.

    Raises:
        TensorNotFoundError: the model or its optimizer has no such tensor, or one that the model has is missing.
        TensorMismatchError, GraphError, CorruptDataError: as `assign`.
    """
    state = ModelState(model)
    own = state.all_of(tensors, graph, strict=strict)
    state.checked(own)  # before the optimizer may be built
    try:
        more = checked_optimizer(model, optimizer, whole=True)
    except (TensorNotFoundError, TensorMismatchError) as exc:
        raise type(exc)(f"the optimizer's state does not fit, optimizer=False leaves it out: {exc}") from exc
    state.assign(own, more)


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
