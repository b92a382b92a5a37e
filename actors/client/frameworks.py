"""Which framework a model belongs to, and its adapter; a framework is imported only when one of its models comes."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ...store.errors import GraphError, TensorMismatchError, TensorNotFoundError
from ...store.graphs.graph import ModelGraph
from ...store.graphs.renaming import by_own_names
from ...store.recipes import framework_of, is_note, note_of
from ...store.values import base_of

if TYPE_CHECKING:
    import keras
    import torch
    from torch import nn

    from ...store.keras import ModelState

_log = logging.getLogger(__name__)

_OPTIMIZER = "optimizer/"
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


def adapter_of(model: object) -> ModuleType:
    """Return `store.keras` or `store.torch`, whichever `model` belongs to.

    Raises:
        GraphError: it is a model of neither.
    """
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        from ...store import keras as keras_adapter

        return keras_adapter
    if torch is not None and isinstance(model, torch.nn.Module):
        from ...store import torch as torch_adapter

        return torch_adapter
    raise GraphError(f"expected a Keras model or a torch module; found {type(model).__name__}")


def is_keras(adapter: ModuleType) -> bool:
    """Tell which of the two adapters it is, without an import of Keras."""
    return hasattr(adapter, "ModelState")


class Parts(NamedTuple):
    """What is saved of a model."""

    tensors: dict[str, np.ndarray]
    """Without a copy where the framework allows it."""
    graph: ModelGraph
    """It names the tensors."""
    recipe: str
    """What the model is built from again, or a note of why nothing can."""


def graph_of(model: object, where: str) -> ModelGraph:
    """Return a graph as it is, or the architecture of a Keras model or torch module; `where` begins the error.

    Raises:
        GraphError: it is none of these.
    """
    if isinstance(model, ModelGraph):
        return model
    try:
        return adapter_of(model).graph_of(model)
    except GraphError as exc:
        raise GraphError(f"{where}: expected a ModelGraph, a Keras model or a torch module; {exc}") from exc


def parts_of(model: object, factory: str | None, arguments: Mapping[str, object] | None) -> Parts:
    """Return what is saved of a model, but for the state of its training.

    Args:
        model: a Keras model or a torch module.
        factory: name of the function that builds the torch module; None: its recipe says how, if it can.
        arguments: of the factory.

    Raises:
        GraphError: the factory or an argument cannot be stored, or it is given for a Keras model.
    """
    adapter = adapter_of(model)
    if factory is None and arguments is not None:
        raise GraphError("arguments=: expected factory= too, whose arguments these are")
    if is_keras(adapter):
        if factory is not None:
            raise GraphError(f"factory=: expected a torch module; found the Keras model {type(model).__name__}")
        state: ModelState = adapter.ModelState(model)
        tensors = state.tensors()
        return Parts(tensors, state.graph(tensors), recipe_of(model))
    recipe = recipe_of(model) if factory is None else adapter.recipe_of(model, factory, arguments)
    return Parts(adapter.tensors_of(model), adapter.graph_of(model), recipe)


def recipe_of(model: object) -> str:
    """Return what a model is built from again, or a note of why nothing can."""
    adapter = adapter_of(model)
    level = logging.WARNING if is_keras(adapter) else logging.INFO  # many torch modules do not tell
    try:
        return adapter.recipe_of(model)
    except GraphError as exc:
        reason = _ADDRESS.sub("", str(exc))  # of one architecture in each process
        _say_without_recipe(level, type(model).__qualname__, reason)
        return note_of(reason)


@lru_cache(maxsize=256)  # reasons may have values in them
def _say_without_recipe(level: int, kind: str, reason: str) -> None:
    _log.log(level, "%s is saved without a recipe to build it again, so load_model needs into=: %s", kind, reason)


def training_tensors_of(model: object, optimizer: object, scheduler: object) -> dict[str, np.ndarray]:
    """Return the state of a model's optimizer, and of its learning-rate schedule.

    Args:
        model: whose parameters they are over.
        optimizer: True for that which a Keras model was compiled with, an optimizer of `torch.optim` for a torch
            module; False: none.
        scheduler: of `torch.optim.lr_scheduler`; None: none.

    Raises:
        GraphError: a torch module does not know its optimizer, and Keras' optimizers know their schedule.
    """
    adapter, kind = adapter_of(model), type(model).__name__
    if is_keras(adapter):
        if not isinstance(optimizer, bool) or scheduler is not None:
            raise GraphError(
                f"optimizer of a Keras model ({kind}): expected True or False, and no scheduler; "
                f"found {type(optimizer).__name__} and {type(scheduler).__name__}"
            )
        return adapter.optimizer_tensors_of(model) if optimizer else {}
    return adapter.optimizer_tensors_of(model, _of_torch(optimizer, kind), scheduler)


def _of_torch(optimizer: object, kind: str) -> torch.optim.Optimizer | None:
    """Return an optimizer of torch, or None for False.

    Raises:
        GraphError: it is something else.
    """
    if optimizer is False:
        return None
    if not isinstance(optimizer, sys.modules["torch"].optim.Optimizer):
        raise GraphError(
            f"optimizer of a torch module ({kind}): expected the optimizer itself, of torch.optim; "
            f"found {optimizer!r:.80}"
        )
    return cast("torch.optim.Optimizer", optimizer)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded; see `Repository.load_model`."""

    optimizer: object = True
    """Of a torch module, gets its state; of a Keras model, True: its own does, where it was saved."""
    scheduler: object = None
    """Of a torch module's optimizer, gets its state."""
    strict: bool = True
    """The model may have no tensor that was not stored."""
    compiled: bool = True
    """A Keras model that is built is compiled, if the stored one was."""
    custom_objects: Mapping[str, object] | None = None
    """Classes and functions by name, for a Keras model that is built again."""
    factory: Callable[..., object] | str | None = None
    """Builds a torch module, in place of the function or class that was stored."""
    trusted_packages: Collection[str] = ()
    """Of which a torch module's stored function or class may be."""


def load(
    recipe: str | None,
    into: object,
    tensors: Mapping[str, np.ndarray],
    graph: ModelGraph,
    options: LoadOptions,
) -> object:
    """Fill a model, or build the model of a recipe and fill that; errors as in `Repository.load_model`.

    Args:
        recipe: what `recipe_of` gave.
        into: the model to fill; None: one is built.
        tensors: all of the version.
        graph: the stored model's.
        options: what else was asked for.
    """
    if into is None:
        return _rebuilt(recipe, tensors, graph, options)
    of_keras = is_keras(adapter_of(into))
    _check(options, of_keras, into)
    with _knowing(of_keras, options):
        fill(into, tensors, graph, options)
    return into


def _check(options: LoadOptions, of_keras: bool, into: object) -> None:
    """Refuse options that mean nothing for such a model; `into` is None: it is to be built."""
    of_torch = {"factory=": options.factory is not None, "trusted_packages=": options.trusted_packages}
    of_others = {"compile=False": not options.compiled, "custom_objects=": options.custom_objects}
    given = [name for name, value in (of_torch if of_keras else of_others).items() if value]
    if given:
        kinds = ("a torch module", "a Keras model") if of_keras else ("a Keras model", "a torch module")
        found = type(into).__name__ if into is not None else kinds[1]
        raise GraphError(f"{', '.join(given)}: expected {kinds[0]}; found {found}")
    if options.factory is not None and into is not None:
        raise GraphError(f"factory=: expected no into=, which is filled; found {type(into).__name__}")
    if isinstance(options.trusted_packages, str):
        raise GraphError(f"trusted_packages=: expected a list of packages; found {options.trusted_packages!r}")
    plain = isinstance(options.optimizer, bool) and options.scheduler is None
    if not plain and (of_keras or into is None):
        raise GraphError(
            f"optimizer of a {'Keras model' if of_keras else 'torch module that is built again'}: expected True or "
            f"False, and no scheduler; found {type(options.optimizer).__name__} and {type(options.scheduler).__name__}"
        )


def _knowing(of_keras: bool, options: LoadOptions) -> AbstractContextManager[object]:
    if not of_keras:
        return nullcontext()
    from ...store.keras import knowing

    return knowing(options.custom_objects)


def _rebuilt(recipe: str | None, tensors: Mapping[str, np.ndarray], graph: ModelGraph, options: LoadOptions) -> object:
    way_out = "pass into= to fill a model that you built"
    recipe = recipe if recipe is not None else note_of("only models saved by save_model have one")
    try:
        of_keras = not (options.factory is not None and is_note(recipe)) and framework_of(recipe) == "keras"
    except GraphError as exc:
        raise GraphError(f"{exc}; {way_out}, or factory= to build a torch module") from exc
    _check(options, of_keras, None)
    with _knowing(of_keras, options):
        try:
            if of_keras:
                return _rebuilt_keras(recipe, tensors, graph, options)
            way_out += ", or factory= to build it"
            return _rebuilt_torch(recipe, tensors, graph, options)
        except GraphError as exc:
            raise GraphError(f"{exc}; {way_out}") from exc
        except (TensorMismatchError, TensorNotFoundError) as exc:
            raise GraphError(
                f"the model that was built again does not fit the stored tensors: {exc}; {way_out}"
            ) from exc


def _rebuilt_keras(
    recipe: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph, options: LoadOptions
) -> keras.Model:
    from ...store import keras as keras_adapter

    model = keras_adapter.build(recipe, compiled=options.compiled)
    own, state = parted(tensors, graph)
    if not (options.optimizer and options.compiled):
        state = {}
    keras_adapter.fill(model, own, graph, state)
    if not state and getattr(model, "optimizer", None) is not None:
        model.compile_from_config(model.get_compile_config())  # some optimizers begin with the weights
    return model


def _rebuilt_torch(
    recipe: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph, options: LoadOptions
) -> nn.Module:
    from ...store import torch as torch_adapter

    module = torch_adapter.build(recipe, options.factory, options.trusted_packages)
    if graph.layers:
        _check_same(torch_adapter.graph_of(module), graph)
    fill(module, tensors, graph, LoadOptions())
    return module


def _check_same(built: ModelGraph, stored: ModelGraph) -> None:
    """Refuse another architecture. Configs may have other keys, as other versions of a framework add."""
    for name in {**stored.by_name, **built.by_name}:
        one, two = stored.by_name.get(name), built.by_name.get(name)
        if one is not None and two is not None:
            keys = (one.config.keys() & two.config.keys()) - {"described"} | {"call"}
            same = all(one.config.get(key) == two.config.get(key) for key in keys)
            if same and (one.inputs, one.tensors) == (two.inputs, two.tensors):
                continue
        raise GraphError(f"expected the saved architecture; the layer {name!r} of the built module differs")


def fill(model: object, tensors: Mapping[str, np.ndarray], graph: ModelGraph, options: LoadOptions) -> None:
    """Assign tensors to a model, those of its optimizer too where they were saved; all or nothing.

    They are matched by name; where the names differ, as those do that Keras numbers, by architecture: `graph` is
    that of the stored model.

    Args:
        model: a Keras model or a torch module.
        tensors: all of the version.
        graph: the version's.
        options: what else was asked for.

    Raises:
        TensorNotFoundError: the model has no such tensor, and another architecture, or one that was not stored.
        TensorMismatchError: a tensor has another shape or dtype; none was assigned.
        GraphError: a layer refused its state; the model is as it was, as far as its layers' hooks take it back.
    """
    adapter = adapter_of(model)
    own, state = parted(tensors, graph)
    if is_keras(adapter):
        adapter.fill(model, own, graph, state if options.optimizer else {}, strict=options.strict)
        return
    target: ModelGraph = adapter.graph_of(model)
    if not bases(own) <= bases(target.tensors):
        own = _unwrapped(own, target) or renamed(own, graph, target) or own
    missing: list[str] = adapter.lacking(model, own.keys()) if options.strict else []
    if missing:
        raise TensorNotFoundError(
            f"expected stored values for all tensors of the model, or strict=False; found none for {missing[:8]}"
        )
    optimizer = None if options.optimizer is True else _of_torch(options.optimizer, type(model).__name__)
    training = adapter.restoring(model, state, optimizer, options.scheduler, _names_of(tensors, own))
    undo = training.apply()
    try:
        adapter.assign(model, own)
    except BaseException:
        undo()
        raise


def parted(tensors: Mapping[str, np.ndarray], graph: ModelGraph) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tell the tensors of a model from those of its optimizer and schedule; a layer may be called so, too."""
    layers = set(graph.tensors)
    state = {name: a for name, a in tensors.items() if name not in layers and _is_of_training(name)}
    return {name: array for name, array in tensors.items() if name not in state}, state


def _is_of_training(name: str) -> bool:
    return name.startswith(_OPTIMIZER) or base_of(name) == "scheduler"


def bases(names: Iterable[str]) -> set[str]:
    """Return the names of tensors and of values: how many arrays a value takes may change."""
    return {base_of(name) or name for name in names}


def _names_of(tensors: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return what stored tensors are called in the model."""
    names = {id(array): name for name, array in own.items()}
    return {name: names[id(array)] for name, array in tensors.items() if id(array) in names}


def _unwrapped(tensors: Mapping[str, np.ndarray], target: ModelGraph) -> dict[str, np.ndarray] | None:
    """Return the tensors of a module that was saved in what wrapped it, under the module's own names."""
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in tensors):
            found = {name.removeprefix(prefix): array for name, array in tensors.items()}
            return found if bases(found) <= bases(target.tensors) else None
    return None


def renamed(tensors: Mapping[str, np.ndarray], graph: ModelGraph, target: ModelGraph) -> dict[str, np.ndarray] | None:
    """Return the tensors under the names that `target` has for them; None unless the architectures are equal.

    Raises:
        TensorMismatchError: two different tensors go to one of `target`, which uses a layer twice.
    """
    if graph.fingerprint != target.fingerprint:
        return None
    pairs = [(target.by_name[mine], graph.by_name[theirs]) for mine, theirs in target.common_prefix(graph).items()]
    if any(len(layer.tensors) != len(source.tensors) for layer, source in pairs):  # values that take more arrays
        return None
    if not all(name in tensors for _, source in pairs for name in source.tensors):  # some by another name only
        return None
    names = (both for layer, source in pairs for both in zip(layer.tensors, source.tensors, strict=True))
    return by_own_names((own, stored, tensors[stored]) for own, stored in names)
