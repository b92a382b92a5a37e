"""Keras trainings: bits as in `fit`, states that go on elsewhere, what hooks are told, gates, ranks, forks."""

from __future__ import annotations

import json
import os
import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402  once it is known to be there
from tensorvine.actors.collective.connect import connect  # noqa: E402
from tensorvine.actors.collective.rendezvous import LocalRendezvous  # noqa: E402
from tensorvine.actors.training.fork.fork_hooks import ForkHooks  # noqa: E402
from tensorvine.actors.training.fork.order import ForkOrder  # noqa: E402
from tensorvine.actors.training.fork.receiver import ForkReceiver  # noqa: E402
from tensorvine.actors.training.keras.training import KerasTraining  # noqa: E402
from tensorvine.actors.training.training import RankContext  # noqa: E402
from tensorvine.store.errors import ForkError, GraphError, TensorNotFoundError  # noqa: E402

from tests.support.keras_trainings import (  # noqa: E402
    TIMEOUT_S,
    Ranks,
    Recorder,
    alone,
    batches,
    dense,
    hand_over,
    make,
    model,
    start_ranks,
    state_of,
    train,
)

AT, FURTHER = 3, 20
several_threads = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="TensorFlow has one thread for all operations")
KINDS = [
    ("dense", "sgd"),
    ("convolutional", "adam"),
    ("recurrent", "rmsprop"),
    ("Own", "adamw"),
    ("dense", "averaged"),
    ("dense", "accumulating"),
    ("dense", "scaled"),
]
"""Each net and each optimizer at least once."""


@dataclass(frozen=True)
class Course:
    """A training whose step `AT` was listened to."""

    facts: Any
    """After step `AT`."""
    losses: list[float]
    """Of each step, from the first."""
    states: dict[int, dict[str, np.ndarray]]
    """After some steps."""
    weights: list[np.ndarray]
    """In the model's order, after step `AT + 2`."""
    recorder: Recorder


@cache
def course(net: str, optimizer: str) -> Course:
    """Train once what several tests hold their clones against: most of a training's cost is that it is traced."""
    training, recorder = make(net, optimizer), Recorder(AT)
    training.hook(recorder)
    losses: list[float] = []
    facts, states, weights = None, {}, []
    for step in range(1, AT + FURTHER + 1):
        losses += train(training, 1)
        if step == AT:
            facts = training.facts()
        if step == AT + 2:
            weights = training.model.get_weights()
        if step in (AT, AT + 1, AT + 3, AT + FURTHER):
            states[step] = state_of(training)
    return Course(json.loads(json.dumps(facts)), losses, states, weights, recorder)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two fresh processes."""
    with start_ranks(2) as started:
        yield started


class Holds(layers.Layer):
    """Lets the backward pass through when something has been told."""

    def __init__(self, told: threading.Event) -> None:
        super().__init__()
        self.told = told

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        def hold() -> None:
            assert self.told.wait(TIMEOUT_S)

        @tf.custom_gradient
        def through(x: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                with tf.control_dependencies([tf.py_function(hold, [], [])]):
                    return tf.identity(upstream)

            return tf.identity(x), gradient

        return through(x)


def noisy(x: Any) -> Any:
    """Draw from Keras' global generator."""
    return x + keras.random.normal((8,))


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize(("net", "optimizer"), KINDS)
def test_the_bits_are_those_of_train_on_batch_whoever_listens(net: str, optimizer: str) -> None:
    plain, ours = model(net, optimizer), course(net, optimizer)
    expected = [plain.train_on_batch(*batches(step, 0, 1)) for step in range(1, AT + 3)]
    # Keras's metric: their mean over a batch of batches
    np.testing.assert_allclose(ours.losses[: AT + 2], expected, rtol=1e-6)
    weights = zip(plain.get_weights(), ours.weights, strict=True)
    assert all(one.tobytes() == other.tobytes() for one, other in weights)
    final, recorder = ours.states[AT], ours.recorder
    assert sorted(recorder.told) == sorted(final)
    assert same(recorder.copies, final)
    assert same({name: np.array(array) for name, array in recorder.arrays.items()}, final)
    assert recorder.begun == recorder.ended == list(range(1, AT + FURTHER + 1))


@pytest.mark.parametrize(("net", "optimizer"), [*KINDS[:3], KINDS[-1]])
def test_a_clone_goes_on_bit_for_bit(net: str, optimizer: str) -> None:
    source, clone = course(net, optimizer), make(net, optimizer, seed=2)
    train(clone, 2)  # one that has trained is filled, too
    hand_over(source.states[AT], source.facts, clone)
    assert clone.steps_done == AT
    assert train(clone, FURTHER) == source.losses[AT:]
    assert same(state_of(clone), source.states[AT + FURTHER])


def test_a_clone_in_a_fresh_process_goes_on_bit_for_bit(ranks: Ranks) -> None:
    source = course("convolutional", "adam")
    ranks.ask(0, "build", "convolutional", "adam", 2)
    ranks.ask(0, "adopt", source.states[AT], source.facts)
    assert ranks.ask(0, "train", FURTHER) == source.losses[AT:]


class TestTelling:
    @several_threads
    def test_tensors_are_told_while_the_backward_pass_goes_on(self) -> None:
        """It waits before the first layer until the last layer's weights were told."""
        told = threading.Event()

        class Watching(Recorder):
            def updated(self, name: str, array: Any, stable: bool = False) -> None:
                super().updated(name, array, stable)
                if name == "last/kernel":
                    told.set()

        body = [layers.Dense(4), Holds(told), layers.Dense(600), layers.Dense(600, name="last")]
        net = keras.Sequential([keras.Input((8,)), *body])
        net.compile("adam", "sparse_categorical_crossentropy")
        training, recorder = KerasTraining(alone(), net, batches), Watching(1)
        training.hook(recorder)
        train(training, 1)
        assert recorder.told[-1] != "last/kernel"

    def test_nothing_is_told_while_nobody_wants_to_know(self) -> None:
        training, recorder = make("dense"), Recorder(at=99)
        training.hook(recorder)
        train(training, 2)
        training.hook(None)
        train(training, 1)
        assert (recorder.told, recorder.begun) == ([], [1, 2])

    def test_what_hooks_raise_comes_out_as_it_is(self) -> None:
        training = make("dense")

        class Failing(Recorder):
            def updated(self, name: str, array: Any, stable: bool = False) -> None:
                raise ForkError(f"no {name} today")

        training.hook(Failing(1))
        with pytest.raises(ForkError, match="today"):
            training.step()
        with pytest.raises(RuntimeError, match="step 1: expected consistent weights"):
            training.step()

    def test_a_training_that_is_closed_tells_nobody(self) -> None:
        training, recorder = make("dense"), Recorder(1)
        training.hook(recorder)
        training.close()
        training.step()
        assert recorder.begun == []


class TestState:
    def test_a_model_built_twice_has_the_same_names(self) -> None:
        one, other = make("dense"), make("dense")
        assert list(one.specs()) == list(other.specs())
        assert one.forward_order() == other.forward_order()
        assert one.model.layers[0].name != other.model.layers[0].name

    def test_tensors_stand_in_the_order_in_which_steps_update_and_read_them(self) -> None:
        training = make("dense")
        names = [spec.name for spec in training.specs()]
        assert names[:2] == ["optimizer/sgd/dense#3/bias/momentum", "dense#3/bias"]
        assert names.index("dense/kernel") < names.index("optimizer/sgd/iteration")
        order = list(training.forward_order())
        assert order[:3] == ["random/0", "dense/kernel", "dense/bias"]
        assert sorted(order) == sorted(names)

    def test_statistics_and_random_states_are_local(self) -> None:
        local = [spec.name for spec in make("dense").specs() if spec.local]
        assert sorted(local) == [
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance",
            "random/0",
        ]

    def test_layers_of_one_name_are_told_apart(self) -> None:
        towers = [keras.Sequential([keras.Input((8,)), layers.Dense(3, name="same")], name=name) for name in "ab"]
        inputs = keras.Input((8,))
        net = keras.Model(inputs, layers.Add()([tower(inputs) for tower in towers]))
        net.compile("sgd", "mse")
        names = [spec.name for spec in KerasTraining(alone(), net, batches).specs()]
        assert len(names) == len(set(names))
        assert {"a/same/kernel", "b/same/kernel"} <= set(names)

    def test_a_frozen_layer_is_part_of_the_state(self) -> None:
        net = dense()
        net.layers[0].trainable = False
        net.compile("adam", "sparse_categorical_crossentropy")
        training, recorder = KerasTraining(alone(), net, batches), Recorder(1)
        training.hook(recorder)
        training.step()
        assert "dense/kernel" in recorder.told
        assert not any(name.startswith("optimizer/adam/dense/") for name in recorder.told)

    def test_a_step_that_writes_to_what_nobody_holds_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        net = keras.Sequential([keras.Input((8,)), layers.Lambda(noisy), layers.Dense(3)])
        net.compile("sgd", "sparse_categorical_crossentropy")
        train(make("dense"), 1)
        train(KerasTraining(alone(), net, batches), 1)
        (said,) = {record.getMessage() for record in caplog.records if "training" in record.name}
        assert "a step writes to variables that belong to neither a layer nor the optimizer" in said
        assert "lambda" in said

    def test_a_tensor_that_is_not_there_is_named(self) -> None:
        with pytest.raises(TensorNotFoundError, match="expected a tensor of the training's state; found 'none'"):
            make("dense").tensor("none")

    def test_facts_are_json_and_hold_python_s_and_numpy_s_random_state(self) -> None:
        source, clone = make("dense"), make("dense", seed=2)
        states = random.getstate(), np.random.get_state()[1].tolist()
        facts = json.loads(json.dumps(source.facts()))
        keras.utils.set_random_seed(3)
        clone.restore(facts)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states

    def test_facts_of_another_optimizer_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"expected learning rates \[\]; found \['optimizer/sgd/learning_rate'\]"):
            make("dense", "adam").restore(make("dense").facts())

    def test_the_learning_rate_comes_over_unless_the_clone_was_told_another(self) -> None:
        source = make("dense", context=alone(learning_rate=0.25))
        source.configure({"learning_rate": 0.125})
        like, other = make("dense", seed=2), make("dense", seed=2, context=alone(learning_rate=0.5))
        for clone in (like, other):
            clone.restore(source.facts())
        assert [float(clone.model.optimizer.learning_rate) for clone in (like, other)] == [0.125, 0.5]

    @pytest.mark.parametrize("net", ["plain", "unbuilt", "uncompiled"])
    def test_what_cannot_be_trained_is_refused(self, net: str) -> None:
        made = keras.Sequential([layers.Dense(2)])
        if net != "uncompiled":
            made.compile("sgd" if net == "unbuilt" else None, "mse")
        error = GraphError if net == "unbuilt" else ValueError
        with pytest.raises(error, match="expected"):
            KerasTraining(alone(), made, batches)


class TestOptions:
    def test_a_learning_rate_counts_from_the_next_step(self) -> None:
        one, other = make("dense"), make("dense")
        train(one, 2)
        train(other, 2)
        one.configure({"learning_rate": 0.0})
        assert train(one, 2)[0] == train(other, 2)[0]
        assert train(one, 1) != train(other, 1)

    @pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "0.1", True, None])
    def test_a_learning_rate_that_is_none_is_refused(self, rate: Any) -> None:
        training = make("dense")
        with pytest.raises(ValueError, match="option 'learning_rate': expected a number from 0; found"):
            training.configure({"learning_rate": rate})
        with pytest.raises(ValueError, match="expected a number from 0"):
            make("dense", context=alone(learning_rate=rate))

    def test_other_options_are_refused_or_the_user_s(self) -> None:
        with pytest.raises(ValueError, match=r"options: expected some of \['learning_rate'\]; found \['beta'\]"):
            make("dense").configure({"beta": 1})
        with pytest.raises(ValueError, match=r"options: expected some of \[\]; found \['learning_rate'\]"):
            make("dense", "adam").configure({"learning_rate": 1.0})  # it has a schedule
        told: dict[str, Any] = {}
        training = KerasTraining(alone(beta=2, learning_rate=0.5), model("dense"), batches, options=told.update)
        training.configure({"beta": 1, "learning_rate": 0.25})
        assert (told, float(training.model.optimizer.learning_rate)) == ({"beta": 1}, 0.25)


class TestGate:
    """A clone's first step begins before its tensors are there."""

    class Arrivals:
        """Tensors that come one after the other, in the order of the forward pass, when the step asks for them."""

        def __init__(self, state: dict[str, np.ndarray], facts: Any, clone: KerasTraining) -> None:
            self.state, self.clone = state, clone
            self.memory = {name: clone.memory(name) for name in self.state}
            for array in self.memory.values():
                array[...] = np.nan if array.dtype.kind == "f" else 99
            clone.restore(facts)
            self.asked: list[str] = []

        def wait(self, name: str) -> None:
            assert name not in self.asked
            self.asked.append(name)
            self.memory[name][...] = self.state[name]
            self.clone.filled(name)

    @pytest.mark.parametrize(("net", "optimizer"), [*KINDS[:4], ("deep", "adamw")])
    def test_each_tensor_is_waited_for_before_it_is_read(self, net: str, optimizer: str) -> None:
        """Once while the step is traced, and once by a step that was traced before."""
        source, clone = course(net, optimizer), make(net, optimizer, seed=2)
        for _ in ("not traced", "traced"):
            arrivals = self.Arrivals(source.states[AT], source.facts, clone)
            clone.gate(arrivals.wait)
            assert train(clone, 3) == source.losses[AT : AT + 3]
            assert arrivals.asked == list(clone.forward_order())
            assert same(state_of(clone), source.states[AT + 3])

    @several_threads
    def test_the_forward_pass_goes_on_while_later_tensors_are_awaited(self) -> None:
        """The step waits for a momentum; what is told meanwhile shows that the backward pass is through."""
        source, clone = make("deep"), make("deep", seed=2)
        train(source, AT)
        train(clone, 1)
        arrivals = self.Arrivals(state_of(source), source.facts(), clone)
        last = "optimizer/sgd/dense/kernel/momentum"
        updated = threading.Event()

        class Watching(Recorder):
            def updated(self, name: str, array: Any, stable: bool = False) -> None:
                super().updated(name, array, stable)
                if name == "dense#2/kernel":
                    updated.set()

        def wait(name: str) -> None:
            assert name != last or updated.wait(TIMEOUT_S)
            arrivals.wait(name)

        recorder = Watching(AT + 1)
        clone.hook(recorder)
        clone.gate(wait)
        assert train(clone, 1) == train(source, 1)
        assert recorder.told.index("dense#2/kernel") < recorder.told.index(last)

    def test_a_clone_whose_state_does_not_come_says_why(self) -> None:
        clone = make("dense")

        def wait(name: str) -> None:
            raise ForkError(f"{name} does not come")

        clone.gate(wait)
        with pytest.raises(ForkError, match="random/0 does not come"):
            clone.step()

    def test_an_open_gate_holds_nobody(self) -> None:
        clone = make("dense")
        clone.gate(lambda name: pytest.fail(name))
        clone.gate(None)
        clone.step()


class TestRanks:
    """Two ranks, in processes of their own."""

    @pytest.mark.parametrize(("net", "optimizer"), [("Own", "adamw"), ("deep", "sgd")])
    def test_they_train_as_one_with_the_whole_batch(self, ranks: Ranks, net: str, optimizer: str) -> None:
        single = course(net, optimizer)
        ranks.join(f"{net}-{uuid.uuid4().hex[:6]}")
        ranks.all("build", [net] * 2, [optimizer] * 2, [1, 7])
        losses = ranks.all("train", [4] * 2)
        np.testing.assert_allclose(np.mean(losses, axis=0), single.losses[:4], rtol=1e-4)
        states = ranks.all("state")
        assert same(*states)
        for name, array in single.states[4].items():
            np.testing.assert_allclose(states[0][name], array, rtol=1e-3, atol=1e-4)
        ranks.all("leave")

    def test_statistics_and_dropout_stay_each_rank_s_own(self, ranks: Ranks) -> None:
        ranks.join(f"dense-{uuid.uuid4().hex[:6]}")
        ranks.all("build", ["dense"] * 2, ["sgd"] * 2, [1, 7])
        ranks.all("train", [2] * 2)
        one, other = ranks.all("state")
        local = {"random/0", "batch_normalization/moving_mean", "batch_normalization/moving_variance"}
        assert {name for name in one if one[name].tobytes() != other[name].tobytes()} == local
        ranks.all("leave")

    def test_a_run_that_is_repeated_gives_the_same_bits_whoever_listens(self, ranks: Ranks) -> None:
        losses: list[Any] = []
        for method in ("train", "record"):
            ranks.join(f"deep-{uuid.uuid4().hex[:6]}")
            ranks.all("build", ["deep"] * 2, ["sgd"] * 2, [1, 1])
            ranks.all(method, [AT] * 2)
            losses.append(ranks.all("train", [2] * 2))
            ranks.all("leave")
        assert losses[0] == losses[1]

    def test_a_peer_that_is_gone_is_named(self, ranks: Ranks) -> None:
        ranks.join(f"dense-{uuid.uuid4().hex[:6]}", timeout=20.0)
        ranks.all("build", ["dense"] * 2, ["sgd"] * 2, [1, 1])
        ranks.all("train", [2] * 2)
        ranks.ask(1, "leave")
        with pytest.raises(RuntimeError, match="PeerLostError"):
            ranks.ask(0, "train", 1)
        ranks.ask(0, "leave")


class TestForks:
    """Through the ports of those who fork."""

    @staticmethod
    def fork(source: KerasTraining, clones: list[KerasTraining], at: int) -> tuple[list[ForkReceiver], list[float]]:
        joins = partial(connect, rendezvous=LocalRendezvous())
        fork_hooks = ForkHooks(source, "run", 0, 1, joins)
        source.hook(fork_hooks)
        specs, forward = tuple(source.specs()), tuple(source.forward_order())
        order = ForkOrder(
            id=uuid.uuid4().hex[:8],
            run="run",
            sources=1,
            groups=(len(clones),),
            specs=specs,
            forward=forward,
            transport="shared",
            timeout=TIMEOUT_S,
        )
        fork_hooks.arm(order, at)
        fork_hooks.agree(order.id)
        losses = train(source, at - source.steps_done + FURTHER)
        intakes = [ForkReceiver(order, place, clone, joins) for place, clone in enumerate(clones)]
        for receiver in intakes:
            receiver.received(TIMEOUT_S)
        return intakes, losses[-FURTHER:]

    def test_a_clone_that_comes_late_has_the_state_of_the_step(self) -> None:
        source, clone = make("dense"), make("dense", seed=2)
        (receiver,), losses = self.fork(source, [clone], AT)
        receiver.whole(TIMEOUT_S)
        assert train(clone, FURTHER) == losses

    def test_two_clones_begin_while_they_gather(self) -> None:
        source = make("deep")
        clones = [
            KerasTraining(RankContext("clones", rank, 2, None), model("deep", seed=9), batches) for rank in (0, 1)
        ]
        intakes, _ = self.fork(source, clones, AT)
        with ThreadPoolExecutor(2) as pool:
            for clone, receiver in zip(clones, intakes, strict=True):
                clone.gate(receiver.wait)
            losses = [future.result(TIMEOUT_S) for future in [pool.submit(clone.step) for clone in clones]]
        for receiver in intakes:
            receiver.whole(TIMEOUT_S)
        whole = make("deep")
        train(whole, AT)
        np.testing.assert_allclose(np.mean(losses), train(whole, 1)[0], rtol=1e-5)
