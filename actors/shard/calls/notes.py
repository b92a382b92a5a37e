"""What a shard is told of the versions of all homes, and what it tells a planner that starts again."""

from __future__ import annotations

from collections.abc import Mapping

from ....store.refs import ModelRef
from ....store.versions.ledger import Fact, Told
from ...rpc.calls import remote
from ...rpc.messages import Account


class NoteCalls:
    """Answered by `shard.parts.notes`."""

    @remote("ctl", repeatable=True)
    def note(self, news: Mapping[ModelRef, Fact]) -> None:
        """Take what another home committed or retired."""
        ...

    @remote("ctl")
    def merge(self, told: Told) -> None:
        """Take what the planner has heard from all."""
        ...

    @remote("ctl", repeatable=True)
    def catch_up(self, told: Told) -> None:
        """Have the whole ledger, as one that has joined: from before this on, it hears of every commit."""
        ...

    @remote("ctl", repeatable=True)
    def account(self) -> Account:
        """Tell the planner, which starts again, how things stand here."""
        ...
