"""PyTorch: modules are trained for a step, saved with their optimizers, and loaded into others of other weights.

Rules
- Weights are random, configurations small: what counts is which modules, hooks, buffers and ties there are.
- The control is `torch.save` of both state_dicts.
"""

from __future__ import annotations

import gc
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensorvine.actors import Repository
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import live_tensors
from torch import nn

from .row import Failed, Row, names_in

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
OF_TWO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 100,
}
VISION = names_in(
    """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t
    mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d
    shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16 wide_resnet50_2
    """
)
TIMM = names_in(
    """
    cait_xxs24_224 coat_tiny convnextv2_atto crossvit_tiny_240 deit_tiny_distilled_patch16_224 dla34
    edgenext_xx_small efficientnet_lite0 eva02_tiny_patch14_224 fastvit_t8 ghostnet_050 gmlp_ti16_224
    hardcorenas_a inception_v4 lcnet_035 levit_128s maxvit_nano_rw_256 mixer_s32_224 mobilevit_xxs nfnet_l0
    pit_ti_224 poolformer_s12 regnetx_002 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d rexnet_100
    seresnet18 tiny_vit_5m_224 tinynet_e twins_svt_small visformer_tiny xcit_nano_12_p16_224
    """
)
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertModel", "AlbertConfig", {**SMALL, "embedding_size": 16}),
    "bart": ("BartForConditionalGeneration", "BartConfig", OF_TWO),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}),
    "deberta": ("DebertaV2Model", "DebertaV2Config", SMALL),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 100},
    ),
    "electra": ("ElectraModel", "ElectraConfig", {**SMALL, "embedding_size": 32}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SMALL, "num_key_value_heads": 2, "head_dim": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, "num_key_value_heads": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "vocab_size": 100,
            "word_embed_proj_dim": 32,
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", SMALL),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 2}),
    "roberta": ("RobertaModel", "RobertaConfig", SMALL),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 100},
    ),
}
"""Name -> classes of model and configuration in transformers, and the configuration."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How modules of one architecture are made, and what they are called with."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], dict[str, Any] | torch.Tensor]
    factory: str | None = None
    """Stated when it is saved; None: it is not."""
    arguments: dict[str, Any] | None = None
    base: Callable[[], nn.Module] | None = None
    """Makes what it was adapted from, which is saved before; with the same seed, it has the same weights."""


def architectures() -> Iterator[Architecture]:
    """Give all of them."""
    vision = torchvision()
    for name in VISION:
        size = 299 if name == "inception_v3" else 224
        yield Architecture(
            f"torchvision {name}",
            lambda name=name: vision.models.get_model(name, weights=None),
            lambda net, size=size: torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size),
            "torchvision.models:get_model",
            {"name": name, "weights": None},
        )
    import timm

    for name in TIMM:
        yield Architecture(
            f"timm {name}",
            lambda name=name: timm.create_model(name, pretrained=False),
            lambda net: torch.linspace(-1, 1, 2 * _pixels(net)).reshape(2, *net.default_cfg["input_size"]),
            "timm:create_model",
            {"model_name": name, "pretrained": False},
        )
    import transformers

    for name, (kind, config, options) in TEXT.items():
        yield Architecture(
            f"transformers {name}",
            lambda kind=kind, config=config, options=options: getattr(transformers, kind)(
                getattr(transformers, config)(**options)
            ),
            _text,
        )
    import peft

    for name in ("gpt2", "llama"):
        kind, config, options = TEXT[name]

        def base(kind: str = kind, config: str = config, options: dict[str, Any] = options) -> nn.Module:
            return getattr(transformers, kind)(getattr(transformers, config)(**options))

        def adapted(base: Callable[[], nn.Module] = base) -> nn.Module:
            targets = ["c_attn", "q_proj"]
            return peft.get_peft_model(base(), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))

        yield Architecture(f"PEFT, LoRA on {name}", adapted, _text, base=base)


def torchvision() -> Any:
    """Import it: its file on PyPI is built for CUDA, so its operators, which are not used here, are declared only."""
    library = torch.library.Library("torchvision", "DEF")
    while True:
        try:
            import torchvision as found
        except RuntimeError as exc:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(exc))
            if missing is None:
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            library.define(f"{missing[1]}(Tensor a) -> Tensor")
        else:
            found.tensorvine_library = library
            return found


def measure(repo: Repository, architecture: Architecture) -> Row | Failed:
    """Save, load and compare one."""
    said = _Said()
    logging.getLogger("tensorvine.store.torch").addHandler(said)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _measured(repo, architecture, said)
    except Exception as exc:  # noqa: BLE001  a line of the table
        return Failed(architecture.name, f"{type(exc).__name__}: {exc}"[:200])
    finally:
        logging.getLogger("tensorvine.store.torch").removeHandler(said)
        gc.collect()


def _measured(repo: Repository, architecture: Architecture, said: _Said) -> Row:
    name = re.sub(r"\W+", "-", architecture.name)
    torch.manual_seed(1)
    if architecture.base is not None:
        repo.save_model(f"{name}-base", architecture.base())
        torch.manual_seed(1)
    net = architecture.make()
    inputs = architecture.inputs(net)
    optimizer = _optimizer(net)
    _train(net, optimizer, inputs)
    stated: dict[str, Any] = {"factory": architecture.factory, "arguments": architecture.arguments}
    only = repo.save_model(name, net, parent=f"{name}-base" if architecture.base is not None else None, **stated)
    repo.save_model(name, net, optimizer=optimizer, **stated)
    graph = repo.graph(name)
    torch.manual_seed(2)
    other = architecture.make()
    theirs = _optimizer(other)
    repo.load_model(name, into=other, optimizer=theirs)
    found = _same(net, other), _same_state(optimizer, theirs), _same_answers(net, other, inputs)
    alone = _alone(repo, name, net, inputs)
    repo.retire(f"{name}@1")
    repo.retire(f"{name}@2")
    tensors = live_tensors(net)
    return Row(
        name=architecture.name,
        tensors=len(tensors),
        state_mib=sum(item.nbytes for item in tensors.values()) / 2**20,
        stored_mib=only.bytes_written / 2**20,
        graph=f"chain of {len(graph)}" if said.chains else str(len(graph)),
        state=found[0],
        optimizer=found[1],
        answers=found[2],
        alone=alone,
        control=_control(architecture, net, optimizer, inputs),
    )


def _alone(repo: Repository, name: str, net: nn.Module, inputs: Any) -> bool | None:
    torch.manual_seed(4)
    try:
        again = repo.load_model(name, trusted_packages=["torchvision", "timm", "transformers"])
    except GraphError as exc:
        logging.getLogger(__name__).info("%s", exc)
        return None
    return _same(net, again) and _same_answers(net, again, inputs)


def _control(architecture: Architecture, net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> bool:
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    torch.manual_seed(3)
    other = architecture.make()
    theirs = _optimizer(other)
    found = torch.load(file, weights_only=True)
    other.load_state_dict(found["model"])
    theirs.load_state_dict(found["optimizer"])
    return _same(net, other) and _same_state(optimizer, theirs) and _same_answers(net, other, inputs)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([item for item in net.parameters() if item.requires_grad], lr=1e-3)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    net.train()
    torch.stack([item.float().square().mean() for item in _called(net, inputs)]).sum().backward()
    optimizer.step()
    net.eval()


def _called(net: nn.Module, inputs: Any) -> list[torch.Tensor]:
    found = net(**inputs) if isinstance(inputs, dict) else net(inputs)
    values = list(found.values()) if isinstance(found, dict) else found if isinstance(found, (tuple, list)) else [found]
    return [item for item in values if isinstance(item, torch.Tensor) and item.is_floating_point()]


def _same(one: nn.Module, two: nn.Module) -> bool:
    """Compare weights and buffers, those that are not stored, too."""
    mine, theirs = ({**dict(net.named_parameters()), **dict(net.named_buffers())} for net in (one, two))
    states = one.state_dict(), two.state_dict()
    return all(
        a.keys() == b.keys() and all(_equal(item, b[name]) for name, item in a.items())
        for a, b in ((mine, theirs), states)
    )


def _same_state(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    mine, theirs = one.state_dict(), two.state_dict()
    return repr(mine["param_groups"]) == repr(theirs["param_groups"]) and all(
        _equal(value, theirs["state"][place][key])
        for place, state in mine["state"].items()
        for key, value in state.items()
    )


def _same_answers(one: nn.Module, two: nn.Module, inputs: Any) -> bool:
    one.eval()
    two.eval()
    with torch.no_grad():
        return all(_equal(a, b) for a, b in zip(_called(one, inputs), _called(two, inputs), strict=True))


def _equal(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(two) and one == two
    return one.dtype == two.dtype and one.shape == two.shape and _bits(one) == _bits(two)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _text(net: Any) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([[2, 7, 3], [9, 4, 5]])}
    if getattr(net.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return {**inputs, "use_cache": False} if hasattr(net.config, "use_cache") else inputs


def _pixels(net: Any) -> int:
    channels, height, width = net.default_cfg["input_size"]
    return channels * height * width


class _Said(logging.Handler):
    """Hears whether a module was taken for a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.chains = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        self.chains += "assuming a chain" in record.getMessage()
