"""PyTorch trainings: their whole state can be taken while they go on, and goes on elsewhere bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tensorvine.actors.training.torch.training import TorchTraining
from tensorvine.actors.training.training import RankContext
from tensorvine.store.errors import TensorNotFoundError
from torch import nn

from tests.support.torch_trainings import (
    CLASSES,
    MODELS,
    Plain,
    Taken,
    adam,
    batches,
    give,
    give_all,
    in_turn,
    loss,
    make,
    one_cycle,
    sgd,
    steps_down,
)

pytestmark = pytest.mark.usefixtures("_one_thread", "_few_bytes")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=True)


RECIPES = {"sgd": (sgd, steps_down), "adam": (adam, one_cycle), "adamw": (adamw, in_turn)}


class TestClone:
    """Where a state is taken over, training goes on as it would have."""

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("model", MODELS)
    def test_its_next_losses_are_the_originals_bit_for_bit(self, model: str, recipe: str) -> None:
        original = make(model, *RECIPES[recipe])
        taken = Taken(original, 3)
        original.hook(taken)
        losses = [original.step() for _ in range(23)]
        clone = make(model, *RECIPES[recipe], seed=1)
        assert list(clone.specs()) == list(original.specs())
        give_all(taken, clone)
        assert clone.steps_done == 3
        assert [clone.step() for _ in range(20)] == losses[3:]

    @pytest.mark.parametrize("model", MODELS)
    def test_a_step_may_begin_before_its_tensors_are_there(self, model: str) -> None:
        original = make(model, sgd)
        taken = Taken(original, 2)
        original.hook(taken)
        losses = [original.step() for _ in range(4)]
        clone = make(model, sgd, seed=1)
        clone.restore(taken.facts)
        for spec in clone.specs():
            memory = clone.memory(spec.name)
            memory[...] = np.nan if memory.dtype.kind == "f" else 1
        waited: list[str] = []

        def wait(name: str) -> None:
            waited.append(name)
            give(taken, clone, name)

        clone.gate(wait)
        assert clone.step() == losses[2]
        assert sorted(waited) == sorted(spec.name for spec in clone.specs())
        assert clone.step() == losses[3]
        assert len(waited) == len(clone.specs())

    def test_reads_are_waited_for_in_the_order_of_the_forward_pass(self) -> None:
        original = make("Attending", sgd)
        assert original.forward_order()[1] == "model/scale"  # as registered, parameters of the module itself first
        taken = Taken(original, 1)
        original.hook(taken)
        original.step()
        clone = make("Attending", sgd, seed=1)
        clone.restore(taken.facts)
        waited: list[str] = []
        clone.gate(lambda name: [waited.append(name), give(taken, clone, name)][0])
        clone.step()
        order = list(original.forward_order())
        assert waited[: len(order)] == order == list(clone.forward_order())
        assert order[:3] == ["random/torch", "model/scale", "model/spread.weight"]
        assert order[-2:] == ["model/head.weight", "model/head.bias"]
        first = waited[len(order)]
        assert first.startswith("optimizer/head."), "optimizer state is needed in the order of the backward pass"

    def test_code_that_cannot_be_watched_waits_for_all_before_it_begins(self) -> None:
        original = make("Plain", sgd)
        taken = Taken(original, 1)
        original.hook(taken)
        losses = [original.step() for _ in range(2)]
        clone = make("Plain", sgd, seed=1)
        clone.model.head.compile(backend="eager")
        clone = TorchTraining(RankContext("b", 0, 1, None), clone.model, clone.optimizer, loss, batches)
        clone.restore(taken.facts)
        waited: list[str] = []
        clone.gate(lambda name: [waited.append(name), give(taken, clone, name)][0])
        seen: list[int] = []
        clone._loss = lambda model, batch: [seen.append(len(waited)), loss(model, batch)][1]
        assert clone.step() == losses[1]
        assert seen == [len(clone.specs())]

    def test_a_model_that_derives_values_when_it_is_loaded_does_so_before_its_first_step(self) -> None:
        original = make("Plain", sgd)
        taken = Taken(original, 2)
        original.hook(taken)
        for _ in range(2):
            original.step()
        clone = make("Plain", sgd, seed=1)
        seen: list[np.ndarray] = []
        clone.model.register_load_state_dict_post_hook(
            lambda model, _: seen.append(model.head.weight.detach().numpy().copy())  # as what packs weights does
        )
        clone = TorchTraining(RankContext("b", 0, 1, None), clone.model, clone.optimizer, loss, batches)
        clone.restore(taken.facts)
        clone.gate(lambda name: give(taken, clone, name))
        clone.step()
        clone.step()
        assert len(seen) == 1
        assert (seen[0] == taken.tensors["model/head.weight"]).all()

    def test_a_state_from_before_the_first_step_is_one_too(self) -> None:
        original = make("Plain", sgd)
        taken = Taken(original, 0)
        taken.take()
        losses = [original.step() for _ in range(5)]
        clone = make("Plain", sgd, seed=1)
        give_all(taken, clone)
        assert [clone.step() for _ in range(5)] == losses
        assert all(not array.any() for name, array in taken.tensors.items() if name.startswith("optimizer/"))

    def test_parameters_without_a_gradient_have_no_optimizer_state_in_a_clone_either(self) -> None:
        original = make("Partial", sgd)
        taken = Taken(original, 2)
        original.hook(taken)
        for _ in range(2):
            original.step()
        clone = make("Partial", sgd, seed=1)
        give_all(taken, clone)
        assert set(clone.optimizer.state) == {
            clone.model.get_parameter(name) for name, parameter in original.model.named_parameters()
            if parameter in original.optimizer.state
        }  # fmt: skip
        assert clone.model.get_parameter("unused.weight") not in clone.optimizer.state

    def test_a_state_may_be_taken_over_while_training(self) -> None:
        first, second = make("Convolutional"), make("Convolutional", seed=1)
        for _ in range(2):
            first.step()
        for _ in range(3):
            second.step()
        taken = Taken(first, 2)
        taken.take()
        losses = [first.step() for _ in range(5)]
        give_all(taken, second)
        assert [second.step() for _ in range(5)] == losses

    def test_weights_that_do_not_lie_in_rows_come_over(self) -> None:
        def build(seed: int) -> TorchTraining:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Conv2d(3, 4, (1, 2)), nn.Flatten())
            model = model.to(memory_format=torch.channels_last)
            model.append(nn.Linear(4, CLASSES))
            return TorchTraining(RankContext("test", 0, 1, None), model, sgd(model.parameters()), loss, batches)

        original = build(0)
        weight = original.model[2].weight
        assert not weight.is_contiguous()
        taken = Taken(original, 2)
        original.hook(taken)
        losses = [original.step() for _ in range(6)]
        clone = build(1)
        give_all(taken, clone)
        assert taken.told["model/2.weight"][1], "a copy is stable"
        assert [clone.step() for _ in range(4)] == losses[2:]

    def test_reduced_precision_comes_over(self) -> None:
        def build(seed: int) -> TorchTraining:
            torch.manual_seed(seed)
            model = Plain().to(torch.bfloat16)
            halved = lambda model, batch: loss(model, (batch[0].to(torch.bfloat16), batch[1]))  # noqa: E731
            return TorchTraining(RankContext("test", 0, 1, None), model, adam(model.parameters()), halved, batches)

        original = build(0)
        taken = Taken(original, 2)
        original.hook(taken)
        losses = [original.step() for _ in range(6)]
        clone = build(1)
        give_all(taken, clone)
        assert taken.tensors["model/head.weight"].dtype.name == "bfloat16"
        assert [clone.step() for _ in range(4)] == losses[2:]

    def test_extra_state_of_modules_comes_over(self) -> None:
        class Counting(Plain):
            count = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.count += 1
                return super().forward(x) * self.count

            def get_extra_state(self) -> Any:
                return {"count": self.count}

            def set_extra_state(self, state: Any) -> None:
                self.count = state["count"]

        def build(seed: int) -> TorchTraining:
            torch.manual_seed(seed)
            model = Counting()
            return TorchTraining(RankContext("test", 0, 1, None), model, sgd(model.parameters()), loss, batches)

        original, clone = build(0), build(1)
        losses = [original.step() for _ in range(2)]
        taken = Taken(original, 2)
        taken.take()
        losses = [original.step() for _ in range(3)]
        give_all(taken, clone)
        assert [clone.step() for _ in range(3)] == losses

    @pytest.mark.parametrize("change", ["schedule", "groups"])
    def test_facts_of_another_kind_of_training_are_refused(self, change: str) -> None:
        taken = Taken(make("Plain", sgd, steps_down if change == "schedule" else None), 0)
        taken.take()
        if change == "groups":
            taken.facts["groups"].append(taken.facts["groups"][0])
        with pytest.raises(ValueError, match=r"facts: expected 1 parameter groups and no schedule; found"):
            make("Plain", sgd).restore(taken.facts)


class TestHooks:
    """Whoever forks is told in time, and training does not notice."""

    @pytest.mark.parametrize("model", MODELS)
    def test_hooks_change_no_bit(self, model: str) -> None:
        bare = make(model)
        losses = [bare.step() for _ in range(6)]
        hooked = make(model)
        hooked.hook(Taken(hooked, 4))
        assert [hooked.step() for _ in range(6)] == losses

    @pytest.mark.parametrize("model", MODELS)
    def test_what_is_told_is_what_the_step_ends_with_and_lies_where_the_tensor_lies(self, model: str) -> None:
        training = make(model)
        taken = Taken(training, 2)
        training.hook(taken)
        for _ in range(2):
            training.step()
        assert taken.told
        for name, (array, _) in taken.told.items():
            assert np.array_equal(taken.tensors[name], training.tensor(name)), name
            assert np.shares_memory(array, training.tensor(name))
        assert taken.told.keys() <= {spec.name for spec in training.specs()}

    def test_they_are_called_in_order(self) -> None:
        training = make("Plain", sgd)
        taken = Taken(training, 2)
        training.hook(taken)
        for _ in range(3):
            training.step()
        first, last = taken.events.index("begin 2"), taken.events.index("end 2")
        assert taken.events[:first] == ["begin 1", "before", "end 1"]
        assert taken.events[first + 1] == "before"
        assert set(taken.events[first + 2 : last]) == {s.name for s in training.specs() if not s.local}
        assert taken.events[last + 1 :] == ["begin 3", "before", "end 3"]
        heads = [place for place, name in enumerate(taken.events) if "head." in name]
        assert max(heads) < taken.events.index("model/hidden.weight")

    def test_parameters_are_updated_while_the_backward_pass_goes_on(self) -> None:
        training = make("Plain", sgd)
        taken = Taken(training, 1)
        training.hook(taken)
        training.model.hidden.register_forward_hook(
            lambda module, inputs, output: (
                output.register_hook(lambda gradient: taken.events.append("first layer")) and None
            )
        )
        training.step()
        reached = taken.events.index("first layer")
        assert taken.events.index("model/head.weight") < reached < taken.events.index("model/hidden.weight")

    def test_copies_of_what_a_forward_pass_writes_to_stay_as_they_were(self) -> None:
        training = make("Convolutional")
        training.step()
        mean, state = training.tensor("model/body.1.running_mean"), training.tensor("random/torch")
        before = mean.copy(), state.copy()
        training.step()
        assert np.array_equal(mean, before[0])
        assert np.array_equal(state, before[1])
        assert not np.array_equal(training.tensor("model/body.1.running_mean"), before[0])

    def test_ranks_may_differ_in_buffers_and_random_state_alone(self) -> None:
        local = {spec.name for spec in make("Convolutional").specs() if spec.local}
        buffers = {f"model/body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert local == buffers | {"random/torch"}

    def test_a_closed_training_tells_nobody_and_leaves_the_model_alone(self) -> None:
        training = make("Plain", sgd)
        training.close()
        before = training.tensor("model/head.bias").copy()
        loss(training.model, batches(1, 0, 1)).backward()
        assert np.array_equal(training.tensor("model/head.bias"), before)

    def test_an_unknown_tensor_is_named(self) -> None:
        for name in ("model/nothing", "optimizer/head.bias/nothing", "nothing"):
            with pytest.raises(TensorNotFoundError, match=f"found '{name}'"):
                make().tensor(name)


@contextmanager
def ranks(count: int) -> Iterator[Callable[[Callable[[RankContext], Any]], list[Any]]]:
    """Return what runs a function of a context in a thread for each rank, all in one group."""
    from tensorvine.actors.collective.connect import connect
    from tensorvine.actors.collective.rendezvous import LocalRendezvous

    meeting, serial = LocalRendezvous(), iter(range(1000))

    def run(work: Callable[[RankContext], Any]) -> list[Any]:
        name = f"ranks-{next(serial)}"

        def one(rank: int) -> Any:
            with connect(name, rank, count, backend="gloo", timeout=20, rendezvous=meeting) as group:
                return work(RankContext("test", rank, count, group))

        with ThreadPoolExecutor(count) as pool:
            return [future.result() for future in [pool.submit(one, rank) for rank in range(count)]]

    yield run


class TestRanks:
    """Several ranks train one model."""

    def train(self, context: RankContext, model: str = "Plain", steps: int = 6, **more: Any) -> tuple[Any, Any]:
        training = make(model, sgd, context=context, seed=context.rank, **more)
        losses = [training.step() for _ in range(steps)]
        training.close()
        return losses, {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}

    def test_two_ranks_do_what_one_does_with_all_the_data(self) -> None:
        with ranks(2) as run:
            (first, weights), (second, others) = run(lambda context: self.train(context))
        alone, expected = self.train(RankContext("test", 0, 1, None))
        assert np.mean([first, second], axis=0) == pytest.approx(alone, rel=1e-4)
        for name, weight in expected.items():
            assert torch.equal(weights[name], others[name])
            assert torch.allclose(weights[name], weight, atol=1e-5)

    @pytest.mark.parametrize("model", ["Tied", "Partial"])
    def test_updates_beside_the_backward_pass_change_no_bit(self, model: str) -> None:
        with ranks(2) as run:
            beside = run(lambda context: self.train(context, model))
            after = run(lambda context: self.train(context, model, overlap=False))
        for (losses, weights), (other_losses, other_weights) in zip(beside, after, strict=True):
            assert losses == other_losses
            assert all(torch.equal(weights[name], other_weights[name]) for name in weights)

    def test_a_parameter_that_one_rank_does_not_use_is_updated_on_all_and_one_that_none_uses_on_none(self) -> None:
        def work(context: RankContext) -> Any:
            training = make("Partial", sgd, context=context)
            model = training.model
            training._batches = lambda step, rank, size: (torch.full((2, 6), 1.0 - 2 * rank), torch.tensor([0, 1]))
            before = model.seldom.detach().clone()
            training.step()
            training.close()
            return before, model.seldom.detach().clone(), model.unused.weight.grad, len(training.optimizer.state)

        with ranks(2) as run:
            (before, first, *one), (_, second, *two) = run(work)
        assert torch.equal(first, second)
        assert not torch.equal(first, before)
        assert one == two == [None, 5]

    def test_all_begin_with_the_model_of_rank_0(self) -> None:
        with ranks(2) as run:
            (_, first), (_, second) = run(lambda context: self.train(context, steps=0))
        for name, weight in make("Plain", sgd).model.named_parameters():
            assert torch.equal(first[name], weight)
            assert torch.equal(second[name], weight)

    def test_a_state_taken_from_two_ranks_goes_on_in_two_others(self) -> None:
        with ranks(2) as run:

            def original(context: RankContext) -> Any:
                training = make("Partial", adam, steps_down, context=context)
                taken = Taken(training, 2)
                training.hook(taken)
                losses = [training.step() for _ in range(6)]
                training.close()
                return taken, losses

            known = run(original)

            def clone(context: RankContext) -> Any:
                training = make("Partial", adam, steps_down, context=context, seed=3)
                give_all(known[context.rank][0], training)
                losses = [training.step() for _ in range(4)]
                training.close()
                return losses

            assert run(clone) == [losses[2:] for _, losses in known]
        assert known[0][0].told.keys() == known[1][0].told.keys()

    def test_a_rank_that_fails_ends_the_step_of_the_others(self) -> None:
        from tensorvine.store.errors import PeerLostError

        def work(context: RankContext) -> BaseException | None:
            training = make("Plain", sgd, context=context)
            if context.rank == 1:
                training._loss = lambda model, batch: 1 / 0
            try:
                training.step()
            except (ZeroDivisionError, PeerLostError) as exc:
                return exc
            finally:
                training.close()
            return None

        with ranks(2) as run:
            assert [type(error) for error in run(work)] == [PeerLostError, ZeroDivisionError]
