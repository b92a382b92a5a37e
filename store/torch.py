"""PyTorch modules: their graph and their tensors.

Rules
- Vertices are modules of torch.nn that are no containers, and functions and methods called between them
  ("function:add", "method:view"), as `torch.fx` traces them; a module used twice is two vertices ("act",
  "act#2") with the same tensors; a parameter or buffer used directly is a vertex "parameter".
- A module that cannot be traced is taken for a chain of its leaf modules in the order of registration.
- A config holds the type's name, what the constructor set in public attributes, and the shapes of the
  tensors, so that vertices which match have tensors which match. No names, no training flag, no dtype.
- Tensors are those of `state_dict()`, under all of the names that it gives them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (torch's types are partial)

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn

from .arrays import Array, as_bytes, as_numpy, checked, read_only
from .facts import Json, call_facts, fact
from .graphs.graph import Layer, ModelGraph

_log = logging.getLogger(__name__)

_UNTRACEABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a forward pass may raise when it meets a proxy in place of a tensor."""


def graph_of(module: nn.Module) -> ModelGraph:
    """Flatten a module to the graph of its leaf modules and of the functions between them.

    The graph is the one of inference: the training flag is off while it is traced.

    >>> graph = graph_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    >>> [(layer.name, layer.config["class"], layer.inputs) for layer in graph.layers]
    [('input', 'Input', ()), ('0', 'Linear', ('input',)), ('1', 'ReLU', ('0',))]
    """
    return ModelGraph(_Flattened(module).vertices)


def tensors_of(module: nn.Module) -> dict[str, Array]:
    """Parameters and persistent buffers by the names of `state_dict()`, read-only.

    On the CPU nothing is copied, and the arrays are live: a later in-place change, such as an optimizer's
    step, shows in them.

    >>> {name: array.shape for name, array in tensors_of(nn.Linear(4, 2)).items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    return {name: read_only(as_numpy(item, f"tensor {name!r}")) for name, item in _state(module).items()}


def assign(module: nn.Module, tensors: Mapping[str, object]) -> None:
    """Copy `tensors` into the module's own memory; those that are not named keep their values.

    Everything is checked before anything is written, so that an error leaves the module as it was.

    Raises:
        TensorNotFoundError: the module has no tensor of a name.
        TensorMismatchError: another shape or dtype than the tensor's.
    """
    state = _state(module)
    expected = {name: (str(item.dtype).removeprefix("torch."), tuple(item.shape)) for name, item in state.items()}
    for name, array in checked(tensors, expected).items():
        _write(state[name], array)


def _write(tensor: torch.Tensor, array: Array) -> None:
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        np.copyto(as_numpy(tensor, "tensor"), array)
        torch.autograd.graph.increment_version(tensor)
        return
    raw = torch.from_numpy(as_bytes(array).copy())  # torch wants memory that it may write to
    with torch.no_grad():
        tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}  # no extra state


class _Flattened:
    """A module taken apart."""

    def __init__(self, module: nn.Module) -> None:
        self.vertices: list[Layer] = []
        self._all = _state(module)
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        """id of a tensor -> its names; several if it is tied."""
        for name, tensor in self._all.items():
            self._names[id(tensor)].append(name)
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        """id of a module -> its own tensors."""
        self._modules = dict(module.named_modules())
        self._taken: set[str] = set()
        self._placed: set[int] = set()
        """ids of tensors that a vertex has."""
        if _is_leaf(module):
            self._module(module, "model", [self._vertex("input", {"class": "Input", "position": 0})])
        else:
            self._trace(module)
        self._rest(module)

    def _trace(self, module: nn.Module) -> None:
        with _inference(module):
            try:
                graph = _Tracer().trace(module)
            except _UNTRACEABLE as exc:
                _say_assumed(type(module).__qualname__, f"{type(exc).__name__}: {exc}")
                self._chain(module)
            else:
                self._traced(module, graph)

    def _traced(self, module: nn.Module, graph: fx.Graph) -> None:
        vertices: dict[fx.Node, str] = {}
        positions = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
        for node in graph.nodes:
            if node.op == "placeholder":
                vertices[node] = self._vertex("input", {"class": "Input", "position": positions[node]})
            elif node.op == "get_attr":
                vertices[node] = self._attribute(module, str(node.target))
            elif node.op != "output":
                vertices[node] = self._call(node, vertices)

    def _call(self, node: fx.Node, vertices: Mapping[fx.Node, str]) -> str:
        def reference(value: object) -> tuple[str, int] | None:
            return (vertices[value], 0) if isinstance(value, fx.Node) else None

        function, kwargs = cast("Callable[..., Any]", node.target), dict(node.kwargs)
        if node.op == "call_module":
            item = self._modules[str(node.target)]
            inputs, call = call_facts(item.forward, node.args, kwargs, reference)
            return self._module(item, str(node.target), inputs, {"call": call} if call else {})
        kind, name = ("method", str(node.target)) if node.op == "call_method" else ("function", _named(function))
        kwargs.pop("training", None)
        inputs, call = call_facts(lambda *args: args, node.args, kwargs, reference)
        return self._vertex(node.name, {"class": f"{kind}:{name}", **({"call": call} if call else {})}, inputs)

    def _chain(self, module: nn.Module) -> None:
        inputs: list[str] = []
        for path, item in _leaves(module, ""):
            inputs = [self._module(item, path, inputs)]

    def _rest(self, module: nn.Module) -> None:
        """Modules that the traced call leaves out, and parameters that no leaf module holds."""
        for path, item in _leaves(module, ""):
            if any(id(tensor) not in self._placed for tensor in self._state(item).values()):
                self._module(item, path, [])
        for name, tensor in self._all.items():
            if id(tensor) not in self._placed:
                self._parameter(name, tensor)

    def _module(self, module: nn.Module, path: str, inputs: list[str], more: Mapping[str, object] | None = None) -> str:
        state = self._state(module)
        names = [name for tensor in state.values() for name in self._names[id(tensor)]]
        self._placed.update(id(tensor) for tensor in state.values())
        config = {**_facts(module), "tensors": {name: list(item.shape) for name, item in state.items()}}
        return self._vertex(path, {**config, **(more or {})}, inputs, list(dict.fromkeys(names)))

    def _state(self, module: nn.Module) -> dict[str, torch.Tensor]:
        if id(module) not in self._states:
            self._states[id(module)] = _state(module)
        return self._states[id(module)]

    def _attribute(self, module: nn.Module, path: str) -> str:
        owner, _, name = path.rpartition(".")
        value = getattr(module.get_submodule(owner), name)
        if isinstance(value, torch.Tensor):
            return self._parameter(path, value)
        return self._vertex(path, {"class": "constant", "value": fact(value)})

    def _parameter(self, path: str, tensor: torch.Tensor) -> str:
        names = self._names.get(id(tensor), [])
        self._placed.add(id(tensor))
        if names:
            return self._vertex(path, {"class": "parameter", "shape": list(tensor.shape)}, (), names)
        return self._vertex(path, {"class": "constant", "value": fact(tensor)})

    def _vertex(
        self,
        name: str,
        config: Mapping[str, object],
        inputs: Sequence[str] = (),
        tensors: Sequence[str] = (),
    ) -> str:
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}#{count}"
        self._taken.add(unique)
        self.vertices.append(Layer(unique, config, tuple(inputs), tuple(tensors)))
        return unique


class _Tracer(fx.Tracer):
    """Looks into every module that is not of torch.nn, and into containers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether `m` becomes one vertex."""
        return _is_leaf(m)


@contextmanager
def _inference(module: nn.Module) -> Generator[None]:
    """Turn every training flag off for a while, and remove what the tracer attaches to the module."""
    modes = [(item, item.training) for item in module.modules()]
    known = set(vars(module))
    try:
        for item, _ in modes:
            item.training = False
        yield
    finally:
        for item, mode in modes:
            item.training = mode
        for name in set(vars(module)) - known:
            delattr(module, name)


@cache
def _say_assumed(module_type: str, reason: str) -> None:
    _log.warning(
        "%s cannot be traced (%s): its modules are taken for a chain in order of registration",
        module_type,
        reason,
    )


def _is_leaf(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, containers)


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Leaf modules in order of registration, each once under each of its places."""
    places = module._modules  # pyright: ignore[reportPrivateUsage]  # named_children() leaves out repetitions
    children = [(name, child) for name, child in places.items() if child is not None]
    if _is_leaf(module) or not children:
        yield path or "model", module
        return
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else name)


def _facts(module: nn.Module) -> dict[str, Json]:
    """Type and constructor facts of a module: simple public attributes, and what it says of itself."""
    declared: list[str] = list(getattr(module, "__constants__", ()))
    public = [name for name in vars(module) if not name.startswith("_") and name != "training"]
    config: dict[str, Json] = {"class": type(module).__name__}
    for name in dict.fromkeys([*public, *declared]):
        value = getattr(module, name, None)
        if _is_simple(value):
            config[name] = fact(value)
    described = module.extra_repr()
    return {**config, "described": described} if described else config


def _is_simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_simple(item) for item in cast("list[object]", value))
    return value is None or isinstance(value, (bool, int, float, str)) or callable(value)


def _named(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("_")
