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
    """What `ForkableRank` and `ForkCallback` share."""

    run: str
    rank: int
    size: int
    _fork_hooks: ForkHooks
    _mailbox: MailboxServer
    _node: str
    _lock: threading.Lock
    """Held while a step begins or ends, and while a state is captured between two steps."""
    _inside: bool
    """A step has begun."""
    _counted: int
    """Steps since the rank was made."""
    _ends: deque[float]
    """When the last steps ended, by the monotonic clock."""

    @property
    def steps_done(self) -> int:
        """Steps since the training's beginning."""
        raise NotImplementedError

    def specs(self) -> Sequence[TensorSpec]:
        """List the tensors of the state."""
        raise NotImplementedError

    def _read_order(self) -> Sequence[str]:
        """List the tensors in the order in which a forward pass reads them."""
        raise NotImplementedError

    def _unhook(self) -> None:
        """Take off what was attached to the training."""
        raise NotImplementedError

    def close(self, give_up: bool = False) -> None:
        """End the connection to the run: the rank cannot be forked after that. Does nothing in a forked child.

        Args:
            give_up: do not send what a fork has captured; otherwise that is sent first, within the fork's timeout.
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
        """Tell what it is and how far it is. A rank counts as training while it is within a step."""
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
        """Take an order to fork; errors as in `ForkHooks.arm`."""
        self._fork_hooks.arm(order, step)

    def agree(self, fork_id: str) -> None:
        """Learn that all ranks have taken it; errors as in `ForkHooks.agree` and `ForkHooks.capture`."""
        if self._fork_hooks.agree(fork_id):  # a step that waits for it holds the lock
            with self._lock:
                self._fork_hooks.capture()

    def cancel(self, fork_id: str, reason: str) -> None:
        """Give up a fork."""
        self._fork_hooks.cancel(fork_id, reason)

    def fork_state(self, fork_id: str, timeout: float) -> ForkState:
        """Wait for a fork's end, and tell how it goes; errors as in `ForkHooks.state`."""
        return self._fork_hooks.state(fork_id, timeout)
