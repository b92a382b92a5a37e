"""What a shard hears of the versions of all homes, and tells a planner that starts again: its part of the ledger."""

from __future__ import annotations

from collections.abc import Mapping

from ....store.refs import ModelRef
from ....store.versions.ledger import Fact, Told
from ...rpc.calls import answers
from ...rpc.messages import Account
from ..calls.notes import NoteCalls
from ..context import ShardContext
from ..handoff.name_handoff import NameHandoff


class Notes:
    """What one shard has heard.

    Args:
        context: the shard's.
        names: which of them have gone from here in the change under way.
    """

    def __init__(self, context: ShardContext, names: NameHandoff) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._names = names
        self._whole = context.recovery_info is not None or not self._peers.topology.former
        """It has heard of every commit; one that joins has not."""

    @answers(NoteCalls.note)
    async def note(self, news: Mapping[ModelRef, Fact]) -> None:
        with self._lock:
            self._state.ledger.note(news)

    @answers(NoteCalls.merge)
    async def merge(self, told: Told) -> None:
        with self._lock:
            self._state.ledger.merge(told)

    @answers(NoteCalls.catch_up)
    async def catch_up(self, told: Told) -> None:
        with self._lock:
            self._state.ledger.merge(told)
            self._whole = True

    @answers(NoteCalls.account)
    async def account(self) -> Account:
        with self._lock:
            topology = self._peers.topology
            moved = [name for name in self._state.names() if topology.former_home(name) != self._index]
            return Account(topology, self._state.ledger.told(), self._whole, tuple(moved), self._names.delivered)
