"""What the actor of a rank answers when it is forked, or is a clone.

Rules
- Each answers at once, or when something has ended; none waits for a step that need not come.
- A clone takes the state in the thread of its training, so that nothing else happens to it meanwhile; its first step
  may begin before all of the state is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar, TypeVarTuple

from ....store.errors import ForkError
from ....store.refs import ModelRef
from ...collective.connect import connect
from ...collective.rendezvous import Rendezvous
from ...rpc.calls import answers
from ..training import Training
from ..versions import Versions
from .calls import ForkCalls
from .fork_hooks import ForkHooks, ForkState
from .order import ForkOrder
from .receiver import ForkReceiver

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

TOLD_S = 30.0
"""How much later than the order to train from it a clone may be told of a fork."""


class Forkable:
    """A rank's side of forks: what its actor can do beside training. The actor calls `_forkable` when it is built."""

    _where: str
    _versions: Versions
    _fork_hooks: ForkHooks | None = None
    _receiver: ForkReceiver | None = None
    """Of a clone whose first step has not begun."""
    _coming: dict[str, asyncio.Future[None]]
    """Fork -> done when this clone has begun to take its state, or has refused to."""

    def _forkable(self, training: Training, run: str, rank: int, size: int, rendezvous: Rendezvous) -> None:
        self._connect = partial(connect, rendezvous=rendezvous)
        self._forked = training
        self._coming = {}
        self._fork_hooks = ForkHooks(training, run, rank, size, self._connect)
        training.hook(self._fork_hooks)

    async def _at_boundary(self, work: Callable[[], object]) -> object:
        """Have a job carried out between two steps."""
        raise NotImplementedError

    @answers(ForkCalls.arm)
    async def arm(self, order: ForkOrder, step: int) -> None:
        self._ready().arm(order, step)

    @answers(ForkCalls.agree)
    async def agree(self, fork: str) -> None:
        fork_hooks = self._ready()
        if fork_hooks.agree(fork):
            await self._at_boundary(fork_hooks.capture)

    @answers(ForkCalls.cancel)
    async def cancel(self, fork: str, reason: str) -> None:
        self._ready().cancel(fork, reason)

    @answers(ForkCalls.fork_state)
    async def fork_state(self, fork: str, timeout: float) -> ForkState:
        state = await _in_thread(self._ready().state, fork, timeout)
        state.saved = self._versions.last
        state.told_at = time.monotonic()
        return state

    @answers(ForkCalls.adopt)
    async def adopt(self, order: ForkOrder, clone: int) -> ForkState:
        began = time.monotonic()
        coming = self._told_of(order.id)
        try:
            receiver = self._take(order, clone)
            coming.set_result(None)
        except Exception as exc:
            coming.set_exception(exc)
            coming.exception()  # it is heard here
            raise
        try:
            await _in_thread(receiver.whole, order.timeout)
        except BaseException as exc:
            receiver.fail(exc)
            raise
        return ForkState(
            step=0,
            captured=True,
            ended=True,
            error=None,
            held_s=0.0,
            began_at=began,
            captured_at=began,
            ended_at=(now := time.monotonic()),
            told_at=now,
        )

    def _take(self, order: ForkOrder, clone: int) -> ForkReceiver:
        if self._ready().busy or self._receiver is not None or self._forked.steps_done:
            raise ForkError(f"{self._where}: adopt: expected a new training; it has trained, or is part of a fork")
        self._receiver = ForkReceiver(order, clone, self._forked, self._connect)
        return self._receiver

    def _told_of(self, fork: str) -> asyncio.Future[None]:
        return self._coming.setdefault(fork, asyncio.get_running_loop().create_future())

    async def _await_adoption(self, fork: str) -> None:
        """Wait until this clone takes the state of a fork: an asynchronous actor's calls may overtake one another.

        Raises:
            ForkError: it was not told of the fork, or cannot take it.
        """
        coming = self._told_of(fork)
        await asyncio.wait([coming], timeout=TOLD_S)
        if not coming.done():
            raise ForkError(
                f"{self._where}: train: expected the order of fork {fork} within {TOLD_S} s; it was not received"
            )
        coming.result()

    @answers(ForkCalls.descend)
    async def descend(self, parent: ModelRef | None, origin: Mapping[str, object]) -> None:
        self._versions.last, self._versions.origin = parent, origin

    @property
    def _forking(self) -> str | None:
        """Id of the fork under way."""
        return self._fork_hooks.busy if self._fork_hooks is not None else None

    @property
    def _adopting(self) -> bool:
        """Whether the state of a fork is awaited, or on its way, and no step has begun."""
        return self._receiver is not None

    def _await_state(self) -> None:
        """Before the first step of a clone: wait for what comes from the ranks, and have the step wait for the rest.

        Raises:
            ForkError: the fork failed.
        """
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.received()
            self._forked.gate(receiver.wait)

    def _before_change(self) -> None:
        """Before the state is changed between two steps: what a fork still sends of it is set aside."""
        self._ready().before_update()

    def _end_forks(self, why: str) -> None:
        """Give up what is under way."""
        if self._fork_hooks is not None:
            self._fork_hooks.close()
        if self._receiver is not None:
            self._receiver.fail(ForkError(why))

    def _ready(self) -> ForkHooks:
        if self._fork_hooks is None:
            raise ForkError(f"{self._where}: expected a training that was started; found none")
        return self._fork_hooks


async def _in_thread(function: Callable[[*_Args], _T], *arguments: *_Args) -> _T:
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
