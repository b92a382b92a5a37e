"""The graph of a PyTorch module.

Rules
- Vertices are modules of torch.nn that are no containers, and functions and methods called between them
  ("function:add", "method:view"), as they are traced; a module used twice is two vertices ("act", "act#2") with the
  same tensors; a parameter or buffer used directly is a vertex "parameter".
- A module that cannot be traced is taken for a chain of its leaf modules in the order of registration.
- A config holds the type's name, what the constructor set in public attributes, and the shapes of the
  tensors, so that vertices which match have tensors which match. No names, no training flag, no dtype of a weight.
- What a training may change is in no config. The elements of a tensor are not, stored or not: a tensor that is not
  stored is a vertex "constant" of its dtype and shape. Numbers are, where a layer's constructor was given them, or a
  call in `forward` has them as an argument.
- What a state has beside plain tensors belongs to the vertex of its module; its length is in no config.
- A graph is found once for each architecture (`signature`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (torch's types are partial)

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import fx, nn

from ..errors import GraphError
from ..facts import Json, call_facts, fact
from ..graphs.graph import Layer, ModelGraph
from .recording import is_leaf
from .signature import KnownGraphs, signature
from .state import State, bare, live_tensors, plain_name
from .tracing import Trace, observe, trace
from .values import packed

_log = logging.getLogger(__name__)

_known = KnownGraphs()


def graph_of(module: nn.Module, state: State | None = None) -> ModelGraph:
    """Return the graph of a module: its leaf modules, and the functions called between leaf modules.

    The graph describes the forward pass in evaluation mode. The module is not changed, so other threads can use the
    module at the same time.

    Args:
        module: The module, or a wrapper such as `DistributedDataParallel`.
        state: Current state of the module, if already available. If None, the state is read from the module.

    Raises:
        TensorMismatchError: if part of the state cannot be stored (see `tensors_of`).
        GraphError: if the module or a submodule is the result of `torch.jit.trace`.

    >>> graph = graph_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    >>> [(layer.name, layer.config["class"], layer.inputs) for layer in graph.layers]
    [('input', 'Input', ()), ('0', 'Linear', ('input',)), ('1', 'ReLU', ('0',))]
    """
    module = bare(module)
    key = signature(module)
    graph = _known.find(key, module)
    if graph is None:
        flattened = _Flattened(module, state if state is not None else State(module))
        graph = ModelGraph(flattened.vertices)
        if flattened.read is not None:
            _known.keep(key, module, flattened.read, graph)
    return graph


class _Flattened:
    """A module taken apart."""

    def __init__(self, module: nn.Module, state: State) -> None:
        self.vertices: list[Layer] = []
        self._root = module
        self._all = state.tensors
        self._values = {name: list(packed(name, value)) for name, value in state.values.items()}
        """Name of what is no plain tensor -> the names of the arrays that stand for it."""
        self._kept: set[str] = set()
        """Those of which a vertex has the arrays."""
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        """id of a tensor -> its names; several if it is tied."""
        for name, tensor in self._all.items():
            self._names[id(tensor)].append(name)
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        """id of a module -> its own tensors."""
        self._modules = dict(module.named_modules())
        for name, part in self._modules.items():
            if isinstance(part, torch.jit.TracedModule):  # pyright: ignore[reportPrivateImportUsage]
                raise GraphError(
                    f"module {name or type(module).__qualname__!r}: expected a module that runs as Python code; found "
                    "the result of torch.jit.trace: save the module that was traced"
                )
        self.read: frozenset[str] | None = frozenset()
        """Paths of the buffers whose values count; None: others may, too."""
        self._taken: set[str] = set()
        self._placed: set[int] = set()
        """ids of tensors that a vertex has."""
        if is_leaf(module):
            self._module(module, "model", [self._vertex("input", {"class": "Input", "position": 0})])
        else:
            self._trace(module)
        self._rest(module)

    def _trace(self, module: nn.Module) -> None:
        try:
            found = _traced(module)
        except MemoryError:
            raise
        except Exception as exc:  # noqa: BLE001  of the module's own code, which met something that is no tensor
            _say_assumed(type(module).__qualname__, f"{type(exc).__name__}: {exc}")
            self.read = None  # another time it may be traced
            self._chain(module)
        else:
            self.read = found.read
            self._traced(module, found)

    def _traced(self, module: nn.Module, found: Trace) -> None:
        vertices: dict[fx.Node, str] = {}
        positions = {node: index for index, node in enumerate(found.graph.find_nodes(op="placeholder"))}
        for node in found.graph.nodes:
            if node.op == "placeholder":
                vertices[node] = self._vertex("input", {"class": "Input", "position": positions[node]})
            elif node.op == "get_attr":
                vertices[node] = self._attribute(module, str(node.target), found)
            elif node.op != "output":
                vertices[node] = self._call(node, vertices)

    def _call(self, node: fx.Node, vertices: Mapping[fx.Node, str]) -> str:
        def reference(value: object) -> tuple[str, int] | None:
            return (vertices[value], 0) if isinstance(value, fx.Node) else None

        function, kwargs = cast("Callable[..., object]", node.target), dict(node.kwargs)
        if node.op == "call_module":
            item = self._modules[str(node.target)]
            inputs, call = call_facts(item.forward, node.args, kwargs, reference)
            return self._module(item, str(node.target), inputs, {"call": call} if call else {})
        kind, name = ("method", str(node.target)) if node.op == "call_method" else ("function", _named(function))
        kwargs.pop("training", None)
        inputs, call = call_facts(self._taking, node.args, kwargs, reference)
        return self._vertex(node.name, {"class": f"{kind}:{name}", **({"call": call} if call else {})}, inputs)

    def _taking(self, *args: object) -> None:
        """Take what a function or a method is called with, of whose parameters nothing is known."""

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
        for name, parts in self._values.items():
            if name not in self._kept:
                self._vertex(name, {"class": "state"}, (), parts)

    def _module(self, module: nn.Module, path: str, inputs: list[str], more: Mapping[str, object] | None = None) -> str:
        state = self._state(module)
        names = [name for tensor in state.values() for name in self._names[id(tensor)]]
        self._placed.update(id(tensor) for tensor in state.values())
        names += self._values_of(module, path)
        config = {**_facts(module, state), "tensors": {name: list(item.shape) for name, item in state.items()}}
        return self._vertex(path, {**config, **(more or {})}, inputs, list(dict.fromkeys(names)))

    def _values_of(self, module: nn.Module, path: str) -> list[str]:
        """Return the names of the arrays that stand for what a module has beside plain tensors."""
        if not self._values:
            return []
        within = f"{plain_name(path)}." if module is not self._root else ""
        mine = [name for name in self._values if name.startswith(within)]
        self._kept.update(mine)
        return [part for name in mine for part in self._values[name]]

    def _state(self, module: nn.Module) -> dict[str, torch.Tensor]:
        if id(module) not in self._states:
            self._states[id(module)] = live_tensors(module)
        return self._states[id(module)]

    def _attribute(self, module: nn.Module, path: str, found: Trace) -> str:
        owner, _, name = path.rpartition(".")
        value = getattr(found.root if not owner and path in found.constants else module.get_submodule(owner), name)
        if isinstance(value, torch.Tensor):
            return self._parameter(path, value)
        return self._vertex(path, {"class": "constant", "value": fact(value)})

    def _parameter(self, path: str, tensor: torch.Tensor) -> str:
        names = self._names.get(id(tensor), [])
        self._placed.add(id(tensor))
        if names:
            return self._vertex(path, {"class": "parameter", "shape": list(tensor.shape)}, (), names)
        value = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return self._vertex(path, {"class": "constant", "value": value})

    def _vertex(
        self,
        name: str,
        config: Mapping[str, object],
        inputs: Sequence[str] = (),
        tensors: Sequence[str] = (),
    ) -> str:
        name = plain_name(name)
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}#{count}"
        self._taken.add(unique)
        self.vertices.append(Layer(unique, config, tuple(inputs), tuple(tensors)))
        return unique


def _traced(module: nn.Module) -> Trace:
    """Trace a module by proxies or, where these do not get through, by what it says it can be called with."""
    try:
        return trace(module)
    except Exception:  # of the module's own code
        inputs = _dummy_inputs(module)
        if inputs is None:
            raise
        try:
            return observe(module, inputs, computes=False)
        except Exception as exc:  # noqa: BLE001  of the module's own code, which looked at a value
            _log.debug("%s on the device meta: %r", type(module).__qualname__, exc)
            return observe(module, inputs, computes=True)


def _dummy_inputs(module: nn.Module) -> Mapping[str, object] | None:
    """Return what a module says it can be called with, but for masks: what is done would depend on their values."""
    try:
        of_user = cast(Any, module)
        found, images = of_user.dummy_inputs, getattr(module, "main_input_name", "") == "pixel_values"
        if images:  # of Hugging Face: what it says is text in any case
            config, size = of_user.config, of_user.config.image_size
            found = {"pixel_values": torch.empty(1, config.num_channels, size, size, device="meta")}
    except Exception as exc:  # noqa: BLE001  it has no such attribute, or one that does not work
        _log.debug("dummy_inputs of %s: %r", type(module).__qualname__, exc)
        return None
    if not isinstance(found, Mapping):
        return None
    given = cast("Mapping[str, object]", found)
    return {name: value for name, value in given.items() if not name.endswith("mask")}


@cache
def _say_assumed(module_type: str, reason: str) -> None:
    _log.warning(
        "%s cannot be traced (%s): assuming a chain of its modules in their order of registration",
        module_type,
        reason,
    )


def _leaves(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Leaf modules in order of registration, each once under each of its places."""
    places = module._modules  # pyright: ignore[reportPrivateUsage]  # named_children() leaves out repetitions
    children = [(name, child) for name, child in places.items() if child is not None]
    if is_leaf(module) or not children:
        yield path or "model", module
        return
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else name)


def _facts(module: nn.Module, state: Collection[str]) -> dict[str, Json]:
    """Type and constructor facts of a module: simple public attributes, and its `extra_repr`.

    Args:
        module: of which a vertex is made.
        state: names in its state, as quantised modules have their scales, which are attributes too.
    """
    declared: list[str] = list(getattr(module, "__constants__", ()))
    public = [name for name in vars(module) if not name.startswith("_") and name != "training"]
    config: dict[str, Json] = {"class": type(module).__name__}
    given = _constructor_facts(type(module)).difference(state)
    for name in dict.fromkeys([*public, *declared]):
        value = getattr(module, name, None)
        if _is_simple(value) and (name in given or not _has_numbers(value)):
            config[name] = fact(value)
    described = "" if type(module).__module__.startswith("torch.ao.") else module.extra_repr()  # it has scales
    return {**config, "described": described} if described else config


@cache
def _constructor_facts(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of attributes whose numbers say what a layer is.

    They are what its class declares as constants, parameters of its constructors, and what PyTorch's constructors set.
    """
    found: set[str] = set(getattr(kind, "__constants__", ()))
    for base in kind.__mro__:
        constructor = vars(base).get("__init__")
        if isinstance(constructor, FunctionType):
            code = inspect.unwrap(constructor).__code__
            found.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            found.update(code.co_names if base.__module__.startswith("torch.") else ())
    return frozenset(found)


def _is_simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_simple(item) for item in cast("list[object]", value))
    return value is None or isinstance(value, (bool, int, float, str)) or callable(value)


def _has_numbers(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_numbers, cast("list[object]", value)))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _named(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("_")
