"""Forking a plain `model.fit`: what hooks are told in it, and clones of it that go on as it does."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

keras = pytest.importorskip("keras")
tensorflow = pytest.importorskip("tensorflow")

from tensorvine.actors.collective.connect import connect  # noqa: E402  once it is known to be there
from tensorvine.actors.collective.rendezvous import ActorRendezvous  # noqa: E402
from tensorvine.actors.engine.ray.engine import RayEngine  # noqa: E402
from tensorvine.actors.training.fork.order import ForkOrder  # noqa: E402
from tensorvine.actors.training.fork.receiver import ForkReceiver  # noqa: E402
from tensorvine.actors.training.keras.callback import FitHooks, ForkCallback  # noqa: E402
from tensorvine.actors.training.mailbox import find_trainers  # noqa: E402
from tensorvine.store.errors import ForkError  # noqa: E402

from tests.support.asking import ask  # noqa: E402
from tests.support.keras_trainings import (  # noqa: E402
    TIMEOUT_S,
    Recorder,
    alone,
    batches,
    hand_over,
    make,
    model,
    state_of,
    train,
)

AT, STEPS = 4, 10


class Data(keras.utils.PyDataset):
    """The batches of `keras_trainings`, from a step on."""

    def __init__(self, first: int = 1, steps: int = STEPS) -> None:
        super().__init__()
        self.first, self.steps = first, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, place: int) -> Any:
        return batches(self.first + place, 0, 1)


def fit(net: Any, *callbacks: Any, first: int = 1, steps: int = STEPS) -> Any:
    net.fit(Data(first, steps), shuffle=False, verbose=0, callbacks=list(callbacks))
    return net


def weights(net: Any) -> list[bytes]:
    return [array.tobytes() for array in net.get_weights()]


@pytest.fixture
def as_written() -> Iterator[None]:
    """Have TensorFlow compute a graph's products in the order they are written.

    Folding constants it changes that order, in `fit`'s graph otherwise than in a step's: whether a convolution then has
    other bits depends on the processor. What is tested is the state that is handed over.
    """
    options = tensorflow.config.optimizer
    options.set_experimental_options({"constant_folding": False})
    yield
    options.set_experimental_options({"constant_folding": True})


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(("net", "optimizer"), [("dense", "sgd"), ("convolutional", "adam"), ("dense", "scaled")])
def test_a_fit_has_the_same_bits_and_a_clone_of_it_goes_on_with_them(net: str, optimizer: str) -> None:
    plain, hooked = fit(model(net, optimizer)), model(net, optimizer)
    with FitHooks(hooked) as callback:
        recorder = Recorder(AT)
        callback.hook(recorder)
        fit(hooked, callback, steps=AT)
        facts = {"options": {}, **callback.state.facts()}
        final = state_of(callback.state)
        fit(hooked, callback, first=AT + 1, steps=STEPS - AT)
        assert weights(hooked) == weights(plain)
        assert sorted(recorder.told) == sorted(final)
        assert all(recorder.arrays[name].tobytes() == array.tobytes() for name, array in final.items())
        assert recorder.begun == recorder.ended == list(range(1, STEPS + 1))
    clone = make(net, optimizer, seed=2)
    hand_over(final, facts, clone)
    train(clone, STEPS - AT)
    assert weights(clone.model) == weights(plain)


class TestHooks:
    def test_a_model_that_was_fitted_before_is_compiled_anew_once(self) -> None:
        net = fit(model("dense"), steps=2)
        with FitHooks(net, steps_done=2) as callback:
            recorder = Recorder(3)
            callback.hook(recorder)
            fit(net, callback, first=3, steps=2)
            compiled = net.train_function
            fit(net, callback, first=5, steps=1)
            assert net.train_function is compiled
        assert (recorder.begun, len(recorder.told)) == ([3, 4, 5], len(callback.state.specs()))

    def test_a_train_step_of_the_model_s_own_is_kept(self) -> None:
        class Counting(keras.Model):
            calls = 0

            def train_step(self, data: Any) -> Any:
                type(self).calls += 1
                return super().train_step(data)

        inputs = keras.Input((8,))
        net = Counting(inputs, keras.layers.Dense(3)(inputs))
        net.compile("sgd", "sparse_categorical_crossentropy")
        recorder = Recorder(1)
        with FitHooks(net) as callback:
            callback.hook(recorder)
            fit(net, callback, steps=1)
        assert recorder.told
        assert Counting.calls
        assert "train_step" not in vars(net)
        told = list(recorder.told)
        fit(net, steps=2)
        assert recorder.told == told

    def test_a_fit_that_is_not_compiled_tells_too(self) -> None:
        net, recorder = model("dense", run_eagerly=True), Recorder(2)
        with FitHooks(net) as callback:
            callback.hook(recorder)
            fit(net, callback, steps=2)
            final = state_of(callback.state)
        assert {name: array.tobytes() for name, array in recorder.copies.items()} == {
            name: array.tobytes() for name, array in final.items()
        }

    @pytest.mark.parametrize("compiled", [{"jit_compile": True}, {"steps_per_execution": 2}])
    def test_steps_that_cannot_call_python_are_refused(self, compiled: dict[str, Any]) -> None:
        net = model("dense", **compiled)
        with pytest.raises(
            ValueError, match=r"expected model.compile\(..., steps_per_execution=1, jit_compile=False\)"
        ):
            FitHooks(net)
        net = model("dense")
        callback = FitHooks(net)
        net.compile("sgd", "mse", **compiled)
        with pytest.raises(ValueError, match="steps_per_execution=1"):
            fit(net, callback)

    def test_the_fit_of_another_model_is_refused(self) -> None:
        with (
            FitHooks(model("dense")) as callback,
            pytest.raises(ValueError, match="expected the model of this callback"),
        ):
            fit(model("dense"), callback)


@pytest.fixture
def run() -> str:
    return f"fit-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def forkable(cluster: object, run: str) -> Iterator[ForkCallback]:
    with ForkCallback(run, model("dense"), engine=RayEngine()) as callback:
        yield callback


class Forker:
    """Who forks the fit, through the handle that it finds."""

    def __init__(self, run: str) -> None:
        self.engine = RayEngine()
        (self.rank,) = find_trainers(run, timeout=TIMEOUT_S, engine=self.engine)

    def ask(self, method: str, *arguments: Any) -> Any:
        return ask(self.engine, self.rank, method, *arguments, timeout=TIMEOUT_S, who=method)

    def fork(self, at: int, timeout: float = TIMEOUT_S) -> ForkOrder:
        report = self.ask("describe")
        specs, forward = report.specs, report.forward_order
        order = ForkOrder(
            id=uuid.uuid4().hex[:8],
            run=report.run,
            sources=report.size,
            groups=(1,),
            specs=specs,
            forward=forward,
            transport="shared",
            timeout=timeout,
        )
        self.ask("arm", order, at)
        self.ask("agree", order.id)
        return order

    def clone(self, order: ForkOrder) -> Any:
        clone = make("dense", seed=2, context=alone())
        ForkReceiver(order, 0, clone, partial(connect, rendezvous=ActorRendezvous(self.engine))).whole(TIMEOUT_S)
        state = self.ask("fork_state", order.id, TIMEOUT_S)
        assert (state.ended, state.error) == (True, None)
        return clone


class TestForks:
    def test_a_fit_is_forked_while_it_goes_on(self, forkable: ForkCallback, run: str) -> None:
        forker = Forker(run)
        order = forker.fork(AT)
        with ThreadPoolExecutor(1) as pool:
            fitting = pool.submit(fit, forkable.state.model, forkable)
            clone = forker.clone(order)
            fitting.result(TIMEOUT_S)
        assert clone.steps_done == AT
        train(clone, STEPS - AT)
        assert weights(clone.model) == weights(forkable.state.model) == weights(fit(model("dense")))
        report = forker.ask("describe")
        assert (report.steps_done, report.losses, report.training, report.fork) == (STEPS, STEPS, False, None)
        assert report.step_s > 0

    def test_between_two_fits_it_is_captured_as_it_is(self, forkable: ForkCallback, run: str) -> None:
        fit(forkable.state.model, forkable, steps=AT)
        forker = Forker(run)
        with pytest.raises(ForkError, match=f"not begun; found {AT - 1}, but"):
            forker.fork(AT - 1)
        order = forker.fork(AT)
        fit(forkable.state.model, forkable, first=AT + 1, steps=STEPS - AT)
        clone = forker.clone(order)
        train(clone, STEPS - AT)
        assert weights(clone.model) == weights(forkable.state.model)

    def test_a_step_that_has_begun_is_past_and_a_fork_can_be_given_up(self, forkable: ForkCallback, run: str) -> None:
        forker = Forker(run)
        inside, go_on = threading.Event(), threading.Event()

        class Holding(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                inside.set()
                assert go_on.wait(TIMEOUT_S)

        with ThreadPoolExecutor(1) as pool:
            fitting = pool.submit(fit, forkable.state.model, forkable, Holding(), steps=2)
            assert inside.wait(TIMEOUT_S)
            assert forker.ask("describe").training
            with pytest.raises(ForkError, match="found 1, but 1 has begun"):
                forker.fork(1)
            order = forker.fork(2, timeout=5.0)
            assert forker.ask("describe").fork == order.id
            forker.ask("cancel", order.id, "no more")
            go_on.set()
            fitting.result(TIMEOUT_S)
        assert "cancelled: no more" in forker.ask("fork_state", order.id, TIMEOUT_S).error
        for thread in threading.enumerate():  # it waits for the clone until the fork's time is over
            if thread.name == "tensorvine-fork":
                thread.join(TIMEOUT_S)

    def test_a_second_fit_of_the_name_and_a_rank_that_is_none_are_refused(
        self, forkable: ForkCallback, run: str
    ) -> None:
        with pytest.raises(ForkError, match="another process uses them"):
            ForkCallback(run, model("dense"), engine=RayEngine())
        with pytest.raises(ValueError, match="expected a rank below 1 and steps_done from 0; found 1 and 0"):
            ForkCallback(run, model("dense"), rank=1)
