"""What a rank can be asked about forks, declared for those who fork it and for the rank."""

from __future__ import annotations

from collections.abc import Mapping

from ....store.refs import ModelRef
from ...rpc.calls import remote
from .fork_hooks import ForkState
from .order import ForkOrder


class ForkCalls:
    """Answered by `fork.forkable`; the first four also by `mailbox`."""

    @remote("ctl")
    def arm(self, order: ForkOrder, step: int) -> None:
        """Take an order to fork, on which all ranks have yet to agree; errors as in `ForkHooks.arm`."""
        ...

    @remote("ctl")
    def agree(self, fork: str) -> None:
        """Learn that all ranks have taken the order; a training that stands still after its step is captured as it is.

        Raises:
            ForkError: as in `ForkHooks.agree` and `ForkHooks.capture`.
        """
        ...

    @remote("ctl")
    def cancel(self, fork: str, reason: str) -> None:
        """Give up a fork; one that has ended, or is not known, is left as it is."""
        ...

    @remote("watch", repeatable=True)
    def fork_state(self, fork: str, timeout: float) -> ForkState:
        """Wait until this rank has sent its share, or the fork failed, and tell how it goes.

        Raises:
            ForkError: the fork is not known here.
        """
        ...

    @remote("watch")
    def adopt(self, order: ForkOrder, clone: int) -> ForkState:
        """Take over the state that a fork brings; returns when it is whole.

        Raises:
            ForkError: the fork failed, or its state is not that of this training.
        """
        ...

    @remote("ctl")
    def descend(self, parent: ModelRef | None, origin: Mapping[str, object]) -> None:
        """Take note of what this clone comes from: the parent of the first version that it saves."""
        ...
