"""Modules that are built again from text: their class, what its constructor was given, and what refuses."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import build, graph_of, keep_in_inference, recipe_of
from torch import nn


class Kind(enum.Enum):
    WIDE = "wide"
    DEEP = "deep"


@dataclasses.dataclass
class Plan:
    width: int = 4
    kind: Kind = Kind.WIDE
    rates: tuple[float, ...] = (0.1, float("inf"))


class Settings:
    """A configuration as those of Hugging Face are."""

    def __init__(self, width: int = 4, more: dict[str, Any] | None = None) -> None:
        self.width, self.more = width, more or {}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Settings:
        return cls(**found)


class Net(nn.Module):
    """Tells what it was given."""

    def __init__(
        self,
        width: int = 8,
        activation: Callable[..., Any] = torch.relu,
        make_norm: Callable[..., nn.Module] = nn.LayerNorm,
        *,
        bias: bool = True,
        names: dict[str, tuple[int, ...]] | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.width, self.activation, self.make_norm, self.names = width, activation, make_norm, names
        self.body = nn.Linear(width, width, bias, device=device)
        self.norm = make_norm(width)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)
        self.register_buffer("scale", torch.full((1,), float(width)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.body(x))) * self.scale


class Planned(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.body = nn.Linear(plan.width, 2)


class Configured(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.body = nn.Linear(config.width, 2)


class Lightning(nn.Module):
    """Tells it as Lightning's `save_hyperparameters` does."""

    def __init__(self, width: int, rate: float = 0.1) -> None:
        super().__init__()
        self.hparams = {"width": width, "rate": rate}
        self.body = nn.Linear(width, 2)


class Pair(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module, gates: list[nn.Module]) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.gates = gates
        for place, gate in enumerate(gates):
            self.add_module(f"gate{place}", gate)


class Silent(nn.Module):
    """Does not tell its width, but has a default for it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)


class Mute(nn.Module):
    """Does not tell its width, which it needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)


class Deep(nn.Module):
    """Has an attribute of a parameter's name that is made of it."""

    def __init__(self, layers: int = 2, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(layers)])
        self.norm = norm(2)


class Dropping(nn.Module):
    """Keeps only what it made of its arguments."""

    def __init__(self, dropout: float, head: nn.Module, bias: bool) -> None:
        super().__init__()
        self.dropout, self.head = nn.Dropout(dropout), head
        self.bias = nn.Parameter(torch.ones(2)) if bias else None


class Normed(nn.Module):
    def __init__(self, norm: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(norm)


class Failing(nn.Module):
    @property
    def hparams(self) -> dict[str, Any]:
        raise OSError("not there")

    def __init__(self, width: int = 2) -> None:
        super().__init__()


class Counted(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.made += 1


class Picky(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        if width > 3:
            raise RuntimeError("too wide")
        self.width = width


def shared() -> nn.Module:
    one = nn.Linear(4, 4)
    return Pair(one, one, [one, nn.ReLU()])


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, "gelu", batch_first=True, norm_first=True, bias=False)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(8), enable_nested_tensor=False)


MADE: dict[str, Callable[[], nn.Module]] = {
    "own class": lambda: Net(5, F.gelu, partial(nn.LayerNorm, eps=0.25), names={"a": (1, 2)}),
    "own class, defaults": Net,
    "own class, without bias": lambda: Net(4, nn.functional.silu, bias=False),
    "dataclass": lambda: Planned(Plan(5, Kind.DEEP)),
    "configuration": lambda: Configured(Settings(5, {"heads": [2, None, {"deep": 1.5}]})),
    "hyperparameters": lambda: Lightning(5, rate=0.5),
    "modules as arguments": lambda: Pair(nn.Linear(2, 3), Net(4), [nn.ReLU(), Planned(Plan())]),
    "shared modules": shared,
    "attributes made of arguments": Deep,
    "made of arguments": lambda: nn.ModuleList(
        [Dropping(0.25, nn.Linear(2, 2), bias=True), Dropping(0.5, nn.ReLU(), bias=False)]
    ),
    "Sequential": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.Flatten()),
    "named children": lambda: nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.ModuleList([nn.Dropout(0.25)])}),
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, dropout=0.5),
    "GRU": lambda: nn.GRU(3, 4, bias=False, batch_first=True),
    "RNN": lambda: nn.RNN(3, 4, nonlinearity="relu"),
    "attention": lambda: nn.MultiheadAttention(8, 2, 0.5, bias=False, add_bias_kv=True, kdim=4, batch_first=True),
    "encoder": encoder,
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 3, 16, activation="gelu", batch_first=True),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, groups=2, bias=False), nn.ConvTranspose2d(2, 3, 3, 2, output_padding=1)
    ),
    "tables": lambda: nn.ModuleList([nn.Embedding(5, 2, padding_idx=1), nn.EmbeddingBag(4, 2, mode="sum")]),
    "norms": lambda: nn.ModuleList([nn.GroupNorm(2, 4, affine=False), nn.InstanceNorm1d(3), nn.RMSNorm(4)]),
    "others": lambda: nn.ModuleList(
        [nn.Bilinear(2, 3, 4), nn.PReLU(3), nn.Upsample(scale_factor=2), nn.Unflatten(1, (2, 2)), nn.Softmax(1)]
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_what_is_built_again_is_what_was_saved(make: Callable[[], nn.Module]) -> None:
    module = make()
    again = build(recipe_of(module))
    assert recipe_of(again) == recipe_of(module)
    assert repr(again) == repr(module)
    assert graph_of(again).fingerprint == graph_of(module).fingerprint
    again.load_state_dict(module.state_dict())
    assert dict(again.named_buffers()).keys() == dict(module.named_buffers()).keys()


def test_flags_and_dtypes_are_those_that_were_saved() -> None:
    net = Net(4).half()
    net.body.weight.requires_grad_(False)
    net.norm.eval()
    again = build(recipe_of(net))
    assert [(n, p.dtype, p.requires_grad) for n, p in again.named_parameters()] == [
        (n, p.dtype, p.requires_grad) for n, p in net.named_parameters()
    ]
    assert [module.training for module in again.modules()] == [module.training for module in net.modules()]
    assert again.scale.dtype == torch.float16
    assert again.scale.item() == 4


def test_a_recipe_is_known_again_by_the_signature_and_has_the_flags_of_now() -> None:
    first = recipe_of(Net(6))
    frozen = Net(6)
    frozen.body.requires_grad_(False)
    assert recipe_of(Net(6)) == first != recipe_of(frozen)
    assert not build(recipe_of(frozen)).body.weight.requires_grad


def test_what_keeps_a_part_in_inference_is_no_hook_of_the_modules() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    keep_in_inference(net, {id(net[1].running_mean)})
    again = build(recipe_of(net))
    assert [part.training for part in again] == [True, False]
    assert not again[1]._forward_pre_hooks


def test_an_object_that_a_trainer_left_on_it_does_not_count() -> None:
    net = Lightning(5)
    net._trainer = object()
    assert build(recipe_of(net)).body.in_features == 5


def test_what_wraps_a_module_is_seen_through() -> None:
    net = Net(4)
    assert recipe_of(nn.DataParallel(net)) == recipe_of(net)


def test_writing_constructs_nothing() -> None:
    net = Counted()
    recipe_of(net)
    assert Counted.made == 1


def changed_attribute() -> nn.Module:
    net = Net(4)
    net.names = {"other": (1,)}
    net.body.in_features = 5
    return net


def hooked() -> nn.Module:
    net = Net(4)
    net.body.register_forward_hook(lambda module, args, output: output * 2)
    return net


def replaced() -> nn.Module:
    net = Net(4)
    net.body = nn.Linear(4, 4, bias=False)
    return net


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Silent(5), "'body'"),
        (lambda: Deep(3), "'layers"),
        (lambda: Deep(norm=partial(nn.LayerNorm, eps=0.5)), "'norm'"),
        (changed_attribute, "'body'"),
        (hooked, "'body'"),
        (replaced, "'body'"),
        (tied, "'1'"),
        (lambda: nn.Sequential(Net(4), Silent(4)), "'1.body'"),
    ],
    ids=["not told", "made of it", "made of a partial", "changed", "hooked", "replaced", "tied", "within"],
)
def test_what_does_not_build_the_same_is_refused_and_named(make: Callable[[], nn.Module], path: str) -> None:
    with pytest.raises(GraphError, match=rf"its module {path}.* differs"):
        build(recipe_of(make()))


def local() -> nn.Module:
    class Local(nn.Module):
        pass

    return Local()


def of_itself() -> nn.Module:
    inner = Pair(nn.ReLU(), nn.ReLU(), [])
    inner.gates = [inner]
    return inner


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Mute(3), "Mute: .* found none for 'width'"),
        (lambda: Normed(3), "Normed: .* found none for 'norm'"),
        (Failing, r"Failing: expected attributes that can be read; found OSError\('not there'\)"),
        (local, "local.<locals>.Local: expected a name that can be imported"),
        (lambda: Net(activation=lambda x: x), "<lambda>: expected a name that can be imported"),
        (lambda: Net(activation=sorted), "sorted: expected a name that can be imported"),
        (lambda: Net(activation=partial(F.leaky_relu, negative_slope=0.5)), "a partial application of the class"),
        (lambda: Net(activation=json.dumps), r"Net\(activation=\): json:dumps: expected a name in one of the packages"),
        (lambda: Net(names={"a": object()}), r"Net\(names=\)\['a'\]: expected numbers"),
        (lambda: Net(names={"a": torch.ones(2)}), r"Net\(names=\)\['a'\]: expected numbers"),
        (of_itself, "found a module that contains itself"),
        (lambda: torch.jit.script(nn.Linear(2, 1)), "expected"),
        (lambda: torch.fx.symbolic_trace(nn.Linear(2, 1)), "expected"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)), "ParametrizedLinear: expected"),
    ],
    ids=range(14),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_written_is_refused_and_named(make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(GraphError, match=found):
        recipe_of(make())


def test_a_class_that_is_not_here_is_named_and_can_be_given() -> None:
    recipe = recipe_of(Silent()).replace(f"{__name__}:Silent", "gone.models:Silent")
    with pytest.raises(GraphError, match=r"gone.models:Silent: expected .* custom_objects=; found ModuleNotFoundError"):
        build(recipe)
    with pytest.raises(GraphError, match="has no attribute 'Gone'"):
        build(recipe_of(Silent()).replace(f"{__name__}:Silent", f"{__name__}:Gone"))
    moved = type("Silent", (Silent,), {"__module__": "other.models"})
    assert type(build(recipe, {"Silent": moved})) is moved
    with pytest.raises(GraphError, match=r"expected Net to build .* differs"):
        build(recipe_of(Silent(8)), {"Silent": Net})


def test_a_constructor_that_raises_is_named() -> None:
    recipe = recipe_of(Picky(3)).replace('"width":3', '"width":4')
    with pytest.raises(
        GraphError, match=r"Picky\(width\): expected the constructor .*; found RuntimeError\('too wide'\)"
    ):
        build(recipe)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("subprocess:Popen", "expected a module class"),
        ("os:system", "expected a module class"),
        ("torch.serialization:load", "expected a module class"),
    ],
)
def test_only_modules_are_constructed(name: str, found: str) -> None:
    recipe = recipe_of(Silent()).replace(f"{__name__}:Silent", name)
    with pytest.raises(GraphError, match=found):
        build(recipe)


@pytest.mark.parametrize(
    "name", ["os:system", "torch.serialization:load", "torch:load", "torch:compile", "torch.hub:load", "json:dumps"]
)
def test_only_functions_of_the_modules_package_and_of_tensors_are_arguments(name: str) -> None:
    recipe = recipe_of(Net(4)).replace("torch:relu", name)
    assert name in recipe
    with pytest.raises(GraphError, match=r"expected (a name in one of|a module class)"):
        build(recipe)


@pytest.mark.parametrize(
    "written",
    [
        {"fields": ["torch.nn.parallel.distributed:os.mkdir", {"dict": [["path", "made"]]}]},
        {"fields": ["torch.nn.parallel.distributed:torch.load", {"dict": [["f", "made"]]}]},
        {"fields": [f"{__name__}:build", {"dict": [["recipe", "{}"]]}]},
        {"configuration": [f"{__name__}:build", {"dict": []}]},
        {"member": [f"{__name__}:MADE", "tables"]},
        {"named": "torch.nn.parallel.distributed:os.mkdir"},
        {"named": f"{__name__}:json.dumps"},
        {"named": f"{__name__}:torch.load"},
    ],
    ids=["os", "torch", "function", "no class", "no Enum", "named os", "imported", "imported torch"],
)
def test_what_another_module_imported_is_neither_called_nor_given(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(Net(4)).replace('{"named":"torch:relu"}', json.dumps(written))
    assert json.dumps(written) in recipe
    with pytest.raises(
        GraphError,
        match=r"expected (a name (in one of|that can be)|a module class|a configuration class)",
    ):
        build(recipe)
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_raises_is_named() -> None:
    recipe = recipe_of(Configured(Settings(5))).replace('["width",5]', '["height",5]')
    with pytest.raises(GraphError, match=r"Settings: expected the constructor to succeed; found TypeError"):
        build(recipe)
