"""Keras trainings for tests: small models of many kinds, who reads and fills their state as a fork does, and ranks.

`Rank` runs in a process of its own: `start_ranks` starts some, and tells them what to do through pipes.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers
from tensorvine.actors.collective.connect import connect
from tensorvine.actors.collective.group import Group
from tensorvine.actors.training.keras.training import KerasTraining
from tensorvine.actors.training.training import RankContext

ROWS, CLASSES, TOKENS = 8, 3, 50
TIMEOUT_S = 200.0  # a process that imports Keras takes long on a busy machine


class Own(keras.Model):
    """A model whose graph Keras does not know, with a weight of its own and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.build((None, 8))

    def build(self, shape: Any) -> None:
        self.inside.build(shape)
        self.head.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.head(self.inside(self.inside(x)) * self.scale)


def dense() -> keras.Model:
    """Batch statistics, dropout, a weight that is decayed, and layers without names."""
    hidden = layers.Dense(8, activation="relu", kernel_regularizer="l2")
    body = [layers.Dense(8, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3), hidden]
    return keras.Sequential([keras.Input((8,)), *body, layers.Dense(CLASSES)])


def convolutional() -> keras.Model:
    body = [layers.Reshape((4, 2, 1)), layers.Conv2D(4, 2, activation="relu"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((8,)), *body, layers.Flatten(), layers.Dropout(0.2), layers.Dense(CLASSES)])


def recurrent() -> keras.Model:
    """Sparse gradients, a loop, dropout within it."""
    words = keras.Input((8,))
    x = layers.Embedding(TOKENS, 4)(layers.Lambda(lambda x: abs(x * 9) % TOKENS, name="tokens")(words))
    return keras.Model(words, layers.Dense(CLASSES)(layers.GRU(4, dropout=0.2)(x)))


def deep() -> keras.Model:
    """Layers so large that each is told, reduced and waited for by itself."""
    body = [layers.Dense(520, activation="tanh", use_bias=False) for _ in range(4)]
    return keras.Sequential([keras.Input((8,)), *body, layers.Dense(CLASSES)])


NETS: dict[str, Callable[[], keras.Model]] = {net.__name__: net for net in (dense, convolutional, recurrent, deep, Own)}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)),
    "adamw": lambda: optimizers.AdamW(0.01, global_clipnorm=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, clipvalue=0.01),
    "averaged": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulating": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Nadam(0.01)),
}


def batches(step: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's part of the step's batch; the whole is the same for all sizes."""
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(ROWS, 8)).astype(np.float32), rng.integers(0, CLASSES, ROWS)
    return x[rank::size], y[rank::size]


def model(net: str, optimizer: str = "sgd", seed: int = 1, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = NETS[net]()
    made.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    return made


def alone(**options: Any) -> RankContext:
    return RankContext("run", 0, 1, None, options)


def make(net: str, optimizer: str = "sgd", seed: int = 1, context: RankContext | None = None) -> KerasTraining:
    return KerasTraining(alone() if context is None else context, model(net, optimizer, seed), batches)


def train(training: KerasTraining, steps: int) -> list[float]:
    return [training.step() for _ in range(steps)]


class Recorder:
    """Hooks that note what is told in one step, and what it was."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.told: list[str] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.copies: dict[str, np.ndarray] = {}

    def step_begins(self, step: int) -> bool:
        self.begun.append(step)
        return step == self.at

    def before_update(self) -> None:
        raise AssertionError("what is told is stable")

    def updated(self, name: str, array: Any, stable: bool = False) -> None:
        assert stable
        self.told.append(name)
        self.arrays[name], self.copies[name] = array, np.array(array)

    def step_ended(self, step: int) -> None:
        self.ended.append(step)


def state_of(training: Any) -> dict[str, np.ndarray]:
    return {spec.name: np.array(training.tensor(spec.name)) for spec in training.specs()}


def hand_over(state: Mapping[str, np.ndarray], facts: Any, clone: KerasTraining) -> None:
    """Fill a clone as a fork does: facts as text, tensors into memory."""
    memory = {name: clone.memory(name) for name in state}
    clone.restore(json.loads(json.dumps(facts)))
    for name, array in state.items():
        memory[name].reshape(-1).view(np.uint8)[...] = array.reshape(-1).view(np.uint8)
        clone.filled(name)


class Rank:
    """A training in this process, alone or one of several ranks."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.group: Group | None = None

    def exchange(self, key: str, rank: int, size: int, endpoint: Mapping[str, Any], timeout: float) -> list[Any]:
        """Meet the other ranks, through the test (`Rendezvous`)."""
        self.pipe.send(("endpoint", dict(endpoint)))
        return self.pipe.recv()

    def join(self, name: str, rank: int, size: int, timeout: float) -> None:
        self.group = connect(name, rank, size, backend="shared", timeout=timeout, rendezvous=self)

    def build(self, net: str, optimizer: str, seed: int) -> None:
        group = self.group
        context = alone() if group is None else RankContext("run", group.rank, group.size, group)
        self.training = make(net, optimizer, seed, context)

    def adopt(self, state: dict[str, np.ndarray], facts: Any) -> None:
        hand_over(state, facts, self.training)

    def train(self, steps: int) -> list[float]:
        return train(self.training, steps)

    def state(self) -> dict[str, np.ndarray]:
        return state_of(self.training)

    def record(self, steps: int) -> None:
        """Train, and have all told in the last step."""
        recorder = Recorder(self.training.steps_done + steps)
        self.training.hook(recorder)
        train(self.training, steps)
        self.training.hook(None)
        assert sorted(recorder.told) == sorted(spec.name for spec in self.training.specs())

    def leave(self) -> None:
        self.training.close()
        if self.group is not None:
            self.group.close()
            self.group = None


def run_rank(pipe: Connection) -> None:
    """Carry out what comes through the pipe, until it is closed."""
    rank = Rank(pipe)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("value", getattr(rank, method)(*arguments)))
        except Exception as exc:  # noqa: BLE001  told to the test
            pipe.send(("error", (type(exc).__name__, str(exc))))


class Ranks:
    """Ranks in processes of their own, as the test sees them."""

    def __init__(self, processes: Sequence[Any], pipes: Sequence[Connection]) -> None:
        self.processes, self.pipes = processes, pipes

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        self.pipes[rank].send((method, arguments))
        return self.answer(rank)

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(TIMEOUT_S)
        kind, value = self.pipes[rank].recv()
        if kind == "error":
            raise RuntimeError(": ".join(value))
        return value

    def all(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Have all carry out a method at once; each argument is a sequence, one for each rank."""
        for pipe, own in zip(
            self.pipes, zip(*arguments, strict=True) if arguments else [()] * len(self.pipes), strict=True
        ):
            pipe.send((method, own))
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def join(self, name: str, timeout: float = TIMEOUT_S) -> None:
        size = len(self.pipes)
        for rank, pipe in enumerate(self.pipes):
            pipe.send(("join", (name, rank, size, timeout)))
        endpoints = [self.answer(rank) for rank in range(size)]
        for pipe in self.pipes:
            pipe.send(endpoints)
        for rank in range(size):
            self.answer(rank)


@contextmanager
def start_ranks(count: int) -> Iterator[Ranks]:
    """Fork ranks from a process that has imported Keras, and done nothing with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=run_rank, args=(theirs,), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()
    pipes = [ours for ours, _ in pairs]
    try:
        yield Ranks(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
