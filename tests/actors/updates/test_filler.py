"""A model that answers is filled as the framework itself would load it, or refuses a version by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.updates.filler import Filler
from tensorvine.store.errors import GraphError, TensorMismatchError
from tensorvine.store.graphs.graph import ModelGraph

torch = pytest.importorskip("torch")
nn = torch.nn
NONE = ModelGraph(())


class Merged(nn.Module):
    """Answers with what it derives from its weights when it is loaded."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2,), value)) for _ in range(2))
        self.merged = torch.full((2,), 2 * value)

    def forward(self, x: Any) -> Any:
        return x * self.merged


class ByHook(Merged):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__(value)
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "merged", module.a + module.b))


class ByMethod(Merged):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.merged = self.a + self.b


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.embed(x))


@pytest.fixture
def helper() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def tensors_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}


def graph_of(module: nn.Module) -> ModelGraph:
    from tensorvine.store.torch import graph_of

    return graph_of(module)


@pytest.mark.parametrize("make", [ByHook, ByMethod])
def test_what_a_module_derives_when_it_is_loaded_is_of_each_version(helper: Executor, make: Callable[..., Any]) -> None:
    net = nn.Sequential(make())
    filler = Filler(net, helper)
    for value in (3.0, 4.0):
        filler.fill(tensors_of(nn.Sequential(make(value))), NONE)
        assert net(torch.ones(2)).tolist() == [2 * value] * 2


def test_two_values_for_a_tied_tensor_are_refused_by_name_and_nothing_is_written(helper: Executor) -> None:
    net, untied = Tied(), Tied(tied=False)
    filler = Filler(net, helper)
    before = net.embed.weight.detach().clone()
    with pytest.raises(TensorMismatchError, match=r"'embed\.weight' and 'head\.weight': expected one value"):
        filler.fill(tensors_of(untied), NONE)
    assert torch.equal(net.embed.weight, before)
    filler.fill(tensors_of(Tied()), NONE)


class Reading(nn.Module):
    """Reads a buffer and a tensor that are not stored, and has counters."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.body.steps, self.body.loss = int(value), value
        self.table = torch.full((2,), value)
        self.register_buffer("mask", torch.full((2,), value), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.body(x) * self.mask + self.table + self.table.sum()


def test_versions_of_a_module_that_reads_tensors_which_are_not_stored_are_served(helper: Executor) -> None:
    net, other = Reading(1.0), Reading(2.0)
    Filler(net, helper).fill(tensors_of(other), graph_of(other))
    assert torch.equal(net.body.weight, other.body.weight)
    assert net.table.tolist() == [1.0, 1.0]  # its own


def test_a_graph_that_had_the_values_of_such_tensors_is_refused_with_the_reason(helper: Executor) -> None:
    net = Reading(1.0)
    rows = json.loads(graph_of(net).to_json())
    for _, config, _, _ in rows["layers"]:
        if config["class"] == "constant":
            config["value"]["content"] = "0" * 32  # as it was stored
    with pytest.raises(GraphError, match=r"stored by an earlier version of TensorVine.*save the model again"):
        Filler(net, helper).fill(tensors_of(net), ModelGraph.from_json(json.dumps(rows)))


def test_a_value_that_is_cached_until_a_weight_changes_is_of_each_version(helper: Executor) -> None:
    class Caching(nn.Module):
        def __init__(self, value: float = 1.0) -> None:
            super().__init__()
            self.weight, self.version = nn.Parameter(torch.full((2,), value)), -1

        def forward(self, x: Any) -> Any:
            if self.version != self.weight._version:
                self.version, self.doubled = self.weight._version, self.weight.detach() * 2
            return x * self.doubled

    net = Caching()
    filler = Filler(net, helper)
    for value in (3.0, 4.0):
        filler.fill(tensors_of(Caching(value)), NONE)
        assert net(torch.ones(2)).tolist() == [2 * value] * 2
