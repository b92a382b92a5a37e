"""Publishing from plain `model.fit`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import CheckpointCallback, Publisher, Repository
from tensorvine.actors.updates.fitting import FitCallback
from tensorvine.planner import PlanRequest
from tensorvine.store.errors import InvalidNameError

keras = pytest.importorskip("keras")
ROWS, BATCH, EPOCHS = 60, 10, 4
STEPS = ROWS // BATCH


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start(f"fit-{uuid.uuid4().hex[:6]}", shards=1, preallocate_bytes=0) as repository:
        yield repository


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:6]}"


def net() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    return model


class BatchLosses(keras.callbacks.Callback):
    """Computes each batch's loss the other way: with the weights before the batch."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y, self.found = x, y, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        self.found.append(float(np.mean((self.model(self.x[rows]).numpy() - self.y[rows]) ** 2)))


def fit(callback: Any, *more: Any, epochs: int = EPOCHS) -> Any:
    rng = np.random.default_rng(0)
    x = rng.random((ROWS, 4), np.float32)
    y = x.sum(axis=1, keepdims=True)
    model = net()
    watching = BatchLosses(x, y)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, watching, *more])
    return model, watching.found


def test_losses_are_those_of_each_batch(repo, name):
    callback = CheckpointCallback(repo, name, schedule=1000)
    _, wanted = fit(callback)
    found = callback.report().losses
    assert [iteration for iteration, _ in found] == list(range(1, STEPS * EPOCHS + 1))
    np.testing.assert_allclose([loss for _, loss in found], wanted, rtol=1e-3)


def test_an_interval_publishes_what_the_model_was_then(repo, name):
    weights: dict[int, list[Any]] = {}

    class Remember(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            weights[len(weights) + 1] = self.model.get_weights()

    callback = CheckpointCallback(repo, name, schedule=7, synchronous=True, keep=9)
    fit(callback, Remember())
    updates = callback.report().updates
    assert [update.iteration for update in updates] == [7, 14, 21]
    for update in updates:
        for found, wanted in zip(repo.load_model(update.ref).get_weights(), weights[update.iteration], strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_each_epoch(repo, name):
    callback = CheckpointCallback(repo, name, schedule="epoch", synchronous=True)
    fit(callback)
    assert [update.iteration for update in callback.report().updates] == [STEPS * i for i in range(1, EPOCHS + 1)]


def test_planned_it_knows_how_long_the_training_is_and_publishes_after_the_warm_up(repo, name):
    callback = CheckpointCallback(repo, name, warmup=5)
    fit(callback, epochs=30)
    report = callback.report()
    assert report.updates[0].iteration == 5
    assert callback.publisher._trigger.request == PlanRequest(warmup=5, stop=STEPS * 30)


def test_one_publisher_lasts_for_several_fits(repo, name):
    with Publisher(repo, name, 6, synchronous=True) as publisher:
        fit(publisher.callback(), epochs=1)
        fit(publisher.callback(), epochs=1)
        assert publisher.iteration == 2 * STEPS
        assert [update.iteration for update in publisher.report().updates] == [6, 12]


def test_a_fit_that_failed_is_ended_by_its_block(repo, name):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == STEPS - 1:
                raise RuntimeError("no memory for it")

    with CheckpointCallback(repo, name, schedule=4) as callback:
        with pytest.raises(RuntimeError, match="no memory"):
            fit(callback, Fails())
        assert not callback.publisher._closing.is_set()
    assert callback.publisher._closing.is_set()
    assert [update.iteration for update in callback.report().updates] == [4]


def test_executions_of_several_batches_publish_as_often_as_the_schedule_says(repo, name):
    model = net()
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=4)
    data = {"x": np.ones((ROWS, 4)), "y": np.ones((ROWS, 1)), "batch_size": BATCH, "epochs": 4, "verbose": 0}
    for schedule, wanted in [("epoch", [6, 12, 18, 24]), (5, [6, 10, 16, 22]), ([1, 3, 11, 20], [4, 12, 22])]:
        callback = CheckpointCallback(repo, name, schedule, synchronous=True, keep=9)
        model.fit(**data, callbacks=[callback])
        assert [update.iteration for update in callback.report().updates] == wanted


class Steps:
    """Records the calls of a publisher."""

    def __init__(self) -> None:
        self.iteration = 0
        self.losses: list[tuple[int, float]] = []
        self.expected: list[tuple[int | None, int | None]] = []

    def expect(self, *, stop: int | None = None, epoch: int | None = None) -> None:
        self.expected.append((stop, epoch))

    def step(self, loss: float, model: Any, iteration: int | None = None) -> bool:
        self.iteration = iteration or self.iteration + 1
        self.losses.append((self.iteration, loss))
        return False

    def finish(self) -> None: ...


def batches(count: int = 10) -> Iterator[tuple[Any, Any]]:
    """Yield batches, of which the first is far off."""
    for place in range(count):
        yield np.ones((2, 4), np.float32), np.full((2, 1), 0.0 if place else 1e4, np.float32)


@pytest.mark.parametrize("execution", [1, 4])
def test_a_large_loss_before_it_takes_no_digits_of_a_loss(execution):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", steps_per_execution=execution)
    x, y = (np.concatenate(part) for part in zip(*batches(), strict=True))
    for _ in range(2):  # a second fit finds the model's step traced
        steps = Steps()
        model.fit(x, y, batch_size=2, verbose=0, shuffle=False, validation_data=(x, y), callbacks=[FitCallback(steps)])
        wanted = [1] * 9 if execution == 1 else [4, 2]
        assert [loss for _, loss in steps.losses[1:]] == pytest.approx([16.0] * len(wanted), rel=1e-6)
        assert [iteration for iteration, _ in steps.losses] == (list(range(1, 11)) if execution == 1 else [4, 8, 10])


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_of_data_of_unknown_length_are_counted_as_they_come():
    tf = pytest.importorskip("tensorflow")
    specs = (tf.TensorSpec((2, 4)), tf.TensorSpec((2, 1)))
    model, steps = net(), Steps()
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=4)
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[FitCallback(steps)])
    assert [iteration for iteration, _ in steps.losses] == [4, 8, 10, 14, 18, 20]
    assert int(model.optimizer.iterations) == 20


def test_a_fit_after_one_without_the_callback_counts_its_batches():
    model, steps = net(), Steps()
    x, y = np.ones((20, 4), np.float32), np.arange(20, dtype=np.float32)[:, None]
    model.fit(x, y, batch_size=2, verbose=0)
    history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[FitCallback(steps)])
    assert steps.iteration == 10
    assert list(history.history) == ["loss"]
    assert history.history["loss"] == pytest.approx([np.mean([loss for _, loss in steps.losses])], rel=1e-4)


def test_a_fit_that_begins_at_a_later_epoch_expects_the_iterations_that_are_left():
    model, steps = net(), Steps()
    x, y = np.ones((20, 4), np.float32), np.ones((20, 1), np.float32)
    for initial_epoch, epochs in ((0, 2), (2, 5)):  # as training goes on after a restart
        model.fit(
            x, y, batch_size=2, initial_epoch=initial_epoch, epochs=epochs, verbose=0, callbacks=[FitCallback(steps)]
        )
    assert steps.expected == [(20, 10), (50, 10)]
    assert steps.iteration == 50


def test_a_train_step_without_the_loss_tracker_is_taken_at_its_word():
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            self.optimizer.iterations.assign_add(1)
            return {"loss": keras.ops.sum(data[1])}

    model, steps = Own([keras.Input((4,)), keras.layers.Dense(1)]), Steps()
    model.compile(optimizer="sgd")
    x, y = (np.concatenate(part) for part in zip(*batches(), strict=True))
    model.fit(x, y, batch_size=2, verbose=0, shuffle=False, callbacks=[FitCallback(steps)])
    assert steps.losses == [(1, 2e4), *((iteration, 0.0) for iteration in range(2, 11))]


def test_a_wrong_name_or_schedule_is_refused_before_the_training(repo):
    with pytest.raises(InvalidNameError):
        CheckpointCallback(repo, "/no")
    with pytest.raises(ValueError, match="schedule: expected None"):
        CheckpointCallback(repo, "m", schedule="at noon")
