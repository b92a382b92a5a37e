"""One rank of a training as an actor: it answers while it trains.

Rules
- The training lives in one thread (`loop`); all calls answer beside it, and what touches the training waits for the
  boundary between two steps.
- A step that fails ends the train, not the actor. Where there are peers, the rank leaves its group then, so that they
  hear of it at once instead of waiting for it: what it did not finish cannot be taken up again.
- What must happen to all ranks after the same step is prepared at each of them first, for a step to come, and then
  decided: a rank that is too fast refuses, and nothing has happened.
- The actor ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...store.errors import ForkError, OperationTimeoutError, PeerLostError
from ...store.refs import ModelRef
from ..client.save.request import Saved
from ..collective.connect import connect
from ..collective.group import Group
from ..collective.rendezvous import ActorRendezvous
from ..engine.engine import Engine
from ..rpc.calls import answers
from .calls import TrainerCalls
from .fork.forkable import Forkable
from .loop import TrainingLoop
from .report import Options, RankReport, Recipe
from .training import RankContext, TensorSpec, Training
from .versions import FACTS, Versions

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""How long a step may take to end when its rank is closed."""
DECISION_S = 60.0
"""How long a rank stands still for the word whether a change is made."""
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Change:
    """What is to happen at all ranks, or at none."""

    decided: threading.Event = field(default_factory=threading.Event)
    made: bool = False
    ended: Future[Any] = field(default_factory=Future)


class TrainerActor(Forkable):
    """The process of one rank.

    Args:
        engine: what runs the ranks.
        recipe: what the training is made of.
        run: the run's name.
        group: name of the ranks' group, which no other run has.
        rank: this rank.
        size: ranks of the run.
        timeout: seconds that ranks wait for each other, at the start and in a step.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, run: str, group: str, rank: int, size: int, timeout: float
    ) -> None:
        self._engine = engine
        self._recipe = recipe
        self._run, self._rank, self._size = run, rank, size
        self._group_name, self._timeout = group, timeout
        self._where = f"rank {rank} of {run!r}"
        self._told = Options(recipe.options)
        self._rendezvous = ActorRendezvous(engine)
        self._group: Group | None = None
        self._broken: str | None = None
        """Why it left its group."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._forward: tuple[str, ...] = ()
        self._versions = Versions(recipe.repository, self._where)
        self._saving = asyncio.Lock()
        self._changes: dict[str, _Change] = {}
        self._loop = TrainingLoop(self._where, self._failed)

    # ---- life -------------------------------------------------------------------------------------------

    @answers(TrainerCalls.start)
    async def start(self) -> None:
        await self._at_boundary(self._start)

    def _start(self) -> None:
        if self._size > 1:
            self._group = connect(
                self._group_name,
                self._rank,
                self._size,
                backend=self._recipe.backend,
                timeout=self._timeout,
                rendezvous=self._rendezvous,
            )
        try:
            training = self._recipe.build(RankContext(self._run, self._rank, self._size, self._group, self._told))
            self._specs, self._forward = tuple(training.specs()), tuple(training.forward_order())
        except BaseException:
            log.exception("%s: its training could not be built", self._where)
            if self._group is not None:
                self._group.close()
            raise
        self._loop.training = training
        self._forkable(training, self._run, self._rank, self._size, self._rendezvous)

    @answers(TrainerCalls.close)
    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        for change in self._changes.values():
            change.decided.set()
        ended = self._loop.close(CLOSE_S)
        if self._group is not None:
            self._group.close()
        if not ended and not self._loop.close(CLOSE_S):
            log.info("%s: closed while a step is still running", self._where)
        self._end_forks("the rank was closed")
        if self._loop.training is not None:
            self._loop.training.close()
        self._versions.close()

    # ---- what it tells ----------------------------------------------------------------------------------

    @answers(TrainerCalls.describe)
    async def describe(self) -> RankReport:
        return RankReport(
            run=self._run,
            rank=self._rank,
            size=self._size,
            steps_done=self._loop.training.steps_done if self._loop.training is not None else 0,
            training=self._loop.busy,
            step_s=self._loop.step_s,
            losses=self._loop.steps_trained,
            specs=self._specs,
            forward_order=self._forward,
            backend=self._group.backend if self._group is not None else None,
            node=self._engine.this_node(),
            pid=os.getpid(),
            saved=self._versions.last,
            fork=self._forking,
        )

    @answers(TrainerCalls.recipe)
    async def recipe(self, options: Sequence[str]) -> Recipe:
        knows: Callable[[str], bool] | None = getattr(self._training(), "knows", None)
        told = self._recipe.options.keys() | self._told.read
        unknown = [name for name in options if name not in told and knows is not None and not knows(name)]
        if unknown:
            raise ForkError(f"{self._where}: options: expected options that the training has; found {unknown}")
        return self._recipe

    # ---- training ---------------------------------------------------------------------------------------

    @answers(TrainerCalls.announce)
    async def announce(self, train: int) -> None:
        self._loop.announce(train)

    @answers(TrainerCalls.train)
    async def train(self, steps: int, fork: str | None = None, number: int = 0) -> list[float]:
        try:
            losses = await self._begin(steps, fork)
        finally:
            self._loop.came(number)
        return await asyncio.wrap_future(losses)

    async def _begin(self, steps: int, fork: str | None) -> Future[list[float]]:
        if self._broken is not None:
            raise PeerLostError(
                f"{self._where}: train: expected connected ranks; this rank left the group after {self._broken}"
            )
        if fork is not None:
            await self._await_adoption(fork)
        if self._adopting:
            await self._at_boundary(self._await_state)
        return self._loop.run(steps)

    def _failed(self, error: BaseException) -> None:
        """Leave the peers, which would wait for what does not come."""
        log.error("%s: its training failed", self._where, exc_info=error)
        if self._group is not None:
            self._broken = f"{type(error).__name__}: {error}"
            self._group.close()

    @answers(TrainerCalls.stop)
    async def stop(self) -> None:
        self._loop.stop()

    @answers(TrainerCalls.configure)
    async def configure(self, options: Mapping[str, object]) -> None:
        await self._at_boundary(lambda: self._configure(options))

    def _configure(self, options: Mapping[str, object]) -> None:
        self._before_change()
        self._training().configure(options)
        self._recipe = replace(self._recipe, options={**self._recipe.options, **options})

    # ---- all ranks after the same step --------------------------------------------------------------------

    @answers(TrainerCalls.prepare)
    async def prepare(self, change: str, method: str, arguments: Sequence[object], step: int | None) -> bool:
        methods = {"configure": self._configure, "stop": self._loop.stop, "restore_from": self._restore}
        new = _Change()
        try:
            new.ended = self._loop.at_boundary(lambda: self._make(new, methods[method], arguments), step)
        except ValueError as exc:
            log.info("%s", exc)
            return False
        self._changes[change] = new
        return True

    def _make(self, change: _Change, method: Callable[..., object], arguments: Sequence[object]) -> object:
        if not change.decided.wait(DECISION_S):
            raise OperationTimeoutError(
                f"{self._where}: expected the decision on a change within {DECISION_S} s; it was not received"
            )
        return method(*arguments) if change.made else None

    @answers(TrainerCalls.decide)
    async def decide(self, change: str, made: bool) -> object:
        prepared = self._changes.pop(change, None)
        if prepared is None:
            if made:
                raise ValueError(f"{self._where}: expected a prepared change; found {change!r}")
            return None
        prepared.made = made
        prepared.decided.set()
        return await asyncio.wrap_future(prepared.ended) if made else None

    # ---- repository -------------------------------------------------------------------------------------

    @answers(TrainerCalls.save)
    async def save(
        self, name: str, quality: float | None = None, metadata: Mapping[str, object] | None = None
    ) -> Saved:
        if self._rank != 0 or FACTS in (metadata or {}):
            found = f"rank {self._rank}" if self._rank else f"metadata with {FACTS!r}"
            raise ValueError(f"{self._where}: save: expected rank 0 and metadata without {FACTS!r}; found {found}")
        loop = asyncio.get_running_loop()
        async with self._saving:
            await loop.run_in_executor(None, self._versions.connect)
            pending = await self._at_boundary(
                lambda: self._versions.stage(self._training(), name, quality, metadata or {})
            )
            saved: Saved = await loop.run_in_executor(None, pending.committed)
            self._versions.last = saved.ref
        return saved

    @answers(TrainerCalls.restore_from)
    async def restore_from(self, model: ModelRef | str) -> ModelRef:
        return await self._at_boundary(lambda: self._restore(model))

    def _restore(self, model: ModelRef | str) -> ModelRef:
        self._before_change()
        return self._versions.restore(self._training(), model)

    # ---- within -----------------------------------------------------------------------------------------

    async def _at_boundary(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.wrap_future(self._loop.at_boundary(work))

    def _training(self) -> Training:
        if self._loop.training is None:
            raise ValueError(f"{self._where}: expected a training that was started; found none")
        return self._loop.training
