"""What a training holds to hand its model over: it decides when, publishes, and measures (Viper, section 4.2).

Rules
- A step that publishes nothing sends no message and copies nothing: it looks an iteration up. A thread tells the
  planner what was observed, and takes its plans.
- A step that publishes waits for one memory copy, unless it is synchronous; the commit goes on behind.
- An update that is due while the one before is under way is made at a later step: nothing queues, and training waits
  for no consumer and no disk.
- Each update that was begun ends either among the updates or as a failure, which is logged and counted. Training goes
  on: the next update may succeed.
- Both threads hold the lock while they change shared state: the trigger, the update under way, and all records.
- Records of losses and updates are bounded; the newest are kept.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from ...store import traces
from ...store.errors import ModelLostError, ModelNotFoundError, OptionError, TensorVineError
from ...store.metrics import COMMIT, PAUSE
from ...store.refs import ModelRef, check_name
from ..client.repository import Repository
from ..client.save.pending import PendingSave
from ..engine.opened import Opened
from ..planner.calls import PlannerCalls
from ..planner.streams import Advice, Observed
from ..rpc.messages import check_transport
from .published import PublishReport, Told, Update
from .source import Source
from .trigger import ScheduleLike, Trigger, trigger_of

if TYPE_CHECKING:
    from .fitting import FitCallback

log = logging.getLogger(__name__)

_Record = TypeVar("_Record")

TELL_S = 0.2
"""How often the planner is told."""
PLANNER_TIMEOUT_S = 10.0
COMMIT_TIMEOUT_S = 60.0
KEPT_IN_MEMORY = 2
"""Versions that stay where the repository has no path to keep a history on."""
KEPT_LOSSES = 1 << 16
KEPT_UPDATES = 1 << 12
"""Losses and updates that a report has, at most."""


@dataclass(slots=True)
class _UnderWay:
    """An update that is not committed yet."""

    pending: PendingSave
    iteration: int
    loss: float | None
    stall_s: float
    staged_at: float
    """When training went on."""
    beside_s: float = 0.0
    """What the steps since then took, those that began before its end."""
    steps: int = 0
    """How many these are."""
    over: bool = False
    """It ended during the last of them."""


class Publisher:
    """A publisher of new versions of a model, for use in a training loop.

    Call `step` after each iteration. If an update is due, `step` publishes a version. By default, an update blocks the
    training for one memory copy only, and the version is committed in the background. If the previous update is still
    in progress, the new update is made at a later step. If an update fails, the failure is logged and counted, and the
    training continues. Each new plan (see `schedule`) is logged at level INFO of the logger `tensorvine`.

    Args:
        repo: The repository.
        name: Name of the model.
        schedule: The iterations after which versions are published:

            - the name of a method ("optimal", "closed_form", "fixed", "greedy"), or None for "optimal": the iterations
              of a plan. The plan is computed from the losses and the measured costs of updates. The first version is
              published at the end of a warm-up. A plan does not always include the last iteration: to publish the final
              state, call `publish`.
            - a `PlanRequest`: the iterations of a plan that is computed with the options of the `PlanRequest`.
            - an int n: every nth iteration.
            - "epoch": the last iteration of each epoch. Call `expect(epoch=...)` before the first step.
            - a `Schedule`, or a collection of iterations: the given iterations.

        warmup: Number of iterations before the first plan is made (the warm-up). Defaults to `PlanRequest.warmup`, or
            50 without a `PlanRequest`.
        transport: With "files", a version is committed after it is written to the repository's path (Viper-PFS). With
            any other transport, a version is committed in memory, and later written to the path, if there is one.
        synchronous: Whether an update blocks the training until the version is committed (Viper-Sync).
        keep: Number of this publisher's newest versions to keep. Older versions of this publisher are retired. None
            keeps all versions if the repository has a path, and otherwise 2 versions.

    Raises:
        ValueError: if an argument is invalid.
        InvalidNameError: if the name is malformed.

    >>> with Repository.start() as repo, Publisher(repo, "net", schedule=100) as publisher:   # doctest: +SKIP
    ...     for iteration, batch in enumerate(batches, start=1):
    ...         loss = train_step(net, batch)
    ...         publisher.step(loss, net)
    """

    def __init__(
        self,
        repo: Repository,
        name: str,
        schedule: ScheduleLike = None,
        *,
        warmup: int | None = None,
        transport: str = "auto",
        synchronous: bool = False,
        keep: int | None = None,
    ) -> None:
        self.name = check_name(name)
        self._opened = Opened(f"publisher of {name!r}")
        self._repo = repo
        self._trigger: Trigger = trigger_of(schedule, f"publisher of {name!r}", warmup)
        if keep is not None and keep < 1:
            raise ValueError(f"publisher of {name!r}: keep: expected at least 1 version; found {keep}")
        self._keep = keep if keep is not None or repo.has_path else KEPT_IN_MEMORY
        self._synchronous = synchronous
        check_transport(transport, f"publisher of {name!r}")
        self._durability = "disk" if transport == "files" else "memory"
        self._source: Source | None = None
        self._iteration = 0
        self._left_at: float | None = None
        self._owed = False
        self._under_way: _UnderWay | None = None
        self._lock = threading.Lock()
        """Guards what both threads change. Held for moments only."""
        self._telling = threading.Lock()
        """Held while the planner is told: one thread at a time tells it what it does not know."""
        self._updates: deque[Update] = deque(maxlen=KEPT_UPDATES)
        self._updated = 0
        """Updates since the publisher was made."""
        self._failed = 0
        self._losses: deque[tuple[int, float]] = deque(maxlen=KEPT_LOSSES)
        self._stepped = 0
        """Losses since the publisher was made."""
        self._steps_s: deque[float] = deque(maxlen=4096)
        """Of plain steps that the planner was not told of."""
        self._plain_s: deque[float] = deque(maxlen=64)
        """Of the last plain steps: those with no update beside them."""
        self._told = Told()
        self._run = uuid.uuid4().hex[:16]
        self._advice = Advice(0)
        self._said = ""
        """The plan that was logged last."""
        self._kept: deque[ModelRef] = deque()
        self._unretired: ModelRef | None = None
        """The version whose retirement failed last."""
        self._closing = threading.Event()
        self._now = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- training -------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Number of the last iteration that `step` recorded. 0 before the first call of `step`."""
        return self._iteration

    def expect(self, *, stop: int | None = None, epoch: int | None = None) -> None:
        """Set the last iteration of the training run, the number of iterations per epoch, or both.

        Args:
            stop: Number of the last iteration. Plans use this number if the `PlanRequest` does not set `stop`.
            epoch: Number of iterations per epoch, for the schedule "epoch".

        Raises:
            ClosedError: if the publisher is closed, or this is a forked child of the process that created it.
        """
        self._opened.check()
        with self._lock:
            self._trigger = self._trigger.told(stop, epoch)

    def step(self, loss: float, model: object, iteration: int | None = None) -> bool:
        """Record the end of a training iteration, and publish a version if an update is due.

        If the update fails with a `TensorVineError`, the failure is logged and counted, and no exception is raised.

        Args:
            loss: Loss of the iteration. If the loss is on a GPU, reading it makes the training loop wait for the GPU.
                To avoid this wait in most iterations, call `step` only every few iterations, and pass `iteration`.
            model: The model: a Keras model, a torch module, a mapping of names to arrays, or a callable that returns
                one of these.
            iteration: Number of the iteration. Defaults to the previous number plus 1. Numbers can be skipped. If an
                update was due at a skipped iteration, the update is made at this iteration.

        Returns:
            Whether the call started an update.

        Raises:
            ValueError: if `iteration` is not greater than the previous number, or the schedule is "epoch" and
                `expect(epoch=...)` was not called.
            ClosedError: if the publisher is closed, or this is a forked child of the process that created it.
        """
        self._opened.check()
        now = time.perf_counter()
        if self._trigger.each_epoch:
            raise ValueError(
                f"publisher of {self.name!r}: schedule 'epoch': expected a call of expect(epoch=...) first"
            )
        at = self._iteration + 1 if iteration is None else iteration
        if at <= self._iteration:
            raise ValueError(f"publisher of {self.name!r}: expected an iteration after {self._iteration}; found {at}")
        if self._left_at is not None:
            self._took((now - self._left_at) / (at - self._iteration), at - self._iteration)
        self._start()
        with self._lock:
            due, self._owed = self._trigger.due(self._iteration, at) or self._owed, False
            self._iteration = at
            self._losses.append((at, float(loss)))
            self._stepped += 1
        busy = due and self._is_under_way()
        if busy:
            with self._lock:
                self._owed = True
        elif due:
            self._publish_gently(model, float(loss))
        self._left_at = time.perf_counter()
        return due and not busy

    @traces.traced("publish")
    def publish(self, model: object, loss: float | None = None) -> PendingSave:
        """Publish a version now, regardless of the schedule.

        If an update is in progress, this method first waits for the end of that update. It then returns after one
        memory copy or, if the publisher is synchronous, after the commit.

        Args:
            model: The model, as in `step`.
            loss: Loss of the last iteration. The loss is stored in the version's metadata, and the quality is `-loss`.

        Returns:
            The save of the version. The save can still be in progress.

        Raises:
            ClosedError: if the publisher is closed, or this is a forked child of the process that created it.
            TensorVineError: the errors of `Repository.save_async`. The failure is also counted in the report.
        """
        self._opened.check()
        traces.note(model=self.name, iteration=self._iteration)
        self._start()
        self._settle(wait=True)
        begun = time.perf_counter()
        try:
            pending = self._submit(model, loss)
        except Exception as exc:
            self._count_failure(self._iteration, exc)
            raise
        ended = time.perf_counter()
        with self._lock:
            self._under_way = _UnderWay(pending, self._iteration, loss, ended - begun, ended)
        self._settle(wait=False)
        self._now.set()
        return pending

    def _submit(self, model: object, loss: float | None) -> PendingSave:
        if self._source is None or not self._source.is_of(model):
            self._source = Source(model)
        tensors = self._source.tensors(model)
        return self._repo._submit(
            self.name,
            tensors,
            self._source.graph,
            recipe=self._source.recipe,
            quality=-loss if loss is not None else None,
            metadata={"iteration": self._iteration, "loss": _plain(loss)},
            durability=self._durability,
            timeout=COMMIT_TIMEOUT_S,
            until="committed" if self._synchronous else "staged",
        )

    def report(self) -> PublishReport:
        """Return a report on the updates made so far. The method can also be called after `close`."""
        self._opened.check_process()
        self._settle(wait=False)
        with self._lock:
            advice, trigger = self._advice, self._trigger
            return PublishReport(
                tuple(self._updates),
                self._failed,
                tuple(self._losses),
                advice.schedule or trigger.schedule,
                advice.curve,
                advice.costs,
            )

    def callback(self) -> FitCallback:
        """Return a Keras callback that passes the loss of each batch to this publisher, for use in `model.fit`."""
        from .fitting import FitCallback

        return FitCallback(self)

    def finish(self) -> None:
        """Wait for the end of the last update, then retire old versions as specified by `keep`."""
        self._opened.check()
        self._settle(wait=True)
        self._retire()
        if self._thread is not None:
            self._tell()

    @property
    def is_closed(self) -> bool:
        """Whether the publisher is closed. Always true in a forked child of the process that created the publisher."""
        return self._opened.closed

    def close(self) -> None:
        """Wait for the end of the last update, stop the background thread, and retire old versions as `keep` specifies.

        Does nothing if the publisher is already closed, or in a forked child process. If the call is interrupted, call
        `close` again.
        """
        if self._opened.closed:
            return
        self._settle(wait=True)
        self._closing.set()
        self._now.set()
        if self._thread is not None:
            self._thread.join(PLANNER_TIMEOUT_S)
        self._retire()
        self._opened.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._closing.is_set() else ""
        return f"Publisher({self.name!r}, iteration {self._iteration}, {self._updated} updates{closed})"

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- updates --------------------------------------------------------------------------------------

    def _took(self, seconds: float, steps: int) -> None:
        """Take what each of the last few steps took: plain ones, or some beside an update."""
        update = self._under_way
        if update is None or update.over:
            self._steps_s.append(seconds)
            self._plain_s.append(seconds)
            return
        update.beside_s += seconds * steps
        update.steps += steps
        update.over = update.pending.done()

    def _publish_gently(self, model: object, loss: float) -> None:
        with suppress(TensorVineError):  # it was logged and counted
            self.publish(model, loss)

    def _count_failure(self, iteration: int, exc: BaseException) -> None:
        self._repo._session.counts.failed("publish", exc)
        with self._lock:
            self._failed += 1
        log.warning(
            "update of %r at iteration %d failed; the training continues, and the next update is made as planned: %s",
            self.name,
            iteration,
            exc,
        )

    def _is_under_way(self) -> bool:
        self._settle(wait=False)
        return self._under_way is not None

    def _settle(self, *, wait: bool) -> None:
        """Record how the update under way ended. Return at once if it goes on, unless `wait`."""
        with self._lock:
            update = self._under_way
            if update is None or not (wait or update.pending.done()):
                return
        try:
            saved = update.pending.committed(COMMIT_TIMEOUT_S)
        except Exception as exc:  # noqa: BLE001  a save hands over any error; it is counted
            if self._take(update):
                self._count_failure(update.iteration, exc)
            return
        if not self._take(update):
            return
        commit_s = max(update.pending.ended_at - update.staged_at, 0.0)
        at = time.time() - (time.perf_counter() - update.pending.ended_at)
        plain_s = median(self._plain_s) if self._plain_s else 0.0
        slowed_s = update.beside_s - update.steps * plain_s if self._plain_s else 0.0
        costs = (update.stall_s, slowed_s, commit_s)
        self._repo._session.counts.observe(PAUSE, update.stall_s)
        self._repo._session.counts.observe(COMMIT, commit_s)
        made = Update(update.iteration, saved.ref, update.loss, *costs, saved.bytes_written, at)
        with self._lock:
            self._updates.append(made)
            self._updated += 1
            self._kept.append(saved.ref)

    def _take(self, update: _UnderWay) -> bool:
        """Remove `update` from under way. Return False if the other thread did so before."""
        with self._lock:
            if self._under_way is not update:
                return False
            self._under_way = None
            return True

    # ---- beside the training --------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._beside, name="tensorvine-publish", daemon=True)
            self._thread.start()

    def _beside(self) -> None:
        while not self._closing.is_set():
            self._now.wait(TELL_S)
            self._now.clear()
            self._settle(wait=False)
            self._retire()
            self._tell()

    def _retire(self) -> None:
        """Retire the versions that are not kept. One whose shard does not answer stays queued for the next round."""
        while self._keep is not None:
            with self._lock:
                if len(self._kept) <= self._keep:
                    return
                ref = self._kept.popleft()
            try:
                self._repo.retire(ref)
            except (ModelNotFoundError, ModelLostError, OptionError) as exc:
                log.info("version %s no longer exists, or an alias names it, so it is not retired: %s", ref, exc)
            except TensorVineError as exc:
                with self._lock:
                    self._kept.appendleft(ref)
                    failed_before, self._unretired = self._unretired == ref, ref
                if not failed_before:
                    log.info("version %s could not be retired, retrying: %s", ref, exc)
                return

    def _tell(self) -> None:
        """Tell the planner what it does not know, and take its plan; without it the schedule stands as it is."""
        with self._telling:
            self._tell_once()

    def _tell_once(self) -> None:
        told = self._untold()
        try:
            planner = self._repo._session.planner
            advice = planner.call(PlannerCalls.observed(self.name, told), PLANNER_TIMEOUT_S)
        except TensorVineError as exc:
            self._told.silent(self.name, exc)
            return
        self._told.heard(advice.known, told)
        if advice.known != told.place + len(told.losses):
            self._now.set()  # it started again: tell all
            return
        self._say(advice)
        with self._lock:
            self._advice = advice
            if advice.schedule is not None and self._trigger.schedule != advice.schedule:
                self._trigger = self._trigger.planned(advice.schedule)
                last = self._updates[-1].iteration if self._updates else 0
                self._owed |= any(last < iteration <= self._iteration for iteration in advice.schedule.iterations)

    def _say(self, advice: Advice) -> None:
        """Log a plan, unless it was logged before."""
        if advice.schedule is None:
            return
        said, chosen = f"no update: {advice.why}", advice.schedule.iterations
        if chosen:
            said = f"updates after {len(chosen)} iterations, from {chosen[0]} to {chosen[-1]}"
        if said != self._said:
            self._said = said
            log.info("plan for %r: %s", self.name, said)

    def _untold(self) -> Observed:
        with self._lock:
            losses = _newest(self._losses, self._stepped - self._told.losses)
            updates = _newest(self._updates, self._updated - self._told.updates)
            self._told.losses = self._stepped - len(losses)
            request = self._trigger.request
        steps = [self._steps_s.popleft() for _ in range(len(self._steps_s))]
        return Observed(
            self._run,
            request,
            self._told.place,
            losses,
            (sum(steps) / len(steps),) if steps else (),
            tuple((u.iteration, max(u.stall_s + u.slowed_s, 0.0), u.commit_s) for u in updates),
        )


def _newest(records: deque[_Record], count: int) -> tuple[_Record, ...]:
    """Return the newest `count` records, or as many as are kept, oldest first."""
    return tuple(islice(reversed(records), count))[::-1]


def _plain(loss: float | None) -> float | None:
    """Return a loss as JSON has it: NaN and infinity, which it has not, as none."""
    return float(loss) if loss is not None and math.isfinite(loss) else None
