"""A module that would be built again otherwise than it was saved: whatever made the difference, it is refused."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import build, recipe_of
from torch import nn


class Mode(enum.Enum):
    UP = 1
    DOWN = 2


@dataclasses.dataclass
class Plan:
    width: int = 1
    found: float = dataclasses.field(default=1.0, init=False)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Scaling:
    def __init__(self, scale: float) -> None:
        self.scale, self.itself = scale, self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def unbound(scale: float) -> Callable[[], object]:
    if scale < 0:
        later = scale

    def inner() -> object:
        return later

    return inner


def one_of(elements: Any, value: float) -> Any:
    elements[7] = value
    return elements


MADE: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda scale: torch.tensor([scale]),
    "tensors": lambda scale: {"all": [torch.tensor(scale)]},
    "array": lambda scale: np.full(2, scale),
    "large array": lambda scale: np.full((70_000, 2), scale),
    "one of a large array": lambda scale: one_of(np.ones((70_000, 2)), scale),
    "one of a large tensor": lambda scale: one_of(torch.ones(200_000), scale),
    "Enum": lambda scale: Mode.UP if scale > 1 else Mode.DOWN,
    "dtype": lambda scale: torch.float16 if scale > 1 else torch.float32,
    "range": lambda scale: range(int(scale)),
    "partial": lambda scale: partial(F.leaky_relu, negative_slope=scale),
    "closure": lambda scale: lambda x: x * scale,
    "lambdas": lambda scale: (lambda x: -x) if scale > 1 else (lambda x: x),
    "methods of tensors": lambda scale: torch.Tensor.neg if scale > 1 else torch.Tensor.abs,
    "ufunc": lambda scale: np.negative if scale > 1 else np.positive,
    "called object": Scaling,
    "bound": lambda scale: Scaling(scale).__call__,
    "slots": Slotted,
    "dataclass": lambda scale: Plan(int(scale)),
    "namespace": lambda scale: argparse.Namespace(scale=scale),
    "module without tensors": lambda scale: [nn.LeakyReLU(scale)],
}


class Made(nn.Module):
    """Keeps what it made of an argument, and not the argument."""

    def __init__(self, how: str, scale: float = 1.0) -> None:
        super().__init__()
        self.how, self.made = how, MADE[how](scale)


class Planned(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


class Rotary(nn.Module):
    """Has its argument only in a buffer that is not stored."""

    def __init__(self, base: float = 10.0) -> None:
        super().__init__()
        self.register_buffer("rates", base ** -torch.arange(4.0), persistent=False)


class Aliased(Rotary):
    """As those of Hugging Face, which keep what the rates were at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.rates


class Casting(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype


class Signed(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Hiding(nn.Module):
    """Holds a module whose tensors are in no state_dict."""

    def __init__(self, teacher: list[nn.Module]) -> None:
        super().__init__()
        self.teacher = teacher


def planned() -> nn.Module:
    plan = Plan()
    plan.found = 2.0
    return Planned(plan)


def patched() -> nn.Module:
    net = nn.Linear(2, 2)
    net.forward = partial(F.linear, weight=net.weight)
    return net


def hooked() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight.register_hook(lambda gradient: gradient * 0)
    return net


@pytest.mark.parametrize("how", MADE)
def test_what_a_constructor_made_of_an_argument_that_is_not_told_counts(how: str) -> None:
    build(recipe_of(Made(how)))
    with pytest.raises(GraphError, match="differs"):
        build(recipe_of(Made(how, 2.0)))


def test_a_function_that_closes_over_a_name_that_is_not_bound_is_told() -> None:
    net = Made("tensor")
    net.made = unbound(1.0)
    with pytest.raises(GraphError, match="differs"):
        build(recipe_of(net))


@pytest.mark.parametrize("make", [planned, patched, hooked])
def test_what_was_changed_afterwards_counts(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(GraphError, match="differs"):
        build(recipe_of(make()))


def test_values_of_buffers_that_are_not_stored_count() -> None:
    assert torch.equal(build(recipe_of(Rotary())).rates, Rotary().rates)
    halved = Aliased().half()
    assert torch.equal(build(recipe_of(halved)).rates, halved.rates)
    changed = Rotary()
    changed.rates.mul_(2)  # of the signature that is known
    for net in (Rotary(500.0), changed):
        with pytest.raises(GraphError, match=r"its buffer 'rates', which is not stored, has other values"):
            build(recipe_of(net))


class Masked(nn.Module):
    """Has more than 65,536 elements in a buffer that is not stored, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(200_000), persistent=False)
        self.table = torch.ones(200_000)


def test_each_element_of_a_large_buffer_counts() -> None:
    net = Masked()
    build(recipe_of(net))
    net.mask[7] = 5
    with pytest.raises(GraphError, match="its buffer 'mask', which is not stored, has other values"):
        build(recipe_of(net))


def test_a_recipe_that_has_digests_of_samples_is_still_built() -> None:
    net = Masked()
    recipe = json.loads(recipe_of(net))
    recipe["torch"].update(contents={"": "13c95a31f87b"}, unsaved={"mask": "c5988ecf38cd"})  # as it was written
    del recipe["torch"]["whole"]
    build(json.dumps(recipe))


def test_a_dtype_that_is_kept_is_told() -> None:
    assert build(recipe_of(Casting(2, torch.float16))).dtype is torch.float16


def test_a_module_whose_tensors_would_not_be_stored_is_refused_and_named() -> None:
    with pytest.raises(GraphError, match=r"Hiding: expected all modules .* found Linear in another attribute"):
        recipe_of(Hiding([nn.Linear(2, 2)]))


def test_signs_of_zeros_are_told_apart() -> None:
    for scale in (0.0, -0.0):
        assert str(build(recipe_of(Signed(scale))).scale) == str(scale)


def test_it_is_built_on_the_cpu_whatever_the_default_is() -> None:
    recipe = recipe_of(Rotary())
    with torch.device("meta"):
        assert not build(recipe).rates.is_meta
