"""An optimizer's state comes back bit for bit, by the names of parameters, or is refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensorvine.store.errors import TensorMismatchError, TensorNotFoundError
from tensorvine.store.torch import optimizer_tensors_of, restoring
from torch import nn
from torch.optim import lr_scheduler as schedules

Optimizer = torch.optim.Optimizer
OPTIMIZERS = [
    name
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
]
SCHEDULES: list[Callable[[Optimizer], Any]] = [
    lambda opt: schedules.StepLR(opt, 2),
    lambda opt: schedules.MultiStepLR(opt, [2, 4, 4]),
    lambda opt: schedules.OneCycleLR(opt, 0.5, total_steps=20),
    lambda opt: schedules.CosineAnnealingWarmRestarts(opt, 3),
    lambda opt: schedules.ReduceLROnPlateau(opt, patience=1),
    lambda opt: schedules.LambdaLR(opt, lambda step: 0.9**step),
    lambda opt: schedules.SequentialLR(
        opt, [schedules.ConstantLR(opt, 0.1, 2), schedules.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.head(torch.relu(self.body(x)) @ self.matrix)


def optimizer(net: nn.Module, name: str) -> Optimizer:
    kind = getattr(torch.optim, name)
    parameters: Any = list(net.parameters())
    if name == "Muon":
        parameters = [item for item in parameters if item.ndim == 2]
    if name == "SparseAdam":
        return kind(parameters)
    if name == "SGD":
        heads = set(net.head.parameters())
        groups = [{"params": [p for p in parameters if p not in heads]}, {"params": list(net.head.parameters())}]
        groups[1]["lr"] = 0.05
        return kind(groups, lr=0.01, momentum=0.9)
    return kind(parameters, lr=0.01)


def train(net: nn.Module, opt: Optimizer, steps: int, schedule: Any = None) -> list[float]:
    batch, losses = torch.linspace(-1, 1, 12).reshape(3, 4), []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = net(batch).square().sum()
        loss.backward()
        if isinstance(opt, torch.optim.SparseAdam):
            for parameter in net.parameters():
                parameter.grad = parameter.grad.to_sparse()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        opt.step(closure)
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return losses


def moved(one: tuple[Net, Optimizer, Any], two: tuple[Net, Optimizer, Any]) -> None:
    tensors = {name: array.copy() for name, array in optimizer_tensors_of(*one).items()}
    two[0].load_state_dict(one[0].state_dict())
    restoring(two[0], tensors, two[1], two[2]).apply()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str) -> None:
    nets = Net(1), Net(2)
    one, two = ((net, optimizer(net, name), None) for net in nets)
    train(*one[:2], 3)
    moved(one, two)
    assert train(*one[:2], 3) == train(*two[:2], 3)
    for mine, theirs in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize(("name", "capturable"), [("Adam", False), ("Adam", True), ("SGD", False), ("Muon", False)])
def test_state_is_on_the_device_of_its_parameter(name: str, capturable: bool) -> None:
    nets = [Net(seed).cuda() for seed in (1, 2)]
    opts = [optimizer(net, name) for net in nets]
    for opt in opts:
        opt.param_groups[0].update({"capturable": True} if capturable else {})
    batch = torch.linspace(-1, 1, 12).reshape(3, 4).cuda()

    def step(place: int) -> None:
        opts[place].zero_grad()
        nets[place](batch).square().sum().backward()
        opts[place].step()

    step(0)
    moved((nets[0], opts[0], None), (nets[1], opts[1], None))
    for mine, theirs in zip(*(opt.state.values() for opt in opts), strict=True):
        assert {key: value.device for key, value in mine.items()} == {key: v.device for key, v in theirs.items()}
    for place in (0, 1):
        step(place)
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(make: Callable[[Optimizer], Any]) -> None:
    nets = Net(1), Net(2)
    opts = [optimizer(net, "SGD") for net in nets]
    one, two = ((net, opt, make(opt)) for net, opt in zip(nets, opts, strict=True))
    train(*one[:2], 3, one[2])
    moved(one, two)
    assert train(*one[:2], 4, one[2]) == train(*two[:2], 4, two[2])
    assert [group["lr"] for group in one[1].param_groups] == [group["lr"] for group in two[1].param_groups]


def test_the_order_of_parameters_does_not_matter() -> None:
    one, two = Net(1), Net(2)
    opt = torch.optim.Adam(one.parameters())
    train(one, opt, 2)
    other = torch.optim.Adam(reversed(list(two.parameters())))
    moved((one, opt, None), (two, other, None))
    for (name, mine), theirs in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(opt.state[mine]["exp_avg"], other.state[theirs]["exp_avg"]), name


def test_state_of_another_dtype_than_the_parameter_keeps_its_bits() -> None:
    nets = Net(1).bfloat16(), Net(2).bfloat16()
    opts = [torch.optim.SGD(net.parameters(), momentum=0.9) for net in nets]
    for parameter in nets[0].parameters():
        opts[0].state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    moved((nets[0], opts[0], None), (nets[1], opts[1], None))
    for parameter in nets[1].parameters():
        found = opts[1].state[parameter]["momentum_buffer"]
        assert found.dtype == torch.float32
        assert (found == np.float32(1 / 3)).all()


def test_names_are_those_of_parameters() -> None:
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    train(net, opt, 1)
    names = optimizer_tensors_of(nn.DataParallel(net), opt).keys()
    assert {"optimizer/body.weight/exp_avg", "optimizer/matrix/step", "optimizer/groups:json"} <= names


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda net: torch.optim.SGD(net.parameters()), TensorMismatchError, "of a SGD; found that of a Adam"),
        (
            lambda net: torch.optim.Adam(net.head.parameters()),
            TensorMismatchError,
            r"with \[5\] parameters; found groups with \[2\]",
        ),
        (
            lambda net: torch.optim.Adam([{"params": net.head.parameters()}, {"params": net.body.parameters()}]),
            TensorMismatchError,
            r"found groups with \[2, 2\]",
        ),
    ],
)
def test_another_optimizer_is_refused_and_unchanged(make: Any, error: type[Exception], message: str) -> None:
    one, two = Net(1), Net(2)
    opt = torch.optim.Adam(one.parameters())
    train(one, opt, 2)
    target = make(two)
    before = repr(target.state_dict())
    with pytest.raises(error, match=message):
        restoring(two, optimizer_tensors_of(one, opt), target)
    assert repr(target.state_dict()) == before


def test_groups_of_the_same_parameters_keep_their_order() -> None:
    one, two = Net(1), Net(2)
    opts = [
        torch.optim.SGD([{"params": net.parameters()}, {"params": []}, {"params": []}], lr=0.1) for net in (one, two)
    ]
    for place, group in enumerate(opts[0].param_groups):
        group["lr"] = place + 1.0
    moved((one, opts[0], None), (two, opts[1], None))
    assert [group["lr"] for group in opts[1].param_groups] == [1, 2, 3]


def test_names_of_parameters_are_the_optimizers_own() -> None:
    one, two = Net(1), Net(2)
    named = torch.optim.SGD(one.named_parameters())
    other = torch.optim.SGD(reversed(list(two.named_parameters())))
    plain = torch.optim.SGD(two.parameters())
    before = other.param_groups[0]["param_names"]
    moved((one, named, None), (two, other, None))
    moved((one, named, None), (two, plain, None))
    assert other.param_groups[0]["param_names"] == before
    assert "param_names" not in plain.param_groups[0]


def test_tensors_within_the_state_keep_their_bits() -> None:
    nets = Net(1), Net(2)
    opts = [torch.optim.SGD(net.parameters()) for net in nets]
    history = [torch.full((2,), 1 / 3, dtype=torch.float64)]
    opts[0].state[nets[0].matrix] = {"history": history, "of": {"a": (history[0],)}}
    moved((nets[0], opts[0], None), (nets[1], opts[1], None))
    found = opts[1].state[nets[1].matrix]
    for tensor in (found["history"][0], found["of"]["a"][0]):
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, history[0])


@pytest.mark.parametrize("key", [0, "a/b", "a:json", ""])
def test_keys_that_are_no_names_are_refused(key: Any) -> None:
    net = Net()
    opt = torch.optim.SGD(net.parameters())
    opt.state[net.matrix][key] = 1
    with pytest.raises(TensorMismatchError, match="optimizer state of 'matrix': expected keys without '/'"):
        optimizer_tensors_of(net, opt)
    opt.state.clear()
    opt.state["step"] = 3
    with pytest.raises(TensorMismatchError, match="found state of 'step'"):
        optimizer_tensors_of(net, opt)


def test_a_schedule_that_refuses_leaves_the_optimizer_as_it_was() -> None:
    def chained(opt: Optimizer, count: int) -> Any:
        parts = [schedules.ConstantLR(opt, 0.5, 2) for _ in range(count)]
        return schedules.SequentialLR(opt, parts, milestones=list(range(1, count)))

    nets = Net(1), Net(2)
    opts = [torch.optim.Adam(net.parameters()) for net in nets]
    train(nets[0], opts[0], 2)
    train(nets[1], opts[1], 1)
    three, two = chained(opts[0], 3), chained(opts[1], 2)
    before = repr(opts[1].state_dict()), repr(two.state_dict())
    with pytest.raises(TensorMismatchError, match="load_state_dict of Adam and SequentialLR"):
        restoring(nets[1], optimizer_tensors_of(nets[0], opts[0], three), opts[1], two).apply()
    assert (repr(opts[1].state_dict()), repr(two.state_dict())) == before
    undo = restoring(nets[1], optimizer_tensors_of(nets[0], opts[0]), opts[1]).apply()
    assert repr(opts[1].state_dict()) != before[0]
    undo()
    assert repr(opts[1].state_dict()) == before[0]


def test_parameters_without_memory_are_refused() -> None:
    one = Net()
    opt = torch.optim.Adam(one.parameters())
    with torch.device("meta"):
        two = Net()
    with pytest.raises(TensorMismatchError, match='on the device "meta": fill the module first'):
        restoring(two, optimizer_tensors_of(one, opt), torch.optim.Adam(two.parameters()))


def test_what_was_not_saved_is_not_found() -> None:
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    with pytest.raises(TensorNotFoundError, match="optimizer: expected its state among the stored tensors; found none"):
        restoring(net, {}, opt)
    with pytest.raises(TensorNotFoundError, match="scheduler: expected its state"):
        restoring(net, optimizer_tensors_of(net, opt), opt, schedules.StepLR(opt, 1))


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(TensorMismatchError, match=r"found another tensor of shape \(4, 4\)"):
        optimizer_tensors_of(Net(), torch.optim.Adam(Net().parameters()))
