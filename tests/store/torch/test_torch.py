"""PyTorch modules become graphs of leaf modules and functions, and give and take their tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.store.errors import GraphError, TensorMismatchError, TensorNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.torch import assign, graph_of, tensors_of
from torch import nn


class Residual(nn.Module):
    """A block with a fork and a join, batch statistics, and a dropout that depends on the training flag."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = F.dropout(F.relu(self.inner(x)), 0.5, training=self.training)
        return torch.flatten(x + y * self.scale, 1).view(-1, 2)


class Shared(nn.Module):
    """One module, two uses; one activation, two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, a, b):
        return self.act(self.tower(a)) - self.act(self.tower(b))


class Tied(nn.Module):
    """Two modules that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Attention(nn.Module):
    """Modules with several arguments and outputs, and a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("mask", torch.zeros(3, 3), persistent=False)

    def forward(self, x):
        y, _ = self.attend(x, x, x, need_weights=False, attn_mask=self.mask)
        return self.norm(x + y) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Branching(nn.Module):
    """Control flow that depends on data cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        y = self.first(x)
        return self.block(y) if y.sum() > 0 else self.bias


class Auxiliary(nn.Module):
    """A head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.auxiliary = nn.Linear(3, 1)

    def forward(self, x):
        x = self.body(x)
        return (x, self.auxiliary(x)) if self.training else x


def recurrent() -> nn.Module:
    return nn.LSTM(3, 4, bidirectional=True)


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)


MODULES: list[Callable[[], nn.Module]] = [
    Residual,
    Shared,
    Tied,
    Attention,
    Branching,
    Auxiliary,
    recurrent,
    transformer,
]
every_module = pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)


def by_class(graph: ModelGraph, name: str) -> list[Layer]:
    return [layer for layer in graph.layers if layer.config["class"] == name]


@every_module
def test_graph_and_module_name_the_same_tensors(make) -> None:
    module = make()
    assert set(graph_of(module).tensors) == set(tensors_of(module)) == set(module.state_dict())


@every_module
def test_a_module_made_twice_has_one_fingerprint_in_training_and_inference(make) -> None:
    graph = graph_of(make().train())
    assert graph.fingerprint == graph_of(make().eval()).fingerprint
    assert ModelGraph.from_json(graph.to_json()) == graph


@every_module
def test_making_a_graph_leaves_the_module_as_it_was(make) -> None:
    module = make()
    module.train()
    before = {path: sorted(vars(item)) for path, item in module.named_modules()}
    graph_of(module)
    assert {path: sorted(vars(item)) for path, item in module.named_modules()} == before
    assert all(item.training for item in module.modules())


def test_modules_differ_pairwise() -> None:
    assert len({graph_of(make()).fingerprint for make in MODULES}) == len(MODULES)


def test_a_config_holds_what_the_constructor_was_told() -> None:
    graph = graph_of(nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, bias=False)))
    config = graph.by_name["0"].config
    facts = {key: config[key] for key in ("class", "in_channels", "out_channels", "kernel_size", "stride")}
    assert facts == {
        "class": "Conv2d",
        "in_channels": 1,
        "out_channels": 4,
        "kernel_size": [3, 3],
        "stride": [2, 2],
    }
    assert config["tensors"] == {"weight": [4, 1, 3, 3]}
    assert "training" not in config


@pytest.mark.parametrize(
    "other",
    [nn.Linear(4, 3), nn.Linear(5, 2), nn.Linear(4, 2, bias=False), nn.Bilinear(4, 4, 2), nn.Identity()],
    ids=str,
)
def test_another_constructor_argument_is_another_fingerprint(other: nn.Module) -> None:
    assert graph_of(other).fingerprint != graph_of(nn.Linear(4, 2)).fingerprint


def test_names_dtype_and_frozen_parameters_leave_the_fingerprint() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.another_name = nn.Linear(4, 2).requires_grad_(False).bfloat16()

        def forward(self, x):
            return self.another_name(x)

    assert graph_of(Named()).fingerprint == graph_of(nn.Sequential(nn.Linear(4, 2))).fingerprint


def test_a_residual_is_two_edges_and_functions_are_vertices() -> None:
    graph = graph_of(Residual())
    (add,) = by_class(graph, "function:add")
    assert [graph.by_name[name].config["class"] for name in add.inputs] == ["Input", "function:mul"]
    (product,) = by_class(graph, "function:mul")
    assert [graph.by_name[name].config["class"] for name in product.inputs] == [
        "function:dropout",
        "parameter",
    ]
    (view,) = by_class(graph, "method:view")
    assert view.config["call"]["args"] == [{"input": 0}, -1, 2]
    assert graph.by_name["scale"].tensors == ("scale",)
    assert graph.by_name["inner.1"].tensors == (
        "inner.1.weight",
        "inner.1.bias",
        "inner.1.running_mean",
        "inner.1.running_var",
        "inner.1.num_batches_tracked",
    )


def test_a_functions_constants_matter() -> None:
    class Sliced(nn.Module):
        def __init__(self, start: int, factor: object) -> None:
            super().__init__()
            self.start = start
            self.factor = factor

        def forward(self, x):
            return x[:, self.start :] * self.factor

    cases = [(0, 2.0), (1, 2.0), (0, 3.0), (0, torch.ones(2)), (0, torch.ones(1))]
    prints = [graph_of(Sliced(*case)).fingerprint for case in cases]
    assert len(set(prints)) == len(cases)
    assert prints == [graph_of(Sliced(*case)).fingerprint for case in cases]


def test_a_shared_module_is_a_vertex_per_use_with_the_same_tensors() -> None:
    graph = graph_of(Shared())
    first, second = by_class(graph, "Linear")
    assert (first.name, second.name) == ("tower", "tower#2")
    assert first.tensors == second.tensors == ("tower.weight", "tower.bias")
    assert first.inputs != second.inputs
    assert len(by_class(graph, "ReLU")) == 2


def test_a_tied_parameter_has_all_its_names_on_each_of_its_vertices() -> None:
    graph = graph_of(Tied())
    assert graph.by_name["embed"].tensors == graph.by_name["head"].tensors == ("embed.weight", "head.weight")


def test_a_module_of_torch_itself_is_one_vertex() -> None:
    graph = graph_of(transformer())
    assert [layer.config["class"] for layer in graph.layers] == ["Input", "TransformerEncoder"]
    assert len(graph.layers[1].tensors) == 24


def test_a_buffer_that_is_not_stored_is_a_constant() -> None:
    graph = graph_of(Attention())
    assert len(by_class(graph, "constant")) == 2
    assert "mask" not in graph.tensors


def test_a_module_that_cannot_be_traced_is_a_chain_and_says_so_once(caplog) -> None:
    class Again(Branching):
        pass

    with caplog.at_level(logging.WARNING, "tensorvine.store.torch"):
        graph_of(Again())
        graph = graph_of(Again())
    names = [(layer.name, layer.inputs) for layer in graph.layers]
    assert names == [("first", ()), ("block.0", ("first",)), ("block.1", ("block.0",)), ("bias", ())]
    said = [record.message for record in caplog.records if "Again cannot be traced" in record.message]
    assert len(said) == 1
    assert "TraceError" in said[0]


def test_a_module_that_inference_does_not_call_keeps_its_tensors() -> None:
    graph = graph_of(Auxiliary())
    assert graph.by_name["auxiliary"].inputs == ()
    assert graph.by_name["auxiliary"].tensors == ("auxiliary.weight", "auxiliary.bias")


def test_arrays_are_live_views_and_read_only() -> None:
    module = Residual()
    arrays = tensors_of(module)
    assert all(arrays[name].ctypes.data == item.data_ptr() for name, item in module.state_dict().items())
    assert not any(array.flags.writeable for array in arrays.values())
    with torch.no_grad():
        module.scale.fill_(3)
    assert arrays["scale"].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"])
def test_assign_writes_into_the_modules_own_memory(dtype: str) -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(3, 2).to(getattr(torch, dtype)).T)
    address = module.a.data_ptr()
    given = np.arange(6).reshape(2, 3).astype(tensors_of(module)["a"].dtype)
    given.flags.writeable = False
    assign(module, {"a": given})
    assert module.a.data_ptr() == address
    assert module.a.to(torch.complex64).real.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_assign_reaches_what_has_no_memory_of_its_own_to_write_to() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.tensor([1 + 1j, 2 - 3j]).conj())
    assign(module, {"a": np.array([5 + 6j, 7j], "complex64")})
    assert module.a.tolist() == [5 + 6j, 7j]


def test_a_whole_state_moves_from_one_module_to_another() -> None:
    one, two = Residual(), Residual()
    with torch.no_grad():
        one.inner[0].weight.fill_(0.5)
        one(torch.ones(2, 4))
    assign(two, tensors_of(one))
    assert all(torch.equal(item, two.state_dict()[name]) for name, item in one.state_dict().items())
    assert int(two.inner[1].num_batches_tracked) == 1


def test_autograd_notices_an_assignment_between_forward_and_backward() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    loss = module(torch.ones(1, 2)).sum()
    assign(module, {"1.weight": np.zeros((1, 2), "float32")})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"no": np.zeros(1)}, TensorNotFoundError, "'no'"),
        ({"bias": np.zeros(4, "float32")}, TensorMismatchError, r"'bias': expected float32 of shape \(2,\)"),
        ({"bias": np.zeros(2, ml_dtypes.bfloat16)}, TensorMismatchError, r"'bias': .* found bfloat16"),
    ],
)
def test_assign_writes_nothing_if_anything_is_wrong(wrong, error, message) -> None:
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    with pytest.raises(error, match=message):
        assign(module, {"weight": np.ones((2, 3), "float32"), **wrong})
    assert torch.equal(module.weight, before)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inner", [False, True])
def test_the_result_of_torch_jit_trace_is_refused_by_name(inner: bool) -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.zeros(1, 3))
    module = nn.Sequential(nn.Linear(3, 3), traced) if inner else traced
    name = "1" if inner else "TopLevelTracedModule"
    with pytest.raises(
        GraphError, match=f"module '{name}': .*torch.jit.trace: save the module that was traced"
    ) as raised:
        graph_of(module)
    assert "\n" not in str(raised.value)
