"""What runs in the actors: the training of the producer, and the model of the consumers.

Rules
- A function reaches an actor by its name: `learner.train` is imported there. That works because Ray lets an actor's
  process import what lies beside the script that the driver was started with; in a job, `online.place` sees to that. In
  a notebook, or where the actors' machines do not have this directory, define the functions in the main script or
  inside another function (then they travel as code), or name the directory in
  `ray.init(runtime_env={"working_dir": ...})`.
- TensorFlow is imported within the functions: so by the actors, and not by the driver, which needs none of it.
- TensorFlow computes with one thread per actor: here several actors share few cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scans import Instrument, Measured
from tensorvine.actors import Repository

if TYPE_CHECKING:
    import keras

PATIENCE_S = 120.0
"""How long a producer that has warmed up waits for the shutter."""


@dataclass(frozen=True, slots=True)
class Study:
    """All that a training follows from."""

    repository: str
    """Name of the repository."""
    instrument: Instrument
    width: int
    """Channels of PtychoNN's first convolution."""
    batch: int
    """Patterns of one iteration."""
    rate: float
    """Learning rate of Adam."""
    warmup: int
    """Iterations of the first scan, which is there from the beginning: consumers need a first version."""
    iterations: int
    """In all."""

    def measured(self, iteration: int) -> Measured:
        """Return the patterns that iteration `iteration`, from 1, learns from."""
        return self.instrument.measure((iteration - 1) * self.batch, self.batch)

    @property
    def scan(self) -> int:
        """Return how many iterations one scan takes: the epoch of this training."""
        return self.instrument.scan // self.batch

    def exchanges(self) -> list[int]:
        """Return the iterations that are the first ones of another object."""
        samples = [self.instrument.sample(before * self.batch) for before in range(self.iterations)]
        return [at + 1 for at in range(self.warmup, self.iterations) if samples[at] != samples[at - 1]]


def build(study: Study) -> keras.Model:
    """Make the consumers' model."""
    from network import ptychonn

    _compute_with_one_thread()
    return ptychonn(study.width)


def train(publisher: Any, study: Study) -> float:
    """Warm up on the first scan; then learn from each batch of patterns as it comes, and publish when it is time.

    The instrument begins when somebody opens its shutter: that is a version of `shutter(...)`. A training that is too
    slow for the instrument falls behind it.

    Returns:
        Seconds that it learned and published, without waiting for patterns.
    """
    import keras
    from network import ptychonn

    _compute_with_one_thread()
    keras.utils.set_random_seed(study.instrument.seed)
    model = ptychonn(study.width)
    learn = _learner(model, study.rate)
    for iteration in range(1, study.warmup + 1):
        publisher.step(learn(study.measured(iteration)), model)
    opened_at, period_s = _opened(study.repository, publisher.name)
    busy_s = 0.0
    for number, iteration in enumerate(range(study.warmup + 1, study.iterations + 1), 1):
        measured = study.measured(iteration)
        time.sleep(max(opened_at + number * period_s - time.time(), 0.0))  # until the last photon has come
        begun = time.perf_counter()
        publisher.step(learn(measured), model)
        busy_s += time.perf_counter() - begun
    return busy_s


def shutter(name: str) -> str:
    """Name the model whose first version lets the instrument begin for the training of `name`.

    Its tensors: "opened_at", in seconds since the epoch, and "period_s", from one batch of patterns to the next.
    """
    return f"{name}/shutter"


def _opened(repository: str, name: str) -> tuple[float, float]:
    """Wait for the shutter; give when it opens, and the time from one batch to the next."""
    with Repository.connect(repository) as repo:
        ref = repo.wait_newer(shutter(name), timeout=PATIENCE_S)
        if ref is None:
            raise TimeoutError(f"training of {name!r}: expected an open shutter within {PATIENCE_S} s")
        found = repo.load(ref)
        return float(found["opened_at"]), float(found["period_s"])


def _learner(model: keras.Model, rate: float) -> Any:
    """Make the compiled training step: from patterns to the loss, the mean absolute errors of both images."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(patterns: tf.Tensor, amplitudes: tf.Tensor, phases: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            amplitude, phase = model(patterns, training=True)
            loss = tf.reduce_mean(tf.abs(amplitude - amplitudes)) + tf.reduce_mean(tf.abs(phase - phases))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    return lambda measured: float(step(measured.patterns, measured.amplitudes, measured.phases))


def _compute_with_one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
