"""All that `state_dict()` has comes back bit for bit, or is refused by name; an error leaves the module as it was."""

from __future__ import annotations

import copy
import http
import threading
import warnings
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tensorvine.store.errors import CorruptDataError, TensorMismatchError, TensorNotFoundError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.torch import assign, graph_of, lacking, live_tensors, tensors_of
from tensorvine.store.torch.values import packed, unpacked
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import quantize_dynamic


class Extra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "refused":
            raise ValueError("it is refused")
        self.extra = state

    def forward(self, x):
        return self.body(x)


class Doubled(nn.Module):
    """Stores twice what it has, by hooks, so that no tensor of its state is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_state_dict_post_hook(_twice)
        self.register_load_state_dict_pre_hook(_half)

    def forward(self, x):
        return x * self.weight


def _twice(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


def _half(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        return self.head(self.embed(x))


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), {nn.Linear}, torch.qint8)


def stored(module: nn.Module) -> dict[str, np.ndarray]:
    """What a repository gives back: bytes of their own, which nobody may write to."""
    found = {name: array.copy() for name, array in tensors_of(module).items()}
    for array in found.values():
        array.flags.writeable = False
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.dequantize() if a.is_quantized else a, b.dequantize() if b.is_quantized else b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


VALUES = [
    None,
    3,
    "text",
    b"\x00bytes",
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    {"steps": (3, 2.5, None), 7: [True, float("inf")], "t": torch.ones(2), "d": torch.float16, "n": {1, 2}},
    OrderedDict(b=1, a=Counter({3: 2})),
    torch.Size([2, 0]),
    [torch.zeros(0), (torch.tensor(1 + 2j),)],
    {"p": nn.Parameter(torch.ones(2), requires_grad=False), "f": np.float32(0.1), "i": np.int8(3)},
]


class TestExtraState:
    @pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
    def test_it_comes_back_as_what_it_was(self, value: Any) -> None:
        one, two = Extra(value), Extra()
        assign(two, stored(one))
        assert same(two.extra, value)
        assert torch.equal(two.body.weight, one.body.weight)

    def test_of_any_shape(self) -> None:
        one, two = Extra(torch.ones(3)), Extra(torch.zeros(5, dtype=torch.int8))
        assign(two, stored(one))
        assert same(two.extra, torch.ones(3))

    def test_what_cannot_be_kept_is_refused_by_name(self) -> None:
        with pytest.raises(TensorMismatchError, match=r"body\.0\._extra_state\['own'\]: .* found object"):
            tensors_of(nn.ModuleDict({"body": nn.Sequential(Extra({"own": object()}))}))

    def test_a_module_that_refuses_it_is_as_it_was(self) -> None:
        one, two = Extra("refused"), Extra(5)
        before = copy.deepcopy(two.state_dict())
        with pytest.raises(TensorMismatchError, match=r"load_state_dict of Extra: .*it is refused"):
            assign(two, stored(one))
        assert same(two.state_dict(), before)

    def test_it_belongs_to_a_vertex_whatever_its_length(self) -> None:
        graphs = [graph_of(nn.Sequential(Extra(extra))) for extra in (None, {"a": torch.ones(2)}, list(range(99)))]
        assert len({graph.fingerprint for graph in graphs}) == 1
        for graph, extra in zip(graphs, (None, {"a": torch.ones(2)}), strict=False):
            assert set(graph.tensors) == set(tensors_of(nn.Sequential(Extra(extra))))
            assert ModelGraph.from_json(graph.to_json()) == graph

    def test_a_tied_tensor_is_set_by_any_of_its_names(self) -> None:
        class TiedExtra(Extra):
            def __init__(self) -> None:
                super().__init__(1)
                self.other = nn.Linear(2, 2, bias=False)
                self.other.weight = self.body.weight

        one, two = TiedExtra(), TiedExtra()
        for names in (("body.weight",), ("other.weight",)):
            with torch.no_grad():
                two.body.weight.zero_()
            given = {n: a for n, a in stored(one).items() if n in (*names, "_extra_state:json")}
            assert lacking(two, given) == ["body.bias"]
            assign(two, given)
            assert torch.equal(two.body.weight, one.body.weight)

    @pytest.mark.parametrize("meta", [False, True])
    def test_what_a_module_does_not_take_back_is_said(self, meta: bool) -> None:
        class Refusing(Extra):
            def set_extra_state(self, state: Any) -> None:
                raise ValueError(f"not {state}")

        with torch.device("meta" if meta else "cpu"):
            two = Refusing(1)
        with pytest.raises(TensorMismatchError, match=r"load_state_dict of .*Refusing: .*not 2") as caught:
            assign(two, stored(Refusing(2)))
        assert "restoring the previous state failed, too" in str(caught.value.__cause__.__notes__)
        assert two.body.weight.is_meta == meta

    def test_what_cannot_be_copied_is_an_error_of_ours(self) -> None:
        with pytest.raises(TensorMismatchError, match=r"load_state_dict of Extra: .*TypeError"):
            assign(Extra(threading.Lock()), stored(Extra(2)))

    @pytest.mark.parametrize(
        "value",
        [namedtuple("Pair", "a b")(1, 2), http.HTTPStatus.OK, type("Text", (str,), {})("x"), 10**5000],
        ids=["named tuple", "enum", "text", "digits"],
    )
    def test_what_would_come_back_as_something_else_is_refused(self, value: Any) -> None:
        with pytest.raises(TensorMismatchError, match="_extra_state"):
            tensors_of(Extra(value))

    def test_others_keep_theirs(self) -> None:
        two = Extra(5)
        assign(two, {"body.bias": np.ones(2, "float32")})
        assert two.extra == 5
        assert two.body.bias.tolist() == [1, 1]

    def test_a_model_without_any_takes_none(self) -> None:
        with pytest.raises(TensorNotFoundError, match="'_extra_state'"):
            assign(nn.Linear(2, 2), stored(Extra(1)))


class TestHooks:
    def test_a_state_that_hooks_make_goes_through_them(self) -> None:
        one, two = Doubled(), Doubled()
        with torch.no_grad():
            one.weight.fill_(3)
        assert stored(one)["weight"].tolist() == [6, 6, 6]
        assign(two, stored(one))
        assert two.weight.tolist() == [3, 3, 3]
        assert "weight" in graph_of(nn.Sequential(one)).tensors or "0.weight" in graph_of(nn.Sequential(one)).tensors

    def test_a_hook_that_raises_is_an_error_of_ours(self) -> None:
        def fails(*args: Any) -> None:
            raise OSError("no state today")

        net = nn.Linear(2, 2)
        net.register_state_dict_post_hook(fails)
        with pytest.raises(TensorMismatchError, match=r"state_dict\(\) of Linear: .*no state today"):
            tensors_of(net)


class TestQuantized:
    def test_packed_weights_come_back_bit_for_bit(self) -> None:
        one, two = quantized(), quantized()
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        assert not torch.equal(one(x), two(x))
        assign(two, stored(one))
        assert torch.equal(one(x), two(x))
        assert same(two.state_dict(), one.state_dict())

    def test_each_is_on_the_vertex_of_its_module_alone(self) -> None:
        net = nn.ModuleDict({"model": quantized()[0], "other": quantized()[2], "extra": Extra(1)})
        named = {layer.name: layer.tensors for layer in graph_of(net).layers if layer.tensors}
        values = [name for names in named.values() for name in names if "_packed" in name or name.endswith(":json")]
        assert len(values) == len(set(values))
        assert all(name.startswith("model.") for name in named["model"])
        assert named["extra._extra_state"] == ("extra._extra_state:json",)

    def test_their_graph_has_them(self) -> None:
        net = quantized()
        graph = graph_of(net)
        assert set(graph.tensors) == set(tensors_of(net))
        assert graph.fingerprint == graph_of(quantized()).fingerprint


class TestMeta:
    @pytest.mark.parametrize("make", [Tied, lambda: Extra({"a": 1}), lambda: nn.BatchNorm1d(3), Doubled])
    def test_a_module_without_memory_gets_some(self, make: Callable[[], nn.Module]) -> None:
        one = make()
        with torch.no_grad():
            for place, parameter in enumerate(one.parameters()):
                parameter.fill_(place + 0.5)
        with torch.device("meta"):
            two = make()
        next(iter(two.parameters())).requires_grad_(False)
        expected = [parameter.requires_grad for parameter in two.parameters()]
        given = stored(one)
        assign(two, given)
        assert same(two.state_dict(), one.state_dict())
        assert [parameter.requires_grad for parameter in two.parameters()] == expected
        assert {name for name, item in two.named_parameters()} == {name for name, item in one.named_parameters()}
        with torch.no_grad():
            next(iter(two.parameters())).add_(1)  # its memory is its own
        assert all((array == tensors_of(one)[name]).all() for name, array in given.items())

    def test_tied_tensors_stay_tied(self) -> None:
        with torch.device("meta"):
            two = Tied()
        assign(two, stored(Tied()))
        assert two.head.weight is two.embed.weight

    def test_what_is_left_without_is_named(self) -> None:
        with torch.device("meta"):
            two = Tied()
            two.register_buffer("mask", torch.ones(2), persistent=False)
        given = stored(Tied())
        with pytest.raises(TensorNotFoundError, match=r"'mask'.*is not stored: create it first"):
            assign(two, given)
        two.mask = torch.ones(2)
        with pytest.raises(TensorNotFoundError, match=r"'count'.*found none"):
            assign(two, {name: given[name] for name in ("embed.weight", "head.weight")})
        assert two.embed.weight.is_meta

    def test_a_state_that_is_refused_leaves_it_there(self) -> None:
        with torch.device("meta"):
            two = Extra()
        with pytest.raises(TensorMismatchError, match="it is refused"):
            assign(two, stored(Extra("refused")))
        assert two.body.weight.is_meta


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo: store its parts, or the result of to_dense"),
            (lambda: torch.empty(3, device="meta"), 'on the device "meta"'),
            (lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2), "Float4"),
        ],
        ids=["sparse", "meta", "float4"],
    )
    def test_a_tensor_that_cannot_be_stored_is_named(self, make: Callable[[], torch.Tensor], message: str) -> None:
        net = nn.Linear(2, 2)
        net.register_buffer("odd", make())
        with pytest.raises(TensorMismatchError, match=f"tensor 'odd'.*{message}"):
            tensors_of(net)

    def test_a_distributed_tensor_says_how_it_is_gathered(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            net = nn.Linear(2, 2)
            given, before = {"bias": np.ones(2, "f4"), "weight": np.ones((2, 2), "f4")}, net.bias.tolist()
            net.weight = nn.Parameter(distribute_tensor(net.weight.data, init_device_mesh("cpu", (2,)), [Shard(0)]))
            for call in (tensors_of, lambda net: assign(net, given)):
                with pytest.raises(TensorMismatchError, match=r"'weight'.*gather it with full_tensor\(\)"):
                    call(net)
            assert net.bias.tolist() == before
        finally:
            dist.destroy_process_group()

    def test_a_lazy_module_is_to_be_called_first(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3))
        for ask in (tensors_of, graph_of, lambda net: assign(net, {"0.bias": np.zeros(3, "float32")})):
            with pytest.raises(TensorMismatchError, match=r"'0\.weight'.*lazy module that was never called"):
                ask(net)
        net(torch.ones(1, 2))
        assert graph_of(net).tensors == ("0.weight", "0.bias")

    def test_names_that_values_have_are_refused(self) -> None:
        net = nn.Linear(2, 2)
        net.register_buffer("odd:json", torch.ones(1))
        with pytest.raises(TensorMismatchError, match="'odd:json': expected a name that does not end in"):
            tensors_of(net)


def test_elements_that_share_memory_are_not_filled() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("spread", torch.zeros(1).expand(3))
    with pytest.raises(TensorMismatchError, match=r"'spread': expected memory for each element"):
        assign(net, {"spread": np.arange(3, dtype="float32")})


def test_what_is_lacking_is_named_and_a_tied_tensor_has_two_names() -> None:
    net = Tied()
    assert lacking(net, ["head.weight"]) == ["count"]
    assert lacking(net, ["count"]) == ["embed.weight", "head.weight"]
    assert lacking(Extra(1), ["body.weight", "body.bias"]) == ["_extra_state"]
    assert lacking(Extra(1), ["body.weight", "body.bias", "_extra_state:json"]) == []
    assert live_tensors(net)["head.weight"] is net.embed.weight


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b'{"value":{"tensor":3}}', b'{"value":{"none":1}}', b'{"value":{"dtype":"nn"}}', b"{}", b"\xff"],
)
def test_a_value_that_is_none_is_corrupt_data(text: bytes) -> None:
    with pytest.raises(CorruptDataError, match="value 'x'"):
        unpacked("x", {"x:json": np.frombuffer(text, np.uint8)})
    with pytest.raises(CorruptDataError, match="'x:json'; found no such"):
        unpacked("x", {"x:0": np.zeros(1)})


def test_quantized_tensors_keep_their_scales() -> None:
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.quantize_per_tensor(values, 0.1, 2, torch.quint8)
        each = torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        )
    for tensor in (one, each):
        again = unpacked("w", packed("w", tensor))
        assert torch.equal(again.int_repr(), tensor.int_repr())
        assert (again.dtype, again.qscheme()) == (tensor.dtype, tensor.qscheme())
        assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
class TestDevices:
    """On a GPU, and on it and the CPU at once."""

    @staticmethod
    def spread(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), Extra({"t": torch.ones(2)}))
        net[0].cuda()
        net[2].to("cuda", torch.bfloat16)
        return net

    def test_weights_on_several_devices_come_back_where_they_were(self) -> None:
        one, two = self.spread(1), self.spread(2)
        two[3].extra = None
        places = {name: item.device for name, item in two.named_parameters()}
        assign(two, stored(one))
        assert same({n: t.cpu() for n, t in one.named_parameters()}, {n: t.cpu() for n, t in two.named_parameters()})
        assert {name: item.device for name, item in two.named_parameters()} == places
        assert same(two[3].extra, {"t": torch.ones(2)})
        assert graph_of(one).fingerprint == graph_of(self.spread(3).cpu()).fingerprint

    def test_a_tied_tensor_is_copied_from_the_gpu_once(self) -> None:
        found = tensors_of(Tied().cuda())
        assert np.shares_memory(found["embed.weight"], found["head.weight"])

    def test_a_module_of_the_gpu_moves_to_one_without_memory(self) -> None:
        one = Tied().cuda()
        with torch.device("meta"):
            two = Tied()
        assign(two, stored(one))
        assert two.embed.weight.device.type == "cpu"
        assert torch.equal(two.embed.weight, one.embed.weight.cpu())
