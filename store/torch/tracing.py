"""The forward pass of a module, found without changes to the module.

Rules
- `torch.fx.Tracer.trace` replaces `nn.Module.__call__` and sets a flag for the whole process: forward passes of other
  threads get into the trace, and compiled modules raise an error. Here a copy of the tree of modules (`recording`) is
  called with proxies instead.
- If proxies do not get through, a module with `dummy_inputs` (Hugging Face) is called with these. A
  `TorchFunctionMode`, which is local to the thread, records the calls: on the device "meta", which computes nothing,
  or, if the module inspects values, with copies of its tensors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownLambdaType=false
# (torch's types are partial)

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.overrides import TorchFunctionMode, resolve_name

from .recording import PLAIN, Recorded


@dataclass(frozen=True, slots=True)
class Trace:
    """A forward pass."""

    graph: fx.Graph
    """Inputs, modules, functions, methods and tensors; targets of modules and tensors are their paths."""
    root: nn.Module
    """The copy that was called."""
    constants: frozenset[str]
    """Attributes of `root` that the module does not have: tensors that came up in between."""
    read: frozenset[str] | None
    """Paths of the buffers that were read; None: values of other tensors may have counted, too."""


def trace(module: nn.Module) -> Trace:
    """Return the forward pass of inference, called with proxies.

    Modules and tensors that have several paths go by their first.

    Raises:
        Exception: whatever the forward pass raises when it meets a proxy in place of a tensor.
    """
    tracer = _Symbolic(module)
    graph = tracer.run()
    constants = frozenset(vars(tracer.root).keys() - vars(module).keys())
    return Trace(graph, tracer.root, constants, frozenset(tracer.copy.read))


def observe(module: nn.Module, inputs: Mapping[str, object], *, computes: bool) -> Trace:
    """Return the forward pass of inference on `inputs`.

    Args:
        module: the module.
        inputs: keyword arguments of its forward pass.
        computes: do so; else all is on the device "meta", where tensors have shape and dtype only.

    Raises:
        Exception: whatever the forward pass raises, as where it asks a tensor of "meta" for a value.
    """
    observed = _Observed(module, computes)
    graph = observed.run(inputs)
    return Trace(graph, observed.root, frozenset(), None if computes else frozenset(observed.copy.read))


class _Symbolic(fx.Tracer):
    """One forward pass on proxies."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(autowrap_modules=cast(Any, ()))
        self.copy = Recorded(module, self._leaf, self._parameter)
        self.root = self.copy.root
        self._module = module
        self._proxies: dict[int, fx.Proxy] = {}
        """id of a parameter -> what stands for it."""

    def run(self) -> fx.Graph:
        """Run it."""
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = cast(Any, dict(self.copy.tensors))  # the base adds to it
        forward, arguments = self.create_args_for_root(type(self.root).forward, True, None)
        self.create_node("output", "output", (self.create_arg(forward(*arguments)),), {})
        return self.graph

    def create_arg(self, a: object) -> Argument:
        """Write an argument for a node, as the base does; most are of these kinds."""
        if isinstance(a, fx.Proxy):
            return a.node
        if type(a) is tuple:
            return tuple([self.create_arg(item) for item in a])
        if type(a) in PLAIN or (type(a) is dict and not a):
            return cast(Argument, a)
        return super().create_arg(a)

    def _leaf(
        self, path: str, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> fx.Proxy:
        return self.create_proxy("call_module", path, args, kwargs)

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(item): path for path, item in self._module.named_parameters()}

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter | fx.Proxy:
        path = self._paths.get(id(parameter))
        if path is None:  # of a module that is not registered
            return parameter
        if id(parameter) not in self._proxies:
            self._proxies[id(parameter)] = self.create_proxy("get_attr", path, (), {})
        return self._proxies[id(parameter)]


class _Observed:
    """One forward pass on tensors."""

    def __init__(self, module: nn.Module, computes: bool) -> None:
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        """id of a tensor -> where it comes from."""
        self._alive: list[torch.Tensor] = []
        """They must not go while their ids stand for them."""
        self._paths: dict[int, str] = {}
        """id of a tensor of the module -> its path."""
        self._within = False
        """A leaf is called: what it calls is not noted."""
        self.copy = Recorded(module, self._leaf, lambda parameter: parameter)
        self.root = self.copy.root
        device = next((item.device for item in module.parameters()), torch.device("cpu"))
        self._device = device if computes else torch.device("meta")
        self._look()

    def run(self, inputs: Mapping[str, object]) -> fx.Graph:
        """Run it."""
        given: dict[str, object] = {}
        for name, value in inputs.items():
            given[name] = value.to(self._device) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                self._comes_from(given[name], self._graph.placeholder(name))
        with torch.no_grad(), _Watch(self._noted):
            self.root(**given)
        return self._graph

    def _look(self) -> None:
        """Put a copy in the place of each tensor, on the device "meta" where nothing is computed, and find its path."""
        made: dict[int, torch.Tensor] = {}
        for path, item in self.root.named_modules(remove_duplicate=False):
            places = (vars(item)["_parameters"], vars(item)["_buffers"], vars(item))
            for place in places:
                for name, value in place.items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    if id(value) not in made:
                        made[id(value)] = _copied(value, self._device)
                        self._alive.append(value)
                        self._paths[id(made[id(value)])] = f"{path}.{name}" if path else name
                    place[name] = made[id(value)]
        self._alive += made.values()

    def _leaf(
        self, path: str, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._within:
            return forward(*args, **kwargs)
        given = self._given(args, kwargs)
        self._within = True
        try:
            found = forward(*args, **kwargs)
        finally:
            self._within = False
        self._comes_from(found, self._graph.create_node("call_module", path, *given))
        return found

    def _noted(self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self._within:
            return function(*args, **kwargs)
        given = self._given(args, kwargs)
        found = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        changed = args[0] if name == "__setitem__" else found
        if any(True for _ in tensors_in(changed)):
            self._comes_from(changed, self._graph.create_node("call_function", _Named(function), *given))
        return found

    def _given(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        given = (cast("tuple[Argument, ...]", args), cast("dict[str, Argument]", kwargs))
        return map_aggregate(given, lambda item: self._node(item) if isinstance(item, torch.Tensor) else item)

    def _node(self, tensor: torch.Tensor) -> fx.Node | str:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) in self._paths:
            return self._comes_from(tensor, self._graph.create_node("get_attr", self._paths[id(tensor)]))
        return f"tensor of {tensor.dtype} {tuple(tensor.shape)}"  # made where nothing is noted

    def _comes_from(self, value: object, node: fx.Node) -> fx.Node:
        """Note that a tensor, or those in a list or mapping, are what a node gives."""
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            self._alive.append(value)
            return node
        listed = enumerate(value) if isinstance(value, (tuple, list)) else ()
        for key, item in value.items() if isinstance(value, Mapping) else listed:
            if any(True for _ in tensors_in(item)):
                self._comes_from(item, self._graph.create_node("call_function", operator.getitem, (node, key)))
        return node


class _Watch(TorchFunctionMode):
    """Calls back for what this thread calls of PyTorch."""

    def __init__(self, noted: Callable[..., object]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Take a call in its place."""
        return self._noted(func, args, kwargs or {})


class _Named:
    """A function by its name; a property's getter is called like the property."""

    def __init__(self, function: Callable[..., object]) -> None:
        name: str = getattr(function, "__name__", type(function).__name__)
        if name in ("__get__", "__set__"):
            name = (resolve_name(function) or f"{name}.").split(".")[-2]
        self.__name__ = name.strip("_")

    def __call__(self, *args: object) -> None:
        """Do nothing: fx expects something to call."""


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().to("meta") if device.type == "meta" else tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in a value, including those in nested lists, tuples and mapping values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("list[object]", value):
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[object, object]", value).values():
            yield from tensors_in(item)
