"""Optimizers of PyTorch trainings: asked for their step in parts, followed with their schedules, and told options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensorvine.actors.training.torch.optimizer import APART, state_slots
from tensorvine.actors.training.torch.training import TorchTraining
from tensorvine.actors.training.training import RankContext
from tensorvine.store.values import decode, encode
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from tests.support.torch_trainings import (
    CLASSES,
    Plain,
    Taken,
    adam,
    batches,
    give_all,
    in_turn,
    loss,
    make,
    one_cycle,
    sgd,
    steps_down,
)

pytestmark = pytest.mark.usefixtures("_one_thread", "_few_bytes")


VARIANTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: lambda p, n=name: getattr(torch.optim, n)(p, lr=0.01) for name in APART if name != "Muon"},
    "Muon": lambda p: torch.optim.Muon([item for item in p if item.ndim == 2], lr=0.01),
    "SGD momentum": sgd,
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, fused=True),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.0}]),
}


class TestOptimizer:
    """An optimizer may be asked for a part of its step, and for the state it will have."""

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_one_parameter_after_the_other_gives_the_same_bits_as_all_at_once(self, variant: str) -> None:
        apart, whole = make("Tied", VARIANTS[variant]), make("Tied", VARIANTS[variant], overlap=False)
        taken = Taken(apart, 1)
        apart.hook(taken)
        assert [apart.step() for _ in range(8)] == [whole.step() for _ in range(8)]
        assert len(taken.told) > 2, "it was updated in parts"

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_its_state_is_known_before_the_first_step_and_continues_elsewhere(self, variant: str) -> None:
        training = make("Plain", VARIANTS[variant])
        expected = state_slots(training.optimizer)
        taken = Taken(training, 2)
        training.hook(taken)
        losses = [training.step() for _ in range(5)]
        assert state_slots(training.optimizer) == expected
        clone = make("Plain", VARIANTS[variant], seed=1)
        give_all(taken, clone)
        assert [clone.step() for _ in range(3)] == losses[2:]

    def test_looking_ahead_changes_nothing(self) -> None:
        training = make("Plain", adam)
        assert not training.optimizer.state
        assert all(parameter.grad is None for parameter in training.model.parameters())

    def test_step_hooks_of_a_user_are_called_once_a_step_and_see_all_gradients(self) -> None:
        def clipped(parameters: Any) -> torch.optim.Optimizer:
            made = sgd(parameters)
            made.register_step_pre_hook(lambda *_: norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1))))
            return made

        norms: list[float] = []
        training = make("Plain", clipped)
        taken = Taken(training, 2)
        training.hook(taken)
        losses = [training.step() for _ in range(4)]
        assert len(norms) == 4
        assert min(norms) > 0.1
        clone = make("Plain", clipped, seed=1)
        give_all(taken, clone)
        assert [clone.step() for _ in range(2)] == losses[2:]

    def test_an_optimizer_of_a_users_takes_its_whole_step(self) -> None:
        calls: list[int] = []

        class Own(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                calls.append(sum(parameter.grad is not None for parameter in self.param_groups[0]["params"]))
                return super().step(closure)

        training = make("Plain", lambda parameters: Own(parameters, 0.1))
        calls.clear()  # the look ahead
        training.step()
        assert calls == [4]

    def test_parameters_in_the_same_memory_are_updated_after_the_backward_pass(self) -> None:
        def build(overlap: bool) -> TorchTraining:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
            model[2].weight.data = model[0].weight.data
            made = sgd(model.parameters())
            return TorchTraining(RankContext("test", 0, 1, None), model, made, loss, batches, overlap=overlap)

        assert [build(True).step() for _ in range(3)] == [build(False).step() for _ in range(3)]
        training = build(True)
        taken = Taken(training, 1)
        training.hook(taken)
        training.step()
        assert not taken.told

    def test_a_weight_that_is_read_behind_its_gradient_is_an_error_that_says_what_helps(self) -> None:
        def detached(model: Any, batch: Any) -> torch.Tensor:
            hidden = torch.tanh(model.hidden(batch[0]))
            return (hidden @ model.head.weight.detach().T).square().mean() + loss(model, batch)

        training = make("Plain", sgd)
        training._loss = detached
        with pytest.raises(RuntimeError, match="overlap=False"):
            training.step()
        with pytest.raises(RuntimeError, match="step 1 failed during their update"):
            training.step()
        other = make("Plain", sgd, overlap=False)
        other._loss = detached
        assert other.step() > other.step() > 0

    def test_a_gradient_that_comes_twice_is_an_error(self) -> None:
        class Nested(Plain):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = checkpoint(self.again, self.hidden(x), use_reentrant=True)
                return self.head(checkpoint(self.again, hidden, use_reentrant=True))

            def again(self, x: torch.Tensor) -> torch.Tensor:
                return torch.tanh(x) @ (self.head.weight.T @ self.head.weight)

        model = Nested()
        training = TorchTraining(RankContext("test", 0, 1, None), model, sgd(model.parameters()), loss, batches)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            training.step()

    def test_a_failed_loss_leaves_the_training_as_it_was(self) -> None:
        training, other = make("Plain", sgd), make("Plain", sgd)
        training._loss, right = (lambda model, batch: 1 / 0), training._loss
        with pytest.raises(ZeroDivisionError):
            training.step()
        training._loss = right
        assert [training.step() for _ in range(3)] == [other.step() for _ in range(3)]

    def test_a_parameter_that_was_frozen_at_first_is_updated_later(self) -> None:
        training = make("Plain", sgd)
        frozen = training.model.head.bias.requires_grad_(False)
        training.close()
        training = TorchTraining(
            RankContext("test", 0, 1, None), training.model, sgd(training.model.parameters()), loss, batches
        )
        before = frozen.clone()
        training.step()
        assert torch.equal(frozen, before)
        frozen.requires_grad_(True)
        training.step()
        assert not torch.equal(frozen, before)


class TestOptions:
    """What a user says is what is done."""

    def test_rates_are_set_with_a_schedule_where_it_stands(self) -> None:
        training = make("Plain", sgd, steps_down)
        for _ in range(5):
            training.step()
        group = training.optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(0.05)
        training.configure({"learning_rate": 1.0})
        assert (group["lr"], group["initial_lr"]) == pytest.approx((0.5, 1.0))
        for _ in range(3):
            training.step()
        assert group["lr"] == pytest.approx(0.25)

    def test_the_rate_of_a_cycle_is_its_peak(self) -> None:
        def rates(training: TorchTraining) -> list[float]:
            found = []
            for _ in range(30):
                training.step()
                found.append(training.optimizer.param_groups[0]["lr"])
            return found

        plain, told = make("Plain", sgd, one_cycle), make("Plain", sgd, one_cycle)
        told.configure({"learning_rate": 0.5})
        assert rates(told) == pytest.approx([10 * rate for rate in rates(plain)])

    @pytest.mark.parametrize("schedule", [lr_scheduler.LambdaLR, in_turn, None])
    def test_the_rate_that_it_has_changes_no_bit(self, schedule: Any) -> None:
        if schedule is lr_scheduler.LambdaLR:
            schedule = lambda made: lr_scheduler.LambdaLR(made, lambda step: 0.9**step)  # noqa: E731
        plain, told = make("Plain", sgd, schedule), make("Plain", sgd, schedule)
        for training in (plain, told):
            training.step()
        told.configure({"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0})
        assert [plain.step() for _ in range(8)] == [told.step() for _ in range(8)]

    def test_options_of_the_context_are_set(self) -> None:
        context = RankContext("test", 0, 1, None, {"learning_rate": np.float64(0.25), "momentum": 0.5, "width": 3})
        group = make("Plain", sgd, context=context).optimizer.param_groups[0]
        assert (group["lr"], group["momentum"]) == (0.25, 0.5)

    def test_a_clone_takes_over_what_it_was_not_told_otherwise(self) -> None:
        original = make("Plain", sgd, steps_down, context=RankContext("a", 0, 1, None, {"seed": 3}))
        original.configure({"learning_rate": 0.4, "momentum": 0.5})
        taken = Taken(original, 5)
        original.hook(taken)
        losses = [original.step() for _ in range(8)]
        told = {"seed": 3, "learning_rate": 0.4, "momentum": 0.5}
        same, other = (
            make("Plain", sgd, steps_down, context=RankContext("b", 0, 1, None, {**told, **changed}), seed=9)
            for changed in ({}, {"learning_rate": 0.8})
        )
        for clone in (same, other):
            give_all(taken, clone)
        assert [same.step() for _ in range(3)] == losses[5:]
        assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
        assert other.optimizer.param_groups[0]["momentum"] == 0.5
        assert other.step() == losses[5], "the first loss is that of the same weights"
        assert other.step() != losses[6]

    @pytest.mark.parametrize("last", ["facts", "tensors"])
    def test_a_clones_own_seed_counts_whatever_comes_last(self, last: str) -> None:
        original = make("Convolutional", context=RankContext("a", 0, 1, None, {"seed": 3}))
        taken = Taken(original, 2)
        original.hook(taken)
        losses = [original.step() for _ in range(4)]

        def clone(seed: int) -> list[float]:
            made = make("Convolutional", context=RankContext("b", 0, 1, None, {"seed": seed}), seed=8)
            if last == "tensors":
                made.restore(taken.facts)
            give_all(taken, made)
            return [made.step(), made.step()]

        assert clone(3) == losses[2:]
        assert clone(4)[0] != losses[2]
        assert clone(4) == clone(4)

    def test_ranks_of_one_seed_draw_differently(self) -> None:
        def drawn(rank: int) -> tuple[float, float]:
            make(context=RankContext("test", rank, 2, None, {"seed": 5}))
            return float(torch.rand(())), float(np.random.random())

        assert drawn(0) == drawn(0)
        assert not set(drawn(0)) & set(drawn(1))

    def test_other_options_go_to_the_user(self) -> None:
        told: list[Any] = []
        training = make("Plain", sgd, options=told.append)
        training.configure({"noise": 0.1, "learning_rate": 0.3})
        assert told == [{"noise": 0.1}]
        assert training.optimizer.param_groups[0]["lr"] == 0.3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rate": 0.1}, r"expected some of \['learning_rate', 'weight_decay', 'seed'\]; found \['rate'\]"),
            ({"momentum": 0.1}, r"found \['momentum'\]"),
            ({"learning_rate": -0.1}, r"'learning_rate': expected a number from 0; found -0.1"),
            ({"learning_rate": float("nan")}, r"found nan"),
            ({"learning_rate": "0.1"}, r"found '0.1'"),
            ({"seed": 1.5}, r"'seed': expected an integer from 0; found 1.5"),
            ({"seed": True}, r"found True"),
        ],
    )
    def test_a_wrong_option_is_named_and_changes_nothing(self, options: dict[str, Any], message: str) -> None:
        training = make("Plain", adam)
        with pytest.raises(ValueError, match=message):
            training.configure({"weight_decay": 0.5, **options})
        assert training.optimizer.param_groups[0]["weight_decay"] == 0

    def test_what_cannot_be_followed_is_refused(self) -> None:
        with pytest.raises(ValueError, match="LBFGS"):
            make("Plain", torch.optim.LBFGS)
        with pytest.raises(ValueError, match="ReduceLROnPlateau"):
            make("Plain", sgd, lr_scheduler.ReduceLROnPlateau)
        with pytest.raises(ValueError, match="expected only parameters of the model; found others"):
            make("Plain", lambda parameters: sgd([*parameters, nn.Parameter(torch.ones(2))]))
        with pytest.raises(ValueError, match=r"parameter group\['lr'\]: expected numbers.*; found Tensor"):
            make("Plain", lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)))

    def test_optimizer_state_that_is_neither_tensor_nor_json_is_named(self) -> None:
        training = make("Plain", sgd)
        training.step()
        training.optimizer.state[training.model.head.bias]["own"] = object()
        with pytest.raises(
            ValueError, match=r"optimizer state\['head.bias'\]\['own'\]: expected numbers.*found object"
        ):
            training.facts()

    @pytest.mark.parametrize("value", [(1, [2.5, None], {"a": (True, "b"), 3: []}), float("inf"), {}, []])
    def test_facts_keep_their_types(self, value: Any) -> None:
        found = decode(encode(value, "value"))
        assert repr(found) == repr(value)
