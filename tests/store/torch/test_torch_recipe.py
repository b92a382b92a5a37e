"""Recipes: modules of torch.nn, flags, Hugging Face configs, hparams of Lightning, and differences that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import build, graph_of, keep_in_inference, recipe_of
from torch import nn


def shared() -> nn.Module:
    one = nn.Linear(4, 4)
    return nn.Sequential(one, nn.ReLU(), one)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, F.gelu, batch_first=True, norm_first=True, bias=False)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(8), enable_nested_tensor=False)


MADE: dict[str, Callable[[], nn.Module]] = {
    "shared modules": shared,
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
def test_modules_of_torch_nn_are_built_again(make: Callable[[], nn.Module]) -> None:
    module = make()
    again = build(recipe_of(module))
    assert recipe_of(again) == recipe_of(module)
    assert repr(again) == repr(module)
    assert graph_of(again) == graph_of(module)
    again.load_state_dict(module.state_dict())
    assert [tensor.shape for tensor in again.parameters()] == [tensor.shape for tensor in module.parameters()]


def test_a_recipe_draws_no_random_numbers() -> None:
    module, state = encoder(), torch.get_rng_state()
    recipe_of(module)
    assert torch.equal(torch.get_rng_state(), state)


class Own(nn.Module):
    """Is built by a factory."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.full((1,), float(width)), persistent=False)


def factory_of(net: nn.Module, **arguments: object) -> str:
    return recipe_of(net, f"{__name__}:Own", arguments)


def test_flags_and_dtypes_are_those_that_were_saved() -> None:
    net = Own(5).half()
    net.body.weight.requires_grad_(False)
    net.norm.eval()
    again = build(factory_of(net, width=5), trusted_packages=["tests"])
    assert [(n, p.dtype, p.requires_grad) for n, p in again.named_parameters()] == [
        (n, p.dtype, p.requires_grad) for n, p in net.named_parameters()
    ]
    assert [module.training for module in again.modules()] == [module.training for module in net.modules()]
    assert again.scale.dtype == torch.float16
    assert again.scale.item() == 5


def test_the_hook_that_keeps_a_part_in_inference_is_not_stored() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    keep_in_inference(net, {id(net[1].running_mean)})
    again = build(recipe_of(net))
    assert [part.training for part in again] == [True, False]
    assert not again[1]._forward_pre_hooks


def test_wrappers_are_left_out() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    assert recipe_of(nn.DataParallel(net)) == recipe_of(net)


def test_it_is_built_on_the_cpu_whatever_the_default_is() -> None:
    recipe = recipe_of(nn.Sequential(nn.BatchNorm1d(2)))
    with torch.device("meta"):
        assert not build(recipe)[0].running_mean.is_meta


# ---- modules that the recipe does not describe -------------------------------------------------------------------


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def changed_within() -> nn.Module:
    net = encoder()
    net.layers[1].dropout1.p = 0.75
    return net


def changed_attribute() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].in_features = 5
    return net


def replaced() -> nn.Module:
    net = nn.MultiheadAttention(8, 2)
    net.out_proj = nn.Linear(8, 8, bias=False)
    return net


def patched() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].forward = lambda x: x
    return net


@pytest.mark.parametrize("make", [tied, changed_within, changed_attribute, replaced, patched])
def test_a_module_of_torch_nn_that_was_changed_has_no_recipe(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(GraphError, match=r"expected factory= of save_model, .* found a changed module"):
        recipe_of(make())


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Own, r"Own: expected factory= of save_model, .*found tests\..*\.Own"),
        (lambda: nn.Sequential(nn.ReLU(), Own()), r"Sequential\.1: expected a module of torch.nn; found .*Own"),
        (lambda: nn.ParameterList([torch.ones(2)]), "found torch.nn.modules.container.ParameterList"),
        (lambda: nn.TransformerEncoderLayer(8, 2, activation=lambda x: x), r"\(activation=\): expected .* found func"),
        (lambda: nn.CrossEntropyLoss(weight=torch.ones(2)), r"CrossEntropyLoss\(weight=\): expected numbers"),
        (lambda: torch.fx.symbolic_trace(nn.Linear(2, 1)), "expected a module of torch.nn; found torch.fx"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)), "found .*ParametrizedLinear"),
    ],
    ids=range(7),
)
def test_other_modules_need_a_factory(make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(GraphError, match=found):
        recipe_of(make())


def hooked() -> nn.Module:
    net = Own()
    net.body.register_forward_hook(lambda module, args, output: output * 2)
    return net


def hooked_gradient() -> nn.Module:
    net = Own()
    net.body.weight.register_hook(lambda gradient: gradient * 0)
    return net


def other_buffer() -> nn.Module:
    net = Own()
    net.scale[0] = 7
    return net


def other_name() -> nn.Module:
    net = Own()
    net.head = nn.Linear(4, 2)
    return net


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (hooked, "number of hooks of module 'body' differs"),
        (hooked_gradient, "number of hooks of module 'body' differs"),
        (other_buffer, "unsaved buffer 'scale' differs"),
        (lambda: Own(5), "unsaved buffer 'scale' differs"),
        (other_name, "parameter or buffer 'head.bias' differs"),
    ],
)
def test_a_built_module_that_differs_is_refused(make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(GraphError, match=f"expected Own to be built as it was saved; the {found}"):
        build(factory_of(make()), trusted_packages=["tests"])


# ---- what modules say about themselves ---------------------------------------------------------------------------


class Settings:
    """A configuration as those of transformers."""

    def __init__(self, width: int = 4, **more: Any) -> None:
        self.width = width
        vars(self).update(more)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Settings:
        return cls(**found)


class Configured(nn.Module):
    """A model as those of transformers."""

    config_class: ClassVar[type] = Settings

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.body = nn.Linear(config.width, 2)


class Lightning(nn.Module):
    """Has hyperparameters as from Lightning's `save_hyperparameters`."""

    def __init__(self, width: int, rate: float = 0.1) -> None:
        super().__init__()
        self.hparams = {"width": width, "rate": rate, "of_a_callback": 3}
        self.body = nn.Linear(width, 2)


class Anything(Lightning):
    def __init__(self, **hparams: Any) -> None:
        super().__init__(hparams["width"])
        self.hparams = hparams


SPEAKING: dict[str, Callable[[], nn.Module]] = {
    "config": lambda: Configured(Settings(5, heads=[2, None, {"deep": 1.5}], rates=(0.1, float("inf")))),
    "hparams": lambda: Lightning(5, rate=0.5),
    "hparams of any name": lambda: Anything(width=5, more={3: (1, 2)}),
}


@pytest.mark.parametrize("make", SPEAKING.values(), ids=SPEAKING)
def test_configs_and_hyperparameters_build_a_module_with_permission(make: Callable[[], nn.Module]) -> None:
    net = make()
    recipe = recipe_of(net)
    name = f"{__name__}:{type(net).__name__}"
    with pytest.raises(GraphError, match=f"factory '{name}': expected permission to import it; .*trusted_packages="):
        build(recipe)
    for again in (build(recipe, trusted_packages=["tests"]), build(recipe, type(net)), build(recipe, name)):
        assert type(again) is type(net)
        assert recipe_of(again) == recipe
        assert again.body.in_features == 5


@pytest.mark.parametrize("held", ["top", "nested"])
@pytest.mark.parametrize("kind", [Configured, Anything])
def test_code_in_a_config_is_refused(kind: type[nn.Module], held: str) -> None:
    code = {"auto_map": {"AutoModel": "someone/else--modeling.Net"}}
    more = code if held == "top" else {"text_config": [code]}
    net = Configured(Settings(**more)) if kind is Configured else Anything(width=2, **more)
    with pytest.raises(GraphError, match=r"expected a config without 'auto_map'.*modeling\.Net"):
        recipe_of(net)
    plain = Configured(Settings(other={})) if kind is Configured else Anything(width=2, other={})
    forged = json.loads(recipe_of(plain))
    forged["torch"]["arguments"]["other"] = {"dict": [["auto_map", "x"]]}
    for permission in ({"factory": kind}, {"trusted_packages": ["tests"]}):
        with pytest.raises(GraphError, match="expected a config without 'auto_map'"):
            build(json.dumps(forged), **permission)


class Failing(nn.Module):
    @property
    def hparams(self) -> dict[str, Any]:
        raise OSError("not there")


def test_a_property_that_raises_is_named() -> None:
    with pytest.raises(
        GraphError, match=r"Failing: expected attributes that can be read; found OSError\('not there'\)"
    ):
        recipe_of(Failing())


def test_a_config_that_raises_is_named() -> None:
    recipe = recipe_of(Configured(Settings(5))).replace('"width":5', '"width":"five"')
    with pytest.raises(GraphError, match=r"Configured\(Settings\): expected the call to succeed; found TypeError"):
        build(recipe, Configured)


# ---- recipes of the version before, which called classes by their names -------------------------------------------

OF_BEFORE = (
    '{"torch":{"model":{"module":{"class":"torch.nn.modules.container:Sequential","children":[["0",{"module":{"class":'
    '"CLASS","arguments":{"in_features":3,"out_features":2,"bias":true}}}]]}},"contents":{"":"a9456cf279ad","0":'
    '"0077d1b85657"},"whole":true,"dtypes":{"0.weight":"torch.float32","0.bias":"torch.float32"},"training":true,'
    '"otherwise":[],"frozen":[],"hooks":{},"unsaved":{}}}'
)


def test_recipes_of_the_version_before_build_modules_of_torch_nn() -> None:
    again = build(OF_BEFORE.replace("CLASS", "torch.nn.modules.linear:Linear"))
    assert repr(again) == repr(nn.Sequential(nn.Linear(3, 2)))


@pytest.mark.parametrize(
    "name", [f"{__name__}:Own", "os:system", "torch.serialization:load", "torch.nn.modules.module:Module.train"]
)
def test_recipes_of_the_version_before_call_no_other_class(name: str) -> None:
    recipe = OF_BEFORE.replace("CLASS", name)
    with pytest.raises(GraphError, match=f"{name}: expected a module of torch.nn"):
        build(recipe)
    assert build(recipe, lambda: nn.Sequential(nn.Linear(3, 2)))[0].in_features == 3


@pytest.mark.parametrize("name", ["torch.nn.functional:importlib", "torch:load", "os:system", "json:dumps"])
def test_other_functions_are_no_arguments(name: str) -> None:
    recipe = recipe_of(encoder()).replace("torch.nn.functional:gelu", name)
    assert name in recipe
    with pytest.raises(GraphError, match=f"{name}: expected a function of torch.nn.functional"):
        build(recipe)


def test_a_text_that_is_no_recipe_is_refused() -> None:
    for text in ("", "{}", '{"torch": {}}', '{"torch": 3}', '{"torch": {"factory": 3, "arguments": {}}}'):
        with pytest.raises(GraphError):
            build(text)
