"""Forks of a data-parallel training that runs, compared with an HDF5 file and the object store (DeepClone, section VI).

N ranks are cloned into N clones that stand by, at one step of a training. Overhead, standby and readiness are
DeepClone's measures (section VI-B).

Rules
- All ways clone one and the same training in turn. The first clone by each does not count, because it makes pages and
  compiles code that later ones find.
- Files: after the step, rank 0 writes each tensor as a dataset by h5py, without a sync; when the file is closed, all
  clones read it at the same time. Objects: after the step, each rank copies its tensors, puts all of them into Ray's
  object store at once, and notifies its clone. It replaces the paper's mpi4py.
- A clone that loads assigns into the memory into which it would receive a fork. After each way, the clones' next loss
  must be the training's after the step, bit for bit.
- A train is a few ordinary steps, the forked one, the one after it, and a few more. Notes stay in their process until
  the driver asks for them between two trains: no message is part of a step. Times are `time.time` of one machine.
- Ranks and clones share this machine's cores, unlike the paper's, which have nodes of their own.
- DenseNet-121 and ResNet-50 are their shapes, with matrix products as work, a third of them before the backward pass,
  and made-up gradients. Every tensor changes in every step, by SGD with momentum; ranks average gradients.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np

from .core.fleet import Fleet
from .core.measure import GIB, ONE_COPY, copy_floor, progress, quiet, sample
from .core.report import Effort, Goal, Report

Way = Literal["file", "objects"]
OURS, NAMES = "ours, shared", {"file": "HDF5 file", "objects": "object store"}
OPTION = "benchmark"
"""Of a training's options: a `HandOver`, `Load` or `Tell`."""
STORE_BYTES, START_TIMEOUT_S, TIMEOUT_S = 3 * GIB, 240.0, 120.0
UNCOUNTED, BEFORE, AFTER = 1, 2, 3
"""Steps of a train: one that wakes the processes up, ordinary ones before the two that count, and after."""
RESOLUTION_S = 1e-3
"""Shorter times, or negative ones because steps vary, count as this in ratios."""
STATISTICS = ("moving_mean", "moving_variance")
RATE, MOMENTUM = np.float32(1e-3), np.float32(0.9)
PRODUCT, SAMPLES = 256, 64
"""Rows and columns of the matrices that are multiplied; elements of each tensor on which the loss depends."""
LAG_BYTES = 8 << 20
"""Gradients that are being averaged while the next ones are computed."""


def run(report: Report) -> None:
    """Clone all trainings by all ways."""
    from tensorvine.clusters.local import LocalCluster

    def shaped(name: str, products: int = 800) -> Any:
        return partial(_train_shapes, made=shapes_of(name), products=products)

    dense, residual, nt3 = "DenseNet-121 shapes", "ResNet-50 shapes", "NT3, D 400 of 600"
    if report.effort is Effort.QUICK:
        plan, rounds = [(dense, shaped("DenseNet121", 50), (1,))], 1
    else:
        plan, rounds = [(dense, shaped("DenseNet121"), (1, 2, 4)), (residual, shaped("ResNet50"), (1, 4))], 3
        plan.append((nt3, partial(_train_nt3, units=400), (1, 2, 4)))
    with (
        LocalCluster(object_store_bytes=STORE_BYTES),
        Fleet(Mail, [()]) as mail,
        tempfile.TemporaryDirectory(prefix="fork-") as folder,
    ):
        for name, build_net, sizes in plan:
            for ranks in sizes:
                progress(f"{name}, {ranks} ranks")
                with closing(_Cloned(build_net, ranks, Path(folder), mail.actors[0])) as training:
                    _case(report, f"{name}, {ranks} {'ranks' if ranks > 1 else 'rank'}", training, rounds)
    report.notes.append("files are not synced and lie in the page cache; clones share the ranks' cores")


def _case(report: Report, name: str, training: _Cloned, rounds: int) -> None:
    """Clone one training by all ways, in turn, and add its row and table."""
    floor = copy_floor(training.nbytes, rounds=3)
    training.forked()
    found: dict[str, list[Measures]] = {OURS: [], **{each: [] for each in NAMES.values()}}
    for turn in range(rounds + 1):
        if turn:
            found[OURS].append(training.forked())
        for way, each in NAMES.items():
            measures = training.loaded(way)
            if turn or rounds == 1:
                found[each].append(measures)
    medians = {
        way: {part: median(getattr(each, part) for each in times) for part in asdict(times[0])}
        for way, times in found.items()
    }
    table = report.tables.setdefault("medians of each way", [])
    table += [{"case": name, "by": way, **parts} for way, parts in medians.items()]
    file, ours = NAMES["file"], medians[OURS]

    def at_least(way: str, part: str) -> Any:
        return sample([max(getattr(each, part), RESOLUTION_S) for each in found[way]])

    readiness, theirs = at_least(OURS, "readiness_s"), at_least(file, "readiness_s")
    overhead = at_least(file, "overhead_s").median / at_least(OURS, "overhead_s").median
    report.add(
        f"{name}: {OURS}",
        readiness,
        training.nbytes,
        peer=(file, theirs),
        floor=(ONE_COPY, floor),
        goals=[
            Goal("times less overhead than an HDF5 file", overhead, at_least=10),
            Goal("times sooner ready than by an HDF5 file", theirs.median / readiness.median, at_least=20),
            Goal("backward passes on standby", ours["standby_s"] / ours["backward_s"], at_most=1.25),
        ],
        headline=report.headline is None or training.nbytes >= report.headline.size_bytes,
        **ours,
    )


# ---- measures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measures:
    """One clone, by DeepClone's measures (section VI-B), in seconds."""

    overhead_s: float
    """How much slower the forked step and the next were than the others, on average; the worst rank."""
    standby_s: float
    """For how long clones had to wait for the state."""
    readiness_s: float
    """From the end of the step until the last clone had the state."""
    step_s: float
    """An ordinary step, on average; the worst rank."""
    backward_s: float = 0.0
    """From the first tensor's update until the end of the forked step; 0 if no clone receives updates."""


@dataclass(frozen=True)
class Step:
    """One step of a rank; times in seconds since the epoch."""

    number: int
    began: float
    updated: float
    """When the first tensor was updated; 0 without a fork."""
    ended: float
    """When all was computed, before the state was handed over."""
    left: float
    loss: float


@dataclass(frozen=True)
class Notes:
    """Steps of a rank or a clone; when its file or object was complete, and when it had the state, or 0."""

    steps: tuple[Step, ...]
    written: float
    ready: float


def measured(ranks: Sequence[Sequence[Step]], step: int, ready: float, standby_from: float) -> Measures:
    """Compute the measures.

    Args:
        ranks: All steps of one train, by rank.
        step: The forked one.
        ready: When the last clone had the state.
        standby_from: When clones began to wait.
    """
    counted = [steps[UNCOUNTED:] for steps in ranks]
    forked = [next(each for each in steps if each.number == step) for steps in counted]
    ordinary = [mean(s.left - s.began for s in steps if s.number not in (step, step + 1)) for steps in counted]
    two = [mean(each.left - each.began for each in steps if each.number in (step, step + 1)) for steps in counted]
    updated, ended = [each.updated for each in forked if each.updated], max(each.ended for each in forked)
    return Measures(
        overhead_s=max(slow - usual for slow, usual in zip(two, ordinary, strict=True)),
        standby_s=ready - standby_from,
        readiness_s=ready - ended,
        step_s=max(ordinary),
        backward_s=ended - min(updated) if updated else 0.0,
    )


# ---- the driver's side ------------------------------------------------------------------------------------


class _Cloned:
    """A data-parallel training in actors that is cloned by all ways."""

    def __init__(self, build_net: Any, ranks: int, folder: Path, mail: Any) -> None:
        from tensorvine.actors import start_trainers

        self._folder, self._mail, self._names, self._clones = folder, mail, count(1), None
        self._ranks = start_trainers(
            partial(build, build_net=build_net, mail=mail), ranks, timeout=START_TIMEOUT_S, backend="auto"
        )
        self._ranks.train(2)  # makes compiled steps and buffers
        self._told(self._ranks)
        self.nbytes = sum(spec.nbytes for spec in self._ranks.describe()[0].specs)

    def forked(self) -> Measures:
        """Clone it by TensorVine, into new clones."""
        from tensorvine.actors import fork

        self._end_clones()
        step, name = self._step(), f"clones-{next(self._names)}"
        with ThreadPoolExecutor(1) as pool:
            forking = pool.submit(
                fork, self._ranks, at_step=step, transport="shared", name=name, timeout=START_TIMEOUT_S
            )
            for rank in range(len(self._ranks)):
                _read(self._mail, f"standing/{name}/{rank}")
            quiet()
            losses = self._train()
            self._clones = forking.result(TIMEOUT_S)
        steps = [notes.steps for notes in self._told(self._ranks)]
        ready = max(notes.ready for notes in self._told(self._clones))
        updated = [each.updated for own in steps for each in own if each.number == step and each.updated]
        self._check(step, losses, range(len(losses)))
        return measured(steps, step, ready, min(updated))

    def loaded(self, way: Way) -> Measures:
        """Clone it by files or objects, into the existing clones."""
        clones, step = self._clones, self._step()
        key = str(self._folder / f"state-{next(self._names)}.h5")
        self._ranks.configure({OPTION: HandOver(way, step, key)})
        clones.configure({OPTION: Load(way, key)})
        clones.train_async(1)
        quiet()
        losses = self._train()
        clones.results(TIMEOUT_S)
        found = self._told(self._ranks)
        ready = max(notes.ready for notes in self._told(clones))
        written = max(notes.written for notes in found)
        Path(key).unlink(missing_ok=True)
        self._check(step, losses, range(1) if way == "file" else range(len(losses)))
        steps = [notes.steps for notes in found]
        ended = max(each.ended for own in steps for each in own if each.number == step)
        return measured(steps, step, ready, written if way == "file" else ended)

    def close(self) -> None:
        """End all."""
        self._end_clones()
        self._ranks.close()

    def _end_clones(self) -> None:
        if self._clones is not None:
            self._clones.close()
            self._clones = None

    def _step(self) -> int:
        """Return the number of the step of the next train after which it is cloned."""
        return self._ranks.describe()[0].steps_done + UNCOUNTED + BEFORE + 1

    def _train(self) -> list[list[float]]:
        return self._ranks.train(UNCOUNTED + BEFORE + 2 + AFTER, TIMEOUT_S)

    def _told(self, trainers: Any) -> list[Notes]:
        """Return the notes, by rank."""
        key = f"{trainers.name}-{next(self._names)}"
        trainers.configure({OPTION: Tell(key)})
        notes = [_read(self._mail, f"noted/{key}/{rank}") for rank in range(len(trainers))]
        _get(self._mail.clear.remote())
        return notes

    def _check(self, step: int, losses: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
        """Let the clones train a step, whose loss must be the training's after the forked one."""
        own = [each[0] for each in self._clones.train(1, TIMEOUT_S)]
        for rank in ranks:
            found, wanted = own[rank], losses[rank][UNCOUNTED + BEFORE + 1]
            if found != wanted:
                raise RuntimeError(
                    f"benchmark fork: clone {rank}: expected loss {wanted} in step {step + 1}; found {found}"
                )
        self._told(self._clones)


# ---- the actors' side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HandOver:
    """Order for a rank to hand its state over after a step; `key` is the file's path, too."""

    way: Way
    step: int
    key: str


@dataclass(frozen=True)
class Load:
    """Order for a clone to load a state instead of its next step."""

    way: Way
    key: str


@dataclass(frozen=True)
class Tell:
    """Order to send the notes and clear them."""

    key: str


class Mail:
    """Messages by key; an asynchronous actor."""

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
        """Delete all messages."""
        self._messages.clear()


def _leave(mail: Any, key: str, message: Any) -> None:
    _get(mail.post.remote(key, message))


def _read(mail: Any, key: str) -> Any:
    return _get(mail.read.remote(key))


def _get(answer: Any) -> Any:
    import ray

    return ray.get(answer, timeout=TIMEOUT_S)


def build(context: Any, build_net: Callable[[Any], Any], mail: Any) -> Any:
    """Make a rank's training."""
    import h5py as h5py  # not for the first time within a step
    from tensorvine.actors.training.training import RankContext

    own = {name: value for name, value in context.options.items() if name != OPTION}
    inner = build_net(RankContext(context.run, context.rank, context.size, context.group, own))
    return Rank(inner, context.run, context.rank, mail)


class Rank:
    """A training that notes its steps and takes the benchmark's orders; everything else is the training's."""

    def __init__(self, training: Any, run: str, rank: int, mail: Any) -> None:
        self._training, self._run, self._rank, self._mail = training, run, rank, mail
        self._specs, self._watch = training.specs(), Watch(None)
        self._order: Any = None
        self._kept: Any = None  # an object's reference
        self._steps: list[Step] = []
        self._written = self._ready = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def hook(self, hooks: Any) -> None:
        """Attach the hooks that are called in each step."""
        self._watch = Watch(hooks)
        self._training.hook(self._watch if hooks is not None else None)

    def configure(self, options: Mapping[str, Any]) -> None:
        """Take an order of the benchmark; other options are the training's."""
        others = {name: value for name, value in options.items() if name != OPTION}
        if others:
            self._training.configure(others)
        order = options.get(OPTION)
        if isinstance(order, Tell):
            notes = Notes(tuple(self._steps), self._written, self._ready)
            _leave(self._mail, f"noted/{order.key}/{self._rank}", notes)
            self._steps, self._written, self._ready, self._kept = [], 0.0, 0.0, None
        else:
            self._order = order

    def step(self) -> float:
        """Train one step, or load."""
        order, watch = self._order, self._watch
        if isinstance(order, Load):
            self._order = None
            self._load(order)
            return 0.0
        watch.updated_at = watch.ended_at = 0.0
        began = time.time()
        loss = self._training.step()
        number = self._training.steps_done
        if order is not None and order.step == number:
            self._order = None
            self._hand_over(order)
        left = time.time()
        self._steps.append(Step(number, began, watch.updated_at, watch.ended_at or left, left, loss))
        return loss

    def memory(self, name: str) -> Any:
        """Return the memory for a received tensor; notify the driver when all of it was asked for."""
        memory = self._training.memory(name)
        if name == self._specs[-1].name:
            _leave(self._mail, f"standing/{self._run}/{self._rank}", True)
        return memory

    def filled(self, name: str) -> None:
        """Note that a received tensor is complete."""
        self._training.filled(name)
        self._ready = max(self._ready, time.time())

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Note that the received facts are there."""
        self._training.restore(facts)
        self._ready = max(self._ready, time.time())

    def _hand_over(self, order: HandOver) -> None:
        if order.way == "file" and self._rank == 0:
            import h5py

            with h5py.File(order.key, "w") as file:
                for spec in self._specs:
                    file.create_dataset(spec.name, data=np.asarray(self._training.tensor(spec.name)))
                facts = json.dumps(self._training.facts()).encode()
                file.create_dataset("facts", data=np.frombuffer(facts, np.uint8))
            self._written = time.time()
            _leave(self._mail, order.key, True)
        elif order.way == "objects":
            import ray

            arrays = [np.array(self._training.tensor(spec.name)) for spec in self._specs]
            self._kept = ray.put((arrays, self._training.facts()))
            self._written = time.time()
            _leave(self._mail, f"{order.key}/{self._rank}", [self._kept])

    def _load(self, order: Load) -> None:
        if order.way == "file":
            import h5py

            _read(self._mail, order.key)
            with h5py.File(order.key, "r") as file:
                datasets: Any = file
                for spec in self._specs:
                    self._assign(spec.name, datasets[spec.name][()])
                self._training.restore(json.loads(datasets["facts"][()].tobytes()))
        else:
            (reference,) = _read(self._mail, f"{order.key}/{self._rank}")
            arrays, facts = _get(reference)
            for spec, array in zip(self._specs, arrays, strict=True):
                self._assign(spec.name, array)
            self._training.restore(facts)
        self._ready = time.time()

    def _assign(self, name: str, array: Any) -> None:
        np.copyto(self._training.memory(name), array)
        self._training.filled(name)


class Watch:
    """Hooks that note when the first tensor was updated and when the step ended; then they call a fork's hooks."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self.updated_at = self.ended_at = 0.0

    def step_begins(self, step: int) -> bool:
        """See `training.Hooks`."""
        return self._hooks is not None and self._hooks.step_begins(step)

    def before_update(self) -> None:
        """See `training.Hooks`."""
        if self._hooks is not None:
            self._hooks.before_update()

    def updated(self, name: str, array: Any, stable: bool = False) -> None:
        """See `training.Hooks`."""
        self.updated_at = self.updated_at or time.time()
        if self._hooks is not None:
            self._hooks.updated(name, array, stable)

    def step_ended(self, step: int) -> None:
        """See `training.Hooks`."""
        self.ended_at = time.time()
        if self._hooks is not None:
            self._hooks.step_ended(step)


# ---- networks ---------------------------------------------------------------------------------------------


def _train_nt3(context: Any, units: int, features: int = 6048, filters: int = 64, batch: int = 10) -> Any:
    """Train NT3 of CANDLE by Keras: a few tensors, one of which has nearly all bytes."""
    import keras
    from tensorvine.actors import KerasTraining

    from .core.networks import keras_nt3

    keras.utils.set_random_seed(7)
    model = keras_nt3(units, features, filters, seeds=(1, 2))
    model.compile(keras.optimizers.SGD(float(RATE), momentum=float(MOMENTUM)), "categorical_crossentropy")

    def batches(step: int, rank: int, size: int) -> tuple[Any, Any]:
        random = np.random.default_rng((step, rank, size))
        labels = random.integers(2, size=batch)
        profiles = random.random((batch, features, 1), dtype=np.float32) + labels[:, None, None].astype(np.float32)
        return profiles, np.eye(2, dtype=np.float32)[labels]

    return KerasTraining(context, model, batches)


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an application of Keras in the order of a forward pass.

    DenseNet-121 has 606 tensors and 8,062,504 parameters, ResNet-50 320 and 25,636,712.
    """
    import keras

    return {each.path: tuple(each.shape) for each in getattr(keras.applications, name)(weights=None).variables}


def _train_shapes(context: Any, made: dict[str, tuple[int, ...]], products: int) -> Any:
    from tensorvine.actors import NumpyTraining

    random = np.random.default_rng(7)
    weights = {name: random.random(shape, dtype=np.float32) - np.float32(0.5) for name, shape in made.items()}
    trained = [name for name in weights if not name.endswith(STATISTICS)]
    momenta = {f"momentum/{name}": np.full(made[name], 1e-4, np.float32) for name in trained}
    local = [name for name in weights if name not in trained]
    updates = [*local, *(part for name in reversed(trained) for part in (f"momentum/{name}", name))]
    work = _Work(weights, trained, products)
    return NumpyTraining(context, weights | momenta, work, parameters=trained, updates=updates, local=local)


class _Work:
    """One step: it depends on the state, the step and the rank alone, its loss on every tensor."""

    def __init__(self, weights: dict[str, Any], trained: list[str], products: int) -> None:
        self._weights, self._trained = list(weights), trained
        self._statistics = [name for name in weights if name not in trained]
        self._gradients = {name: np.ones_like(weights[name]) for name in trained}
        self._forward, self._backward = products // 3, products - products // 3
        self._left = np.random.default_rng(1).random((PRODUCT, PRODUCT), dtype=np.float32)
        self._right, self._out = self._left.T.copy(), np.empty_like(self._left)

    def __call__(self, now: Any) -> float:
        self._multiply(self._forward)
        loss = sum(float(_sample(now[name]).mean(dtype=np.float64)) for name in self._weights)
        drift = np.float32(1e-4 * (loss % 1 + now.rank) + 1e-6 * now.step)
        for name in self._statistics:
            with now.changing(name) as statistic:
                statistic += drift
        waiting: deque[str] = deque()
        lag, done, total = 0, 0, len(self._trained)
        for place, name in enumerate(reversed(self._trained), start=1):
            due = self._backward * place // total
            self._multiply(due - done)
            done = due
            gradient = self._gradients[name]
            np.multiply(now[name], np.float32(1e-2), out=gradient)
            gradient += drift
            now.reduce(name, gradient)
            waiting.append(name)
            lag += gradient.nbytes
            while waiting and (now.size == 1 or lag > LAG_BYTES):
                lag -= self._update(now, waiting.popleft())
        while waiting:
            self._update(now, waiting.popleft())
        return loss

    def _update(self, now: Any, name: str) -> int:
        gradient = now.mean(name)
        with now.changing(f"momentum/{name}") as momentum:
            momentum *= MOMENTUM
            momentum += gradient
        with now.changing(name) as weight:
            np.multiply(momentum, RATE, out=gradient)
            weight -= gradient
        return gradient.nbytes

    def _multiply(self, products: int) -> None:
        for _ in range(products):
            np.matmul(self._left, self._right, out=self._out)


def _sample(array: Any) -> Any:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // SAMPLES)]
