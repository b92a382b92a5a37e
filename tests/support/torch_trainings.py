"""PyTorch trainings for tests: small models of many kinds, and who reads and fills their state as a fork does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tensorvine.actors.training.torch.training import TorchTraining
from tensorvine.actors.training.training import RankContext, Training
from torch import nn
from torch.optim import lr_scheduler

CLASSES = 5


class Plain(nn.Module):
    """Two layers that lean on nothing but their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(x)))


class Convolutional(nn.Module):
    """Batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 2, 3)).flatten(1))


class Tied(nn.Module):
    """A layer that is used twice, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed((x[:, :3] > 0).long() + (x[:, 3:] > 0).long())
        return self.head(self.norm(self.twice(torch.relu(self.twice(tokens.mean(1))))))


class Recurrent(nn.Module):
    """Weights in a list, of which one function reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(2, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.view(-1, 3, 2))[0][:, -1])


class Attending(nn.Module):
    """A module that reads the weights of another without calling it, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.full((2,), 1.5))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.spread = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.spread(x.view(-1, 3, 2) * self.scale)).mean(1))


class Partial(nn.Module):
    """Parameters that no step uses, that are frozen, and that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Plain()
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.seldom = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(self.frozen(x))
        return found * self.seldom if x[0, 0] > 0 else found


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Plain, Convolutional, Tied, Recurrent, Attending, Partial)
}


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of eight examples."""
    drawn = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=drawn), torch.randint(CLASSES, (8,), generator=drawn)
    return x[rank::size], y[rank::size]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def steps_down(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 4, 0.5)


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)


def in_turn(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3, 7])], [4]
    )


def make(
    model: str = "Plain",
    optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
    schedule: Callable[[Any], Any] | None = None,
    *,
    seed: int = 0,
    context: RankContext | None = None,
    **more: Any,
) -> TorchTraining:
    """Make a training whose weights and dropout follow from the seed, where no other thread draws."""
    torch.manual_seed(seed)
    made, drawn = MODELS[model](), torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.uniform_(-0.5, 0.5, generator=drawn)
    steps = optimizer([parameter for parameter in made.parameters() if parameter.requires_grad])
    context = RankContext("test", 0, 1, None) if context is None else context
    return TorchTraining(
        context, made, steps, loss, batches, scheduler=None if schedule is None else schedule(steps), **more
    )


class Taken:
    """Hooks that take the state after a step, as a fork does.

    Args:
        training: whose.
        step: the one.
    """

    def __init__(self, training: Training, step: int) -> None:
        self.training, self.step = training, step
        self.events: list[str] = []
        self.told: dict[str, Any] = {}
        """As `updated` gave them: the arrays themselves, and whether they are stable."""
        self.tensors: dict[str, np.ndarray] = {}
        """Copies, made when they were told, or at the end of the step."""
        self.facts: Mapping[str, Any] = {}

    def step_begins(self, step: int) -> bool:
        self.events.append(f"begin {step}")
        return step == self.step

    def before_update(self) -> None:
        self.events.append("before")

    def updated(self, name: str, array: Any, stable: bool = False) -> None:
        assert name not in self.told, f"{name} was told twice"
        self.events.append(name)
        self.told[name] = (array, stable)
        self.tensors[name] = np.array(array)

    def step_ended(self, step: int) -> None:
        self.events.append(f"end {step}")
        if step == self.step:
            self.take()

    def take(self) -> None:
        for spec in self.training.specs():
            if spec.name not in self.tensors:
                self.tensors[spec.name] = np.array(self.training.tensor(spec.name))
        self.facts = json.loads(json.dumps(self.training.facts()))


def give(taken: Taken, training: Training, name: str) -> None:
    """Fill one tensor of a training."""
    memory = training.memory(name)
    assert memory.flags.c_contiguous
    np.copyto(memory, taken.tensors[name])
    training.filled(name)


def give_all(taken: Taken, training: Training) -> None:
    """Fill a training with a state, facts last."""
    for spec in training.specs():
        give(taken, training, spec.name)
    training.restore(taken.facts)
