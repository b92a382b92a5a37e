"""What `fork` adds to a rank: it notes when steps begin and end, and hands the state over as others do it.

Rules
- Files: after the step, rank 0 writes each tensor as a dataset by h5py, as Keras' `save_weights` does, without a sync;
  when the file is closed, all clones hear of it and read it at the same time. All get rank 0's state.
- Objects: after the step, each rank copies its tensors, as Keras' `get_weights` does, puts all of them into Ray's
  object store at once, and tells its clone, which assigns them. It stands where the paper's mpi4py is.
- A clone that loads assigns into the memory into which it would receive a fork.
- Notes stay where they are made until somebody asks for them between two trains: no message is part of a step.
- Times are `time.time` of one machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tensorvine.actors.training.training import Hooks, RankContext, Training

from .fork_networks import Net

TIMEOUT_S = 120.0
OPTION = "benchmark"
"""Of a training's options: a `HandOver`, `Load` or `Tell`."""
Way = Literal["file", "objects"]


@dataclass(frozen=True)
class HandOver:
    """Have a rank hand its state over after a step."""

    way: Way
    step: int
    key: str
    """By which its clones hear of it; for files the path, too."""


@dataclass(frozen=True)
class Load:
    """Have a clone load what is handed over, in place of its next step."""

    way: Way
    key: str


@dataclass(frozen=True)
class Tell:
    """Have a rank or a clone tell what it noted, and forget it."""

    key: str


@dataclass(frozen=True)
class Step:
    """One step of a rank; times in seconds since the epoch."""

    number: int
    began: float
    updated: float
    """When a fork was told of its first tensor; 0 where none was."""
    ended: float
    """When all was computed, before the state was handed over."""
    left: float
    """When the rank went on."""
    hooks_s: float
    """Seconds in what a fork does within the step."""
    cpu_s: float
    """Processor time of the rank's process, all threads."""
    loss: float

    @property
    def seconds(self) -> float:
        """How long the rank was at it."""
        return self.left - self.began


@dataclass(frozen=True)
class Notes:
    """What a rank or a clone noted."""

    steps: tuple[Step, ...]
    written: float
    """When its file, or its object, was complete; 0 where there was none."""
    ready: float
    """When a clone had all of the state; 0 where it got none."""


class Mail:
    """Messages by key, for whoever asks; an asynchronous actor."""

    def __init__(self) -> None:
        import asyncio

        self._messages: dict[str, Any] = {}
        self._changed = asyncio.Condition()

    async def post(self, key: str, message: Any) -> None:
        """Leave a message."""
        async with self._changed:
            self._messages[key] = message
            self._changed.notify_all()

    async def read(self, key: str) -> Any:
        """Wait for a message."""
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._messages)
            return self._messages[key]

    async def clear(self) -> None:
        """Forget all messages."""
        self._messages.clear()


class Post:
    """Who leaves and reads messages.

    Args:
        mail: Ray's handle of the `Mail` actor.
    """

    def __init__(self, mail: Any) -> None:
        self._mail = mail

    def leave(self, key: str, message: Any) -> None:
        """Leave a message."""
        self._get(self._mail.post.remote(key, message))

    def read(self, key: str) -> Any:
        """Wait for a message."""
        return self._get(self._mail.read.remote(key))

    def clear(self) -> None:
        """Forget all messages."""
        self._get(self._mail.clear.remote())

    def _get(self, answer: Any) -> Any:
        import ray

        return ray.get(answer, timeout=TIMEOUT_S)


def standing(run: str, rank: int) -> str:
    """Return the key under which a clone tells that it has the memory to receive a fork."""
    return f"standing/{run}/{rank}"


def noted(key: str, rank: int) -> str:
    """Return the key under which a rank tells its notes."""
    return f"noted/{key}/{rank}"


def object_of(key: str, rank: int) -> str:
    """Return the key of a rank's object."""
    return f"{key}/{rank}"


def build(context: RankContext, net: Net, post: Post) -> Any:
    """Make a rank's training; gives a `training.Training`."""
    import h5py as h5py  # not for the first time within a step

    own = {name: value for name, value in context.options.items() if name != OPTION}
    inner = net.build(RankContext(context.run, context.rank, context.size, context.group, own))
    return Rank(inner, context.run, context.rank, post)


class Rank:
    """A training that notes what it does; what it does not have itself is the training's.

    Args:
        training: what is trained.
        run: the run's name.
        rank: its rank.
        post: where messages are left.
    """

    def __init__(self, training: Training, run: str, rank: int, post: Post) -> None:
        self._training, self._run, self._rank, self._post = training, run, rank, post
        self._specs = training.specs()
        self._watch = Watch(None)
        self._order: HandOver | Load | None = None
        self._kept: Any = None
        """What holds an object."""
        self._steps: list[Step] = []
        self._written = self._ready = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def hook(self, hooks: Hooks | None) -> None:
        """Attach what is called in each step."""
        self._watch = Watch(hooks)
        self._training.hook(self._watch if hooks is not None else None)

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take an order of the benchmark's; other options are the training's."""
        others = {name: value for name, value in options.items() if name != OPTION}
        if others:
            self._training.configure(others)
        order = options.get(OPTION)
        if isinstance(order, Tell):
            self._post.leave(noted(order.key, self._rank), Notes(tuple(self._steps), self._written, self._ready))
            self._steps, self._written, self._ready, self._kept = [], 0.0, 0.0, None
        else:
            self._order = order

    def step(self) -> float:
        """Train one step, or load."""
        order = self._order
        if isinstance(order, Load):
            self._order = None
            self._load(order)
            return 0.0
        watch = self._watch
        watch.begin()
        began, cpu = time.time(), time.process_time()
        loss = self._training.step()
        number = self._training.steps_done
        if order is not None and order.step == number:
            self._order = None
            self._hand_over(order)
        left, cpu = time.time(), time.process_time() - cpu
        ended = watch.ended_at or left
        self._steps.append(Step(number, began, watch.updated_at, ended, left, watch.hooks_s, cpu, loss))
        return loss

    def memory(self, name: str) -> Any:
        """Return the memory that a fork's tensor is received into; tells when all was asked for."""
        memory = self._training.memory(name)
        if name == self._specs[-1].name:
            self._post.leave(standing(self._run, self._rank), True)
        return memory

    def filled(self, name: str) -> None:
        """Note that a fork's tensor is whole."""
        self._training.filled(name)
        self._ready = max(self._ready, time.time())

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Note that a fork's facts are there."""
        self._training.restore(facts)
        self._ready = max(self._ready, time.time())

    # ---- as others do it --------------------------------------------------------------------------------

    def _hand_over(self, order: HandOver) -> None:
        if order.way == "file" and self._rank == 0:
            self._write(order.key)
            self._written = time.time()
            self._post.leave(order.key, True)
        elif order.way == "objects":
            import ray

            arrays = [np.array(self._training.tensor(spec.name)) for spec in self._specs]
            self._kept = ray.put((arrays, self._training.facts()))
            self._written = time.time()
            self._post.leave(object_of(order.key, self._rank), [self._kept])

    def _write(self, path: str) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for spec in self._specs:
                file.create_dataset(spec.name, data=np.asarray(self._training.tensor(spec.name)))
            facts = json.dumps(self._training.facts()).encode()
            file.create_dataset("facts", data=np.frombuffer(facts, np.uint8))

    def _load(self, order: Load) -> None:
        if order.way == "file":
            self._post.read(order.key)
            self._read(order.key)
        else:
            import ray

            (reference,) = self._post.read(object_of(order.key, self._rank))
            arrays, facts = ray.get(reference, timeout=TIMEOUT_S)
            for spec, array in zip(self._specs, arrays, strict=True):
                self._assign(spec.name, array)
            self._training.restore(facts)
        self._ready = time.time()

    def _read(self, path: str) -> None:
        import h5py

        with h5py.File(path, "r") as file:
            datasets: Any = file
            for spec in self._specs:
                self._assign(spec.name, datasets[spec.name][()])
            self._training.restore(json.loads(datasets["facts"][()].tobytes()))

    def _assign(self, name: str, array: Any) -> None:
        np.copyto(self._training.memory(name), array)
        self._training.filled(name)


class Watch:
    """Hooks that note how long those of a fork take.

    Args:
        hooks: those; None: there are none.
    """

    def __init__(self, hooks: Hooks | None) -> None:
        self._hooks = hooks
        self.begin()

    def begin(self) -> None:
        """Forget what was noted of the step before."""
        self.updated_at = self.ended_at = self.hooks_s = 0.0

    def step_begins(self, step: int) -> bool:
        """See `training.Hooks`."""
        return self._hooks is not None and self._hooks.step_begins(step)

    def before_update(self) -> None:
        """See `training.Hooks`."""
        began = time.perf_counter()
        if self._hooks is not None:
            self._hooks.before_update()
        self.hooks_s += time.perf_counter() - began

    def updated(self, name: str, array: Any, stable: bool = False) -> None:
        """See `training.Hooks`."""
        self.updated_at = self.updated_at or time.time()
        began = time.perf_counter()
        if self._hooks is not None:
            self._hooks.updated(name, array, stable)
        self.hooks_s += time.perf_counter() - began

    def step_ended(self, step: int) -> None:
        """See `training.Hooks`."""
        self.ended_at = time.time()
        began = time.perf_counter()
        if self._hooks is not None:
            self._hooks.step_ended(step)
        self.hooks_s += time.perf_counter() - began
