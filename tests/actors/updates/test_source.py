"""What is published of a torch module that its training changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensorvine.actors.updates.source import Source
from tensorvine.store.recipes import is_note
from tensorvine.store.torch import build
from torch import nn


class Warm(nn.Module):
    def __init__(self, temperature: Any = 1.0) -> None:
        super().__init__()
        self.temperature, self.body = temperature, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / self.temperature


def recipe(source: Source) -> str:
    assert source.recipe is not None
    return source.recipe


def test_a_version_is_built_again_as_the_module_was_when_it_was_published() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    source = Source(net)
    source.tensors(net)
    net[1].p = 0.5
    net.eval()[0].requires_grad_(False)
    source.tensors(net)
    again = build(recipe(source))
    assert again[1].p == 0.5
    assert not again.training
    assert not again[0].weight.requires_grad


def test_why_there_is_no_recipe_is_the_same_in_every_process() -> None:
    nets = [Warm(), Warm()]
    for net in nets:
        net.temperature = partial(lambda x: x)
    first, second = (recipe(Source(net)) for net in nets)
    assert is_note(first)
    assert first == second
