"""Directing one fork, from the order to the clones.

Rules
- The ranks are ordered, the clones started, and all of them waited for. Whoever fails is named; then the fork is given
  up everywhere and every clone of it is ended. The run goes on.
- Ranks take the order first, and are then told that all have, for some may hear of it late. Until then no rank goes
  beyond the step.
- A step that is given is captured even if the clones are not there yet; where none is given, the clones are started
  first, and the fork takes place at one of the next steps, or at the last one if the training ends before.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from dataclasses import dataclass
from typing import TypeVar

from ...store.errors import ForkError, OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.waiting import Backoff, Deadline
from ..engine.choice import engine_for
from ..engine.engine import Actor, Engine
from ..rpc.calls import Request
from ..rpc.channel import Answer, Channel
from .calls import RankCalls
from .fork.calls import ForkCalls
from .fork.fork_hooks import ForkState
from .fork.order import ForkOrder, PeerGoneError
from .report import RankReport, Recipe, steps_ahead
from .start import start_trainers
from .trainers import ANSWER_S, Trainers
from .training import Build

log = logging.getLogger(__name__)

_R = TypeVar("_R")

POLL_S = 20.0
"""How long one wait for a rank's or clone's end takes at most, before it is asked again."""
MARGIN_S = 0.1
"""A fork without a given step takes place so much later than it is ordered, at least."""
ROOT_S = 3.0
"""How long the reason is waited for, after somebody told no more than that another left."""
TRIES = 6
"""How often a step is chosen anew when ranks are faster than the order."""


@dataclass(frozen=True, slots=True)
class ForkReport:
    """Measurements of one fork, as defined in the DeepClone paper (section VI-B).

    Times are accurate to within the latency of one message.
    """

    id: str
    """Id of the fork."""
    run: str
    """Name of the run that was forked."""
    step: int
    """Number of the captured step. The clones received the state of the run after this step."""
    nbytes: int
    """Total size of the tensors in the training state, in bytes."""
    held_s: float
    """Longest time for which the fork blocked the training of a rank, in seconds. The slowdown of later steps during
    the transfer of the state is not included."""
    standby_s: float
    """Seconds from the start of the capture until the last clone had received the whole state. Normally, the capture
    starts when step `step` starts. If step `step` had already ended when the ranks were asked to capture their state,
    the capture starts soon after this request. If no clone was ready to receive when the capture started, the time is
    measured from the moment when the first clone was ready."""
    readiness_s: float
    """Seconds from the end of the capture, which is usually the end of step `step`, until the last clone had
    received the whole state. 0 if all clones had received the whole state before the capture ended."""


class ForkDirector:
    """One fork, from the order to the clones."""

    def __init__(
        self,
        trainers: Sequence[Actor],
        at_step: int | None,
        transport: str,
        build: Build | None,
        repository: str | None,
        timeout: float,
    ) -> None:
        self._engine: Engine = trainers.engine if isinstance(trainers, Trainers) else engine_for()
        self._trainers = list(trainers)
        self._at_step = at_step
        self._transport = transport
        self._build = build
        self._repository = repository
        """Name of the repository that the clones save to; None: the ranks'."""
        self._deadline = Deadline.after(timeout)
        self._timeout = timeout
        self._id = uuid.uuid4().hex[:8]
        self._groups: list[Trainers] = []
        self._channels: dict[tuple[int, str], Channel] = {}
        self._descends = True
        """The version that the ranks saved last is in the clones' repository."""
        try:
            self._reports = self._described()
        except TensorVineError as exc:
            if isinstance(exc, ForkError):
                raise
            raise ForkError(f"fork: expected an answer from every rank; {exc}") from exc
        self._run = self._reports[0].run

    def run(
        self,
        counts: Sequence[int],
        options: Sequence[Mapping[str, object]],
        names: Sequence[str | None],
        steps: int,
    ) -> list[Trainers]:
        """Fork, or leave nothing behind."""
        order = self._order(counts)
        try:
            if self._at_step is not None:
                self._arm(order, self._at_step)
                self._agree(order)
            self._start(counts, options, names)
            adopting = self._adopt(order, steps)
            step = self._at_step if self._at_step is not None else self._soon(order)
            self._report(order, step, *self._wait(order, adopting))
        except BaseException as exc:
            self._give_up(order, exc)
            if isinstance(exc, TensorVineError) and not isinstance(exc, ForkError):
                raise ForkError(f"fork {order.id} of {self._run!r}: {exc}") from exc
            raise
        return self._groups

    def _described(self) -> list[RankReport]:
        """Ask all ranks what they are, and check that they are one whole run."""
        reports = self._all(self._trainers, RankCalls.describe())
        first = reports[0]
        where = f"fork of {first.run!r}"
        found = sorted((report.run, report.rank) for report in reports)
        if found != [(first.run, rank) for rank in range(first.size)]:
            raise ForkError(f"{where}: expected all its {first.size} ranks, once each; found {found}")
        busy = [(report.rank, report.fork) for report in reports if report.fork]
        if busy:
            raise ForkError(
                f"{where}: expected no other fork in progress; found fork {busy[0][1]} at rank {busy[0][0]}"
            )
        past = max(report.steps_done for report in reports)
        if self._at_step is not None and self._at_step < past:
            raise ForkError(
                f"{where}: at_step: expected {past}, the last completed step, or later; found {self._at_step}"
            )
        return sorted(reports, key=lambda report: report.rank)

    def _order(self, counts: Sequence[int]) -> ForkOrder:
        first = self._reports[0]
        return ForkOrder(
            id=self._id,
            run=first.run,
            sources=first.size,
            groups=tuple(counts),
            specs=tuple(first.specs),
            forward=tuple(first.forward_order),
            transport=self._transport,
            timeout=self._timeout,
        )

    def _arm(self, order: ForkOrder, step: int) -> None:
        """Have all ranks take the order; then none begins what comes after that step before `_agree`.

        Raises:
            ForkError: it was too late for some of them.
        """
        self._all(self._trainers, RankCalls.arm(order, step))

    def _agree(self, order: ForkOrder) -> None:
        self._all(self._trainers, RankCalls.agree(order.id))

    def _soon(self, order: ForkOrder) -> int:
        """Order the fork for one of the next steps; anew, if the training stands still before it came to that step."""
        while True:
            step = self._arm_soon(order)
            if self._reports[0].own_loop or not self._stands_still(order, step):
                return step

    def _stands_still(self, order: ForkOrder, step: int) -> bool:
        """Wait until a step has ended, and return False; True as soon as no rank trains any more that could come to it.

        Between two trains ranks stand still for a moment, so it is looked for twice.
        """
        stood: int | None = None
        pauses = Backoff(MARGIN_S / 2, 1.0)
        while pauses.wait(self._deadline):
            reports = self._all(self._trainers, RankCalls.describe())
            done = max(report.steps_done for report in reports)
            if done >= step or any(report.fork != order.id for report in reports):
                return False
            training = any(report.training for report in reports)
            if not training and stood == done:
                return True
            stood = None if training else done
        return False  # the caller that waits for the step says which rank did not come to it

    def _arm_soon(self, order: ForkOrder) -> int:
        """Order the fork for one of the next steps: far enough that no rank has begun it when it hears of it."""
        margin, refused = 2, ""
        for attempt in range(TRIES):
            reports = self._all(self._trainers, RankCalls.describe())
            done = max(report.steps_done for report in reports)
            if any(report.training for report in reports):
                step = done + steps_ahead(reports, MARGIN_S * 2**attempt, margin)
            else:
                step = done
            try:
                self._arm(order, step)
            except ForkError as exc:
                log.info("fork %s: step %d was too early: %s", order.id, step, exc)
                margin, refused = 4 * margin, str(exc)
            else:
                self._agree(order)
                return step
        where = f"fork {order.id} of {self._run!r}"
        raise ForkError(f"{where}: expected a step that no rank has begun; {TRIES} steps were too early: {refused}")

    def _start(
        self, counts: Sequence[int], options: Sequence[Mapping[str, object]], names: Sequence[str | None]
    ) -> None:
        """Start the clones, all groups at once.

        Raises:
            ForkError: the ranks' training does not have an option, or a clone's refuses its value.
        """
        where = f"fork of {self._run!r}"
        recipe: Recipe | None = None
        if self._build is None:
            changes = sorted(set[str]().union(*options))
            recipe = self._channel(self._trainers[0], "a rank").call(RankCalls.recipe(changes), ANSWER_S)
            if recipe is None:
                raise ForkError(f"{where}: build: expected a function for a run with its own training loop; found None")
        else:
            recipe = Recipe(self._build)
        if self._repository is None:
            self._repository = recipe.repository
        elif self._repository != recipe.repository:
            self._descends = False
        with ThreadPoolExecutor(len(counts)) as pool:
            starting = [
                pool.submit(
                    start_trainers,
                    recipe.build,
                    size,
                    name=name or f"{self._run}-{self._id[:4]}{f'-{place}' if len(counts) > 1 else ''}",
                    options={**recipe.options, **changed},
                    backend=recipe.backend,
                    repository=self._repository,
                    cpus=recipe.cpus,
                    gpus=recipe.gpus,
                    timeout=self._deadline.left(),
                    engine=self._engine,
                )
                for place, (size, changed, name) in enumerate(zip(counts, options, names, strict=True))
            ]
            wait_all(starting)
        self._groups = [started.result() for started in starting if started.exception() is None]
        for started, changed in zip(starting, options, strict=True):
            error = started.exception()
            if changed and isinstance(error, ValueError):
                raise ForkError(f"{where}: {error}") from error
            started.result()

    @property
    def _clones(self) -> list[Actor]:
        return [clone for group in self._groups for clone in group]

    def _adopt(self, order: ForkOrder, steps: int) -> list[Answer[ForkState]]:
        """Have the clones take what comes."""
        adopting = [
            self._channel(clone, f"clone {place} of {self._run!r}").send(ForkCalls.adopt(order, place))
            for place, clone in enumerate(self._clones)
        ]
        if steps:
            for group in self._groups:
                group.train_async(steps, order.id)
        return adopting

    def _wait(self, order: ForkOrder, adopting: Sequence[Answer[ForkState]]) -> tuple[list[ForkState], list[ForkState]]:
        """Wait until all is sent, and all clones are whole; the first failure ends it."""
        waits: list[Callable[[], ForkState]] = []
        for rank, trainer in enumerate(self._trainers):
            waits.append(lambda t=trainer, r=rank: self._sent(order, t, f"rank {r} of {self._run!r}"))
        waits += [lambda a=answer: a.result(self._deadline.left() + ANSWER_S).heard() for answer in adopting]
        pool = ThreadPoolExecutor(len(waits))
        try:
            pending = [pool.submit(wait) for wait in waits]
            wait_all(pending, self._deadline.left() + ANSWER_S, FIRST_EXCEPTION)
            deadline = Deadline.after(ROOT_S)
            while failed := [error for future in pending if future.done() and (error := future.exception())]:
                waiting = [future for future in pending if not future.done()]
                left = deadline.left()
                if not waiting or left <= 0 or not all(isinstance(error, PeerGoneError) for error in failed):
                    raise _root(failed)
                wait_all(waiting, left, FIRST_COMPLETED)
            states = [future.result(0) for future in pending]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return states[: len(self._trainers)], states[len(self._trainers) :]

    def _sent(self, order: ForkOrder, trainer: Actor, who: str) -> ForkState:
        rank = self._channel(trainer, who)
        while True:
            left = self._deadline.left()
            wait = min(left, POLL_S)
            state = rank.call(RankCalls.fork_state(order.id, wait), wait + ANSWER_S).heard()
            if state.error is not None:
                raise (PeerGoneError if state.peer_gone else ForkError)(state.error)
            if state.ended:
                return state
            if left <= 0:
                raise OperationTimeoutError(
                    f"{who}: expected it to send its state within {self._timeout} s; "
                    + ("the clones did not receive all of it" if state.captured else f"step {state.step} did not end")
                )

    def _report(self, order: ForkOrder, step: int, sent: Sequence[ForkState], whole: Sequence[ForkState]) -> None:
        """Tell how it went, and tell the clones whom they descend from."""
        captured, ready = max(state.captured_at for state in sent), max(state.ended_at for state in whole)
        report = ForkReport(
            order.id,
            order.run,
            step,
            sum(spec.nbytes for spec in order.specs),
            max(state.held_s for state in sent),
            max(ready - max(max(state.began_at for state in sent), min(state.began_at for state in whole)), 0.0),
            max(ready - captured, 0.0),
        )
        origin = {"fork": order.id, "run": order.run, "step": step}
        self._all(self._clones, ForkCalls.descend(sent[0].saved if self._descends else None, origin))
        for group in self._groups:
            group.report = report

    def _give_up(self, order: ForkOrder, why: BaseException) -> None:
        """End what was begun; who does not answer any more is left out."""
        for group in self._groups:
            group.close()
        for trainer in self._trainers:
            try:
                self._channel(trainer, "a rank").call(RankCalls.cancel(order.id, str(why)), ANSWER_S)
            except TensorVineError as exc:
                log.info("fork %s: a rank could not be notified of its cancellation: %s", order.id, exc)

    def _channel(self, actor: Actor, who: str) -> Channel:
        key = (id(actor), who)
        if key not in self._channels:
            self._channels[key] = Channel(self._engine, who, actor=actor)
        return self._channels[key]

    def _all(self, actors: Sequence[Actor], request: Request[_R]) -> list[_R]:
        """Ask all at once."""
        asked = [self._channel(actor, f"fork: rank {place}").send(request) for place, actor in enumerate(actors)]
        answers: list[_R] = []
        failed: list[BaseException] = []
        for answer in asked:
            try:
                answers.append(answer.result(ANSWER_S))
            except TensorVineError as exc:
                failed.append(exc)
        if failed:
            raise _root(failed)
        return answers


def _root(failed: Sequence[BaseException]) -> BaseException:
    """Choose the failure that tells most: who died, then who had a reason, then who noticed that another left."""

    def rank(error: BaseException) -> tuple[bool, bool]:
        return (not isinstance(error, ShardUnavailableError), isinstance(error, PeerGoneError))

    return min(failed, key=rank)
