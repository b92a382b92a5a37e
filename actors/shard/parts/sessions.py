"""The clients of a shard: they come, stay and go.

Rules
- A shard that is stopped answers no client any more, however long its process takes to end.
- A client's session ends when it says so, when it is not renewed in time, or when its process on this node dies.
- A process of this node may fill memory until it dies: its parts are taken back then. Parts of other clients are filled
  by this shard alone, and go with the session.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from ....store.holders import Lease
from ...memory.process import ProcessId
from ...rpc.calls import answers
from ...rpc.messages import Hello
from ..calls.sessions import SessionCalls
from ..context import ShardContext
from ..local_clients import LocalClients
from ..serving.senders import Senders
from ..settling import Settling

log = logging.getLogger(__name__)


class Sessions:
    """The sessions of one shard's clients.

    Args:
        context: the shard's.
        settling: carries out what follows.
        local: the clients on this node.
        senders: what sends to groups that clients are members of.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        local: LocalClients,
        senders: Senders,
    ) -> None:
        self._index = context.index
        self._engine = context.engine
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._tenure = context.tenure
        self._settling = settling
        self._local = local
        self._senders = senders
        self._tcp_address = context.tcp_address
        self._metadata_bytes = context.config.metadata_bytes

    @answers(SessionCalls.hello)
    async def hello(self, client: str, node: str, process: ProcessId) -> Hello:
        here = self._engine.this_node()
        with self._lock:
            self._tenure.check()
            self._state.open(client, time.monotonic())
            if node == here:
                self._local.watch(client, process)
                self._segment_memory.page_care.came()
        memory = self._segment_memory.memory
        place = (os.getpid(), memory.fd, memory.file, memory.capacity)
        return Hello(self._index, here, *place, self._tcp_address, self._metadata_bytes)

    @answers(SessionCalls.goodbye)
    async def goodbye(self, client: str) -> None:
        self._end(client)
        await self._settling.settle()

    @answers(SessionCalls.end)
    async def end(self) -> None:
        self._tenure.end()

    @answers(SessionCalls.renew)
    async def renew(self, client: str, leases: Sequence[Lease]) -> list[Lease] | None:
        with self._lock:
            return self._state.renew(client, leases, time.monotonic())

    def end_lost(self) -> None:
        """End the sessions of clients that died or fell silent; the caller settles afterwards."""
        with self._lock:
            ended = self._state.sweep(time.monotonic())
            died = self._local.died()
        for client in {*ended, *died}:
            log.info("client %s has ended: dropping its pins and unfinished saves", client)
            self._end(client, parts_too=client in died or not self._local.watches(client))

    def _end(self, client: str, parts_too: bool = True) -> None:
        with self._lock:
            self._state.end(client)
            if parts_too:
                self._segment_memory.drop_client(client)
                self._local.drop(client)
                self._senders.left(client)
