"""What a training changes is no part of a fingerprint; what a layer was made with is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensorvine.store.torch import graph_of
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization


class Reading(nn.Module):
    """Reads tensors that are not stored, as attributes, in lists, and computed in its forward pass."""

    def __init__(self, value: float = 1.0, length: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((length,), value, dtype=dtype), persistent=False)
        self.table = torch.full((length,), value)
        self.several = [torch.full((length,), value)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.mask + self.table + self.several[0] + self.mask.sum()


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.body = scale, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


class Leaf(nn.Module):
    """A vertex of its own, where the whole cannot be traced."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.zeros(2))
        self.calls, self.history, self.kind = 0, (0.0, 0.0), "leaf"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum() > 0 else x


def fingerprint(net: nn.Module) -> bytes:
    return graph_of(net).fingerprint


def test_the_elements_of_tensors_that_are_not_stored_are_not_but_shape_and_dtype_are() -> None:
    assert fingerprint(Reading(1.0)) == fingerprint(Reading(2.0))
    others = {fingerprint(net) for net in (Reading(), Reading(length=1), Reading(dtype=torch.float64))}
    assert len(others) == 3


def test_a_module_without_memory_has_the_same() -> None:
    with torch.device("meta"):
        net = Reading()
    assert fingerprint(net) == fingerprint(Reading())


def test_a_number_is_where_a_call_has_it() -> None:
    assert fingerprint(Scaled(1.0)) == fingerprint(Scaled(1.0)) != fingerprint(Scaled(2.0))


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(2, 2)), lambda: nn.Sequential(Leaf())])
@pytest.mark.parametrize("value", [3, 2.5, (1, 2), [0.5]])
def test_numbers_that_are_attached_to_a_layer_are_not(make: Callable[[], nn.Sequential], value: Any) -> None:
    net = make()
    net[0].calls = value
    net[0].history = value
    assert fingerprint(net) == fingerprint(make())


def test_numbers_that_a_constructor_was_given_are() -> None:
    assert fingerprint(nn.Sequential(Leaf(2))) != fingerprint(nn.Sequential(Leaf(3)))
    assert fingerprint(nn.Sequential(nn.Dropout(0.1))) != fingerprint(nn.Sequential(nn.Dropout(0.2)))
    pools = [nn.Sequential(nn.MaxPool2d(2, stride)) for stride in (1, 2)]
    assert fingerprint(pools[0]) != fingerprint(pools[1])


def test_other_attributes_are() -> None:
    net = nn.Sequential(Leaf())
    net[0].kind = "another"
    assert fingerprint(net) != fingerprint(nn.Sequential(Leaf()))


def test_the_scales_of_a_quantised_module_are_not() -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch moves it to a package of its own
            net = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 3), quantization.DeQuantStub()).eval()
            net.qconfig = quantization.get_default_qconfig("onednn")
            prepared = quantization.prepare(net)
            prepared(torch.randn(8, 4))
            return quantization.convert(prepared)

    one, other = made(1), made(2)
    assert one[1].scale != other[1].scale
    assert fingerprint(one) == fingerprint(other)
