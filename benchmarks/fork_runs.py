"""One training that is cloned again and again, by each way in turn, and what each took by the paper's measures.

Rules
- A train is a few ordinary steps, the one that is forked, the one after it, and a few more. All processes are there
  and idle when it begins. Clones take no step before it has ended.
- Ours comes first, for it starts the clones, into which files and objects are then loaded, too.
- After each, the clones' next loss must be that of the training after the step, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from .fork_networks import Net
from .fork_ranks import OPTION, HandOver, Load, Mail, Notes, Post, Step, Tell, Way, build, noted, standing
from .quiet import quiet

if TYPE_CHECKING:
    from tensorvine.actors import Trainers

START_TIMEOUT_S = 240.0
TIMEOUT_S = 120.0
UNCOUNTED, BEFORE, AFTER = 1, 2, 3
"""Steps of a train: which wake the processes up, then ordinary ones, then, after the two that count, ordinary ones."""
Transport = Literal["shared", "gloo"]


@dataclass(frozen=True)
class Measures:
    """One clone, by DeepClone's measures (section VI-B), in seconds."""

    overhead_s: float
    """How much slower the step that is forked and the next were than the others, on average; the worst rank."""
    standby_s: float
    """How long clones had to be there without doing anything for the training."""
    readiness_s: float
    """From the end of the step until the last clone had the state."""
    step_s: float
    """An ordinary step, on average; the worst rank."""
    noise_s: float
    """How much two ordinary steps in a row differ from the others, on average."""
    backward_s: float = 0.0
    """From the first tensor's update until the end of the step that is forked; 0 where nobody was told of it."""
    cpu_s: float = 0.0
    """By how much processor time both steps took more than the others, on average; the worst rank. Unlike the overhead,
    it has no part in what else the machine does."""
    hooks_s: float = 0.0
    """Seconds in which ours held up the training's thread, in both steps; the worst rank."""


def measured(ranks: Sequence[Sequence[Step]], step: int, ready: float, standby_from: float) -> Measures:
    """Work the measures out.

    Args:
        ranks: all steps of one train, by rank.
        step: the one that was forked.
        ready: when the last clone had the state.
        standby_from: from when clones had to be there.
    """
    counted = [steps[UNCOUNTED:] for steps in ranks]
    forked = [next(each for each in steps if each.number == step) for steps in counted]
    others = [[each for each in steps if each.number not in (step, step + 1)] for steps in counted]
    updated = [each.updated for each in forked if each.updated]
    ended = max(each.ended for each in forked)
    return Measures(
        overhead_s=max(_overhead(steps, step) for steps in counted),
        standby_s=ready - standby_from,
        readiness_s=ready - ended,
        step_s=max(mean(each.seconds for each in steps) for steps in others),
        noise_s=mean(abs(_overhead(steps, each.number)) for steps in others for each in _pairs(steps)),
        backward_s=ended - min(updated) if updated else 0.0,
        cpu_s=max(_overhead(steps, step, lambda each: each.cpu_s) for steps in counted),
        hooks_s=max(sum(each.hooks_s for each in steps if each.number in (step, step + 1)) for steps in counted),
    )


def _overhead(steps: Sequence[Step], step: int, of: Callable[[Step], float] = lambda each: each.seconds) -> float:
    """Tell how much more a step and the next took than the others, on average."""
    two = [of(each) for each in steps if each.number in (step, step + 1)]
    return mean(two) - mean(of(each) for each in steps if each.number not in (step, step + 1))


def _pairs(steps: Sequence[Step]) -> list[Step]:
    """List the steps that are followed by another one."""
    numbers = {each.number for each in steps}
    return [each for each in steps if each.number + 1 in numbers]


class Training:
    """A data-parallel training in actors that is cloned by all ways.

    Args:
        net: what is trained.
        ranks: how many; it is cloned into as many.
        folder: for files.
        mail: Ray's handle of a `Mail` actor.
    """

    def __init__(self, net: Net, ranks: int, folder: Path, mail: Any) -> None:
        from tensorvine.actors import start_trainers

        self._folder = folder
        self._post = Post(mail)
        self._names = count(1)
        self._clones: Trainers | None = None
        self._ranks = start_trainers(
            partial(build, net=net, post=self._post), ranks, timeout=START_TIMEOUT_S, backend="auto"
        )
        self._ranks.train(2)  # what is made once: compiled steps, buffers
        self._told()
        report = self._ranks.describe()[0]
        self.nbytes = sum(spec.nbytes for spec in report.specs)
        self.tensors = len(report.specs)

    def forked(self, transport: Transport) -> Measures:
        """Clone it by ours, into new clones."""
        from tensorvine.actors import fork

        self._end_clones()
        step = self._step()
        name = f"clones-{next(self._names)}"
        with ThreadPoolExecutor(1) as pool:
            forking = pool.submit(
                fork, self._ranks, at_step=step, transport=transport, name=name, timeout=START_TIMEOUT_S
            )
            for rank in range(len(self._ranks)):
                self._post.read(standing(name, rank))
            quiet()
            losses = self._train()
            clones = self._clones = forking.result(TIMEOUT_S)
        steps = [notes.steps for notes in self._told()]
        ready = max(notes.ready for notes in self._told(clones))
        updated = [each.updated for own in steps for each in own if each.number == step and each.updated]
        self._check(step, losses, range(len(losses)))
        return measured(steps, step, ready, min(updated))

    def loaded(self, way: Way) -> Measures:
        """Clone it by files or objects, into the clones that are there."""
        clones = self._clones
        if clones is None:
            raise RuntimeError("benchmark fork: expected clones to load into; found none")
        step = self._step()
        key = str(self._folder / f"state-{next(self._names)}.h5")
        self._ranks.configure({OPTION: HandOver(way, step, key)})
        clones.configure({OPTION: Load(way, key)})
        clones.train_async(1)
        quiet()
        losses = self._train()
        clones.results(TIMEOUT_S)
        found = self._told()
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
        """Number the step of the next train after which it is cloned."""
        return self._ranks.describe()[0].steps_done + UNCOUNTED + BEFORE + 1

    def _train(self) -> list[list[float]]:
        """Train; gives the losses, by rank."""
        return self._ranks.train(UNCOUNTED + BEFORE + 2 + AFTER, TIMEOUT_S)

    def _told(self, trainers: Trainers | None = None) -> list[Notes]:
        """Ask for notes, by rank."""
        asked = self._ranks if trainers is None else trainers
        key = f"{asked.name}-{next(self._names)}"
        asked.configure({OPTION: Tell(key)})
        notes = [self._post.read(noted(key, rank)) for rank in range(len(asked))]
        self._post.clear()
        return notes

    def _check(self, step: int, losses: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
        """Have the clones train a step, which must be as the training's after the one that was cloned."""
        if self._clones is None:
            raise RuntimeError("benchmark fork: expected clones; found none")
        own = [each[0] for each in self._clones.train(1, TIMEOUT_S)]
        wanted = [each[UNCOUNTED + BEFORE + 1] for each in losses]
        expect_alike([own[rank] for rank in ranks], [wanted[rank] for rank in ranks], step + 1)
        self._told(self._clones)


def expect_alike(own: Sequence[float], wanted: Sequence[float], step: int) -> None:
    """Raise `RuntimeError` unless clones had the losses of their originals.

    >>> expect_alike([0.5, 0.25], [0.5, 0.25], 7)
    """
    for clone, (found, expected) in enumerate(zip(own, wanted, strict=True)):
        if found != expected:
            raise RuntimeError(f"benchmark fork: clone {clone}: expected loss {expected} in step {step}; found {found}")


@contextmanager
def mailbox() -> Iterator[Any]:
    """Start a `Mail` actor; end it."""
    import ray

    actor: Any = ray.remote(Mail).options(num_cpus=0).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)
