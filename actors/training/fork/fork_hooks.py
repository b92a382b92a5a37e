"""The hooks of a rank's fork: where it takes orders to fork, and where its training tells what it does.

Rules
- One fork at a time. An order for a step that has begun, or is past, is refused, and so is one of another state.
- All ranks agree on the step: each takes the order first, and then hears that all have (`agree`). A training that comes
  to the step before that stands still there for so long. Else a rank that hears of the order late would be captured
  after another step than the others.
- While nothing is ordered, a step costs the training a lock that nobody holds.
- A fork that fails is told to the caller, and logged; it never fails the training.
- A training that comes to its end sends what was captured of it first, and tells so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from ....store.errors import ForkError, PeerLostError
from ....store.refs import ModelRef
from ....store.waiting import Deadline
from ..training import Training
from .order import ForkOrder
from .sender import Connect, ForkSender

log = logging.getLogger(__name__)

KEPT = 16
"""Forks whose end is remembered."""
TOLD_S = 5.0
"""How long a training that has ended waits for the caller of `fork` to hear that all was sent."""


@dataclass(slots=True, kw_only=True)
class ForkState:
    """How a fork goes, as one rank or one clone sees it. Times are seconds, by `time.monotonic` of who holds this."""

    step: int
    """At which it takes place."""
    captured: bool = False
    """The step has ended."""
    ended: bool = False
    """Nothing is left to be done here."""
    error: str | None = None
    """Why it failed."""
    held_s: float = 0.0
    """How long the training was held up by it."""
    began_at: float = 0.0
    """When the step began, or the clone was there."""
    captured_at: float = 0.0
    """When the step ended."""
    ended_at: float = 0.0
    """When all was sent, or received."""
    peer_gone: bool = False
    """It failed because another left."""
    saved: ModelRef | None = None
    """The version that the rank saved or restored last."""
    told_at: float = 0.0
    """When it was sent to who asked."""

    def heard(self) -> ForkState:
        """Return what was just told here with times by the clock of this process: clocks of machines differ."""
        now = time.monotonic()
        later = now - self.told_at
        times = [at + later for at in (self.began_at, self.captured_at, self.ended_at)]
        return replace(self, began_at=times[0], captured_at=times[1], ended_at=times[2], told_at=now)


@dataclass(slots=True)
class _Fork:
    order: ForkOrder
    sender: ForkSender
    state: ForkState
    deadline: Deadline
    """Of `time.monotonic`."""
    settled: bool = False
    told: threading.Event = field(default_factory=threading.Event)
    """Somebody has heard how it ended."""


class ForkHooks:
    """Hooks of one rank's training, and the orders it takes.

    Args:
        training: what is forked.
        run: the run's name.
        rank: this rank.
        size: ranks of the run.
        connect: joins a group.
    """

    def __init__(self, training: Training, run: str, rank: int, size: int, connect: Connect) -> None:
        self._training = training
        self._run, self._rank, self._size = run, rank, size
        self._connect = connect
        self._lock = threading.Lock()
        self._begun = training.steps_done
        self._fork: _Fork | None = None
        self._capturing: _Fork | None = None
        self._index: dict[str, int] = {}
        self._states: OrderedDict[str, _Fork] = OrderedDict()

    @property
    def busy(self) -> str | None:
        """Id of the fork that is under way."""
        with self._lock:
            return self._fork.order.id if self._running() and self._fork else None

    def arm(self, order: ForkOrder, step: int) -> None:
        """Take an order, or another step for the one that was taken; `agree` says that all ranks have.

        Args:
            order: the fork.
            step: after which it takes place: one to come, or the last one that ended.

        Raises:
            ForkError: the step is past, another fork is under way, the order is of another training, or its step has
                begun. An order that was taken stays so.
        """
        where = f"fork {order.id}: rank {self._rank} of {self._run!r}"
        if (order.run, order.sources) != (self._run, self._size):
            raise ForkError(
                f"{where}: expected an order for its {self._size} ranks; found {order.sources} ranks of {order.run!r}"
            )
        order.check(self._training.specs(), where)
        with self._lock:
            taken = self._fork if self._running() else None
            if taken is not None and (taken.order.id != order.id or taken.state.began_at):
                at = taken.sender.step
                raise ForkError(
                    f"{where}: expected no other fork in progress; found fork {taken.order.id} at step {at}"
                )
            known = self._states.get(order.id)
            if taken is None and known is not None and (known.state.began_at or known.sender.error is not None):
                raise ForkError(f"{where}: expected a fork that is new or in progress; it has ended")
            done = self._training.steps_done
            if step < done or step <= self._begun != done:
                raise ForkError(
                    f"{where}: expected a step that has not begun; found {step}, but {self._begun} has begun"
                )
            if taken is not None:
                taken.state.step = step
                taken.sender.order(step)
                return
            deadline = Deadline.after(order.timeout)
            sender = ForkSender(order, step, self._rank, self._connect, deadline)
            self._fork = _Fork(order, sender, ForkState(step=step), deadline)
            self._states[order.id] = self._fork
            while len(self._states) > KEPT:
                self._states.popitem(last=False)

    def agree(self, fork_id: str) -> bool:
        """Learn that all ranks have taken the order of a fork: it takes place at its step.

        Returns:
            True: that step is the last one that ended; whoever holds the training calls `capture` between two steps.

        Raises:
            ForkError: the fork is not known here, or failed: maybe this came too late.
        """
        with self._lock:
            fork = self._known(fork_id)
            if fork.sender.error is not None:
                raise ForkError(str(fork.sender.error))
            fork.sender.agree()
            return fork.sender.step == self._training.steps_done

    def capture(self) -> None:
        """Hand over the state as it is, unless that was done: the training stands between two steps.

        Raises:
            ForkError: it went on from another state meanwhile.
        """
        with self._lock:
            fork = self._fork
            if fork is None or fork.sender.ended or fork.state.began_at or not fork.sender.agreed:
                return
            done = self._training.steps_done
            if fork.sender.step != done:
                where = f"fork {fork.order.id}: rank {self._rank} of {self._run!r}"
                raise ForkError(
                    f"{where}: expected step {fork.sender.step} to be the last step that ended; found {done}"
                )
            self._begin(fork)
        self._hand_over(fork)

    def cancel(self, fork_id: str, reason: str) -> None:
        """Give up a fork; one that is not known, or has ended, is left as it is."""
        with self._lock:
            fork = self._states.get(fork_id)
        if fork is not None:
            fork.sender.fail(ForkError(f"fork {fork_id}: cancelled: {reason}"))

    def state(self, fork_id: str, timeout: float) -> ForkState:
        """Wait for a fork's end, and tell how it goes.

        Raises:
            ForkError: the fork is not known here.
        """
        with self._lock:
            fork = self._known(fork_id)
        ended = fork.sender.wait(timeout)
        if ended and not fork.state.ended:
            fork.state.ended, fork.state.ended_at = True, time.monotonic()
        error = fork.sender.error
        fork.state.error = str(error) if error is not None else None
        fork.state.peer_gone = error is not None and isinstance(error.__cause__, PeerLostError)
        if ended:
            fork.told.set()
        return fork.state

    def step_begins(self, step: int) -> bool:
        """Tell that a step is about to begin (`training.Hooks`)."""
        while True:
            with self._lock:  # an order is taken before the step begins, or it is refused
                fork = self._due(step)
                if fork is None or fork.sender.agreed:
                    if fork is not None:
                        self._begin(fork)
                    self._begun = step
                    break
            began = time.monotonic()
            fork.sender.await_agreement(step)
            fork.state.held_s += time.monotonic() - began
        if fork is not None and fork.sender.step < step:
            self._hand_over(fork)
        return self._capturing is not None

    def before_update(self) -> None:
        """Make the tensors of the captured step free to be changed (`training.Hooks`)."""
        fork = self._fork
        if fork is None or not fork.state.captured or fork.settled:
            return
        fork.settled = True
        if not fork.sender.ended:
            fork.state.held_s += fork.sender.settle()
            if fork.sender.error is not None:
                log.warning("%s", fork.sender.error)

    def updated(self, name: str, array: object, stable: bool = False) -> None:
        """Take a tensor's final value (`training.Hooks`)."""
        fork = self._capturing
        if fork is None:
            return
        try:
            fork.sender.offer(self._index[name], array, stable)
        except Exception as exc:  # noqa: BLE001  the training goes on; the caller of `fork` is told
            self._fail(fork, exc)

    def step_ended(self, step: int) -> None:
        """Tell that a step has ended (`training.Hooks`)."""
        fork = self._capturing
        if fork is not None and fork.sender.step == step:
            self._hand_over(fork)

    def leave(self) -> None:
        """Send what was captured, within the fork's timeout, and give up the rest: the training has come to its end."""
        self.before_update()
        fork = self._fork
        if fork is not None and fork.state.captured:
            if not fork.sender.wait(0.0):
                log.info(
                    "fork %s: rank %d of %r will close when its state is sent", fork.order.id, self._rank, self._run
                )
                fork.sender.wait(fork.deadline.left())
            if not fork.told.wait(TOLD_S):
                fork.told.set()  # nobody asks: a second call does not wait again
        self.close()

    def close(self) -> None:
        """Give up what is under way."""
        with self._lock:
            forks = list(self._states.values())
        for fork in forks:
            fork.sender.fail(ForkError(f"fork {fork.order.id}: rank {self._rank} of {self._run!r} was closed"))

    def _due(self, step: int) -> _Fork | None:
        """Return the fork that takes place in a step that is about to begin, or right before it; the lock is held."""
        fork = self._fork if self._running() else None
        if fork is None or fork.state.began_at or not step - 1 <= fork.sender.step <= step:
            return None
        return fork

    def _known(self, fork_id: str) -> _Fork:
        """Return a fork that was ordered here; the lock is held."""
        if fork_id not in self._states:
            where = f"fork {fork_id}: rank {self._rank} of {self._run!r}"
            raise ForkError(f"{where}: expected a fork that this rank has accepted; found an unknown id")
        return self._states[fork_id]

    def _running(self) -> bool:
        return self._fork is not None and not self._fork.sender.ended

    def _begin(self, fork: _Fork) -> None:
        self._index = {spec.name: place for place, spec in enumerate(fork.order.specs)}
        self._capturing = fork
        fork.state.began_at = time.monotonic()

    def _fail(self, fork: _Fork, cause: Exception) -> None:
        error = ForkError(f"fork {fork.order.id}: rank {self._rank} of {self._run!r}: {cause}")
        error.__cause__ = cause
        fork.sender.fail(error)

    def _hand_over(self, fork: _Fork) -> None:
        """Offer what was not told during the step, and what is no tensor."""
        began = time.monotonic()
        self._capturing = None
        try:
            for tensor in fork.sender.missing():
                fork.sender.offer(tensor, self._training.tensor(fork.order.specs[tensor].name), False)
            fork.sender.complete(self._training.facts())
        except Exception as exc:  # noqa: BLE001  the training goes on; the caller of `fork` is told
            self._fail(fork, exc)
        fork.state.captured, fork.state.captured_at = True, time.monotonic()
        fork.state.held_s += time.monotonic() - began
