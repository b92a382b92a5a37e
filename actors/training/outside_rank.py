"""A rank that is no actor of ours: what callers of its mailbox ask, and how it leaves.

Rules
- The rank's class brings the state and tells its hooks of each step; here is what is the same for every framework.
- A rank that comes to its end sends first what a fork has captured; one that fails gives it up.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from .fork.fork_hooks import ForkHooks, ForkState
from .fork.order import ForkOrder
from .mailbox import MailboxServer
from .report import RankReport
from .training import TensorSpec


class OutsideRank:
    """Base class of `ForkableRank` and `ForkCallback`: a rank with the user's own training loop."""

    run: str
    rank: int
    size: int
    _fork_hooks: ForkHooks
    _mailbox: MailboxServer
    _node: str
    _lock: threading.Lock
    """Lock held during the start and end of a step, and during the capture of the state between two steps."""
    _inside: bool
    """Whether a step is in progress."""
    _counted: int
    """Number of steps trained since this object was created."""
    _ends: deque[float]
    """End times of the last 64 steps, in seconds, from `time.monotonic`."""

    @property
    def steps_done(self) -> int:
        """Number of steps trained so far."""
        raise NotImplementedError

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the training state."""
        raise NotImplementedError

    def _read_order(self) -> Sequence[str]:
        """List the tensors in the order in which a forward pass reads them."""
        raise NotImplementedError

    def _unhook(self) -> None:
        """Remove the hooks from the training."""
        raise NotImplementedError

    def close(self, give_up: bool = False) -> None:
        """Unregister the rank, so that the run can no longer be forked.

        In a child process that `os.fork` created, this method does nothing.

        Args:
            give_up: Whether to abort a fork in progress immediately. By default, `close` aborts the fork only if the
                state has not been captured yet. Otherwise, `close` first waits until the state has been sent or the
                timeout of the fork expires.
        """
        if self._mailbox.opened.inherited:
            return
        if give_up:
            self._fork_hooks.close()
        else:
            self._fork_hooks.leave()
        self._unhook()
        self._mailbox.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(give_up=error is not None)

    def describe(self) -> RankReport:
        """Return the state and progress of the rank. `RankReport.training` is true only during a step."""
        ends = list(self._ends)
        return RankReport(
            run=self.run,
            rank=self.rank,
            size=self.size,
            steps_done=self.steps_done,
            training=self._inside,
            step_s=(ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0,
            losses=self._counted,
            specs=tuple(self.specs()),
            forward_order=tuple(self._read_order()),
            backend=None,
            node=self._node,
            pid=os.getpid(),
            fork=self._fork_hooks.busy,
            own_loop=True,
        )

    def arm(self, order: ForkOrder, step: int) -> None:
        """Accept an order to fork the run after step number `step`.

        `step` must be at least the number of the last completed step. If a step is in progress, `step` must be greater
        than the number of that step.

        Raises:
            ForkError: if the step is not allowed, if another fork is in progress, or if the run, the number of ranks or
                the tensors in `order` differ from those of this rank.
        """
        self._fork_hooks.arm(order, step)

    def agree(self, fork_id: str) -> None:
        """Notify this rank that all ranks have accepted the order to fork the run.

        If the step after which the run is to be forked is already completed, capture the state immediately.

        Raises:
            ForkError: if the fork is unknown or has failed.
        """
        if self._fork_hooks.agree(fork_id):  # a step that waits for it holds the lock
            with self._lock:
                self._fork_hooks.capture()

    def cancel(self, fork_id: str, reason: str) -> None:
        """Abort a fork, unless the fork is unknown or has ended."""
        self._fork_hooks.cancel(fork_id, reason)

    def fork_state(self, fork_id: str, timeout: float) -> ForkState:
        """Wait until a fork ends or `timeout` seconds have passed, and return the state of the fork.

        Raises:
            ForkError: if the fork is unknown.
        """
        return self._fork_hooks.state(fork_id, timeout)
