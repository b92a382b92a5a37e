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
    """Return the weights and the layer state of a model as read-only arrays, by name.

    Weights come first, in the order of `model.weights`. Layer state is data outside the weights, such as a vocabulary.

    On the CPU, weights are not copied, and later training does not change the arrays. If a weight is written while its
    array exists, TensorFlow allocates a new buffer for the weight. The weight then takes twice the memory until the
    array is deleted.

    Raises:
        GraphError: if the model is not built, or the state of a layer cannot be read.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")])
    >>> {name: array.shape for name, array in tensors_of(model).items()}
    {'out/kernel': (4, 2), 'out/bias': (2,)}
    """
    return ModelState(model).tensors()


def assign(model: keras.Model, tensors: Mapping[str, object]) -> None:
    """Set weights and layer state of a model. Tensors of the model that are not in `tensors` do not change.

    Names are those of `tensors_of`. Layer state is data that layers keep outside their weights, such as a vocabulary.
    Layer state can include files (Keras assets). Each file is a tensor whose name contains the path of the file.

    All tensors are checked before the first is written. If a layer then rejects its state, all changes are undone.

    Raises:
        TensorNotFoundError: if `tensors` contains a name that no tensor of the model has.
        TensorMismatchError: if a tensor differs in shape or dtype from the weight of the same name, or if the content
            of a file is not a 1-D uint8 array.
        GraphError: if the model is not built, or a layer rejects its state.
        CorruptDataError: if the path of a file leads out of the layer's folder.
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
    """Assign all tensors of a version, and the optimizer state, to a model.

    Tensors are matched by name, or by architecture if the names differ. If an error is raised, the model keeps its
    previous values.

    Args:
        model: A built model. Its optimizer is built if `optimizer` is not empty.
        tensors: Tensors of the version, without the optimizer state.
        graph: Graph of the version.
        optimizer: Optimizer state of the version. If empty, the model's optimizer is not changed.
        strict: Whether to raise an error if `tensors` lacks a weight of the model.

    Raises:
        TensorNotFoundError: if the model has no tensor for a name in `tensors`, or its optimizer has no variable for a
            name in `optimizer`. Also if a weight of the model is missing from `tensors` and `strict` is true, or if a
            variable of the model's optimizer is missing from `optimizer` and `optimizer` is not empty.
        TensorMismatchError: if a tensor differs in shape or dtype from the corresponding weight or optimizer variable,
            if one tensor of the model corresponds to several stored tensors whose values differ, or if the content of a
            layer-state file (a Keras asset) is not a 1-D uint8 array.
        GraphError: if the model is not built, or a layer rejects its state.
        CorruptDataError: if the path of a layer-state file leads out of the layer's folder.
    """
    state = ModelState(model)
    own = state.all_of(tensors, graph, strict=strict)
    state.checked(own)  # before the optimizer may be built
    try:
        more = checked_optimizer(model, optimizer, whole=True)
    except (TensorNotFoundError, TensorMismatchError) as exc:
        raise type(exc)(f"the optimizer's state does not fit (optimizer=False skips it): {exc}") from exc
    state.assign(own, more)


def weights_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Return the weights of a model as Keras variables, by name. The names are those of `tensors_of`."""
    names = Flattened(model, configs=False).names
    return {names[id(weight)]: weight for weight in model.weights}


def weights_in_call_order(model: keras.Model) -> dict[str, keras.Variable]:
    """Return the weights of a model as Keras variables, by name, in the order in which a forward pass reads them.

    Automatic Keras layer names contain a number that is counted per process, as in "dense_7". In the returned names,
    layers are numbered per model instead, as in "dense" and "dense#2". Therefore, two models built by the same function
    have the same weight names.
    """
    return Flattened(model, configs=False, renamed=True).weights
