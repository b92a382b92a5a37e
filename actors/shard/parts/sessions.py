"""The clients of a shard: they come, stay and go.

Rules
- A client's session ends when it says so, when it is not renewed in time, or when its process on this node dies. The
  catalog hears of the first and the last (`Reporting.ended`).
- A process of this node may fill memory until it dies: its parts are taken back then. Parts of other clients are filled
  by this shard alone, and go with the session.
- What a request that is over was granted, or has staged, goes; a commit that was sent on waits for its answer.
"""

from __future__ import annotations

import logging
import os
import time

from ....store.shard import ShardStats
from ...memory.process import ProcessId
from ...rpc.calls import answers
from ...rpc.catalog_messages import Declared
from ...rpc.messages import Hello
from ..admission import Admission
from ..calls.sessions import SessionCalls
from ..context import ShardContext
from ..disk.history import History
from ..local_clients import LocalClients
from ..reporting import Reporting
from ..serving.patch_cache import PatchCache
from ..serving.senders import Senders
from ..settling import Settling

log = logging.getLogger(__name__)


class Sessions:
    """The sessions of one shard's clients.

    Args:
        context: the shard's.
        settling: carries out what follows.
        reporting: tells the catalog.
        admission: knows who waits.
        history: the shard's disk, if there is one.
        local: the clients on this node.
        senders: what sends to groups that clients are members of.
        patches: made lately.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        reporting: Reporting,
        admission: Admission,
        history: History | None,
        local: LocalClients,
        senders: Senders,
        patches: PatchCache,
    ) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._settling = settling
        self._reporting = reporting
        self._admission = admission
        self._history = history
        self._local = local
        self._senders = senders
        self._patches = patches

    @answers(SessionCalls.hello)
    async def hello(self, client: str, node: str, process: ProcessId) -> Hello:
        here = self._context.engine.this_node()
        with self._lock:
            self._state.requests.open(client, time.monotonic())
            if node == here:
                self._local.watch(client, process)
                self._segment_memory.page_care.came()
        memory, config = self._segment_memory.memory, self._context.config
        place = (os.getpid(), memory.fd, memory.file, memory.capacity)
        return Hello(self._context.index, here, *place, self._context.tcp_address, config.metadata_bytes)

    @answers(SessionCalls.renew)
    async def renew(self, client: str, declared: Declared) -> bool:
        now = time.monotonic()
        with self._lock:
            fresh = self._state.requests.open(client, now)
            self._state.requests.declare(client, declared.open, declared.highest, now)
            self._drop_over()
        self._settling.settle()
        return not fresh

    @answers(SessionCalls.goodbye)
    async def goodbye(self, client: str) -> None:
        with self._lock:
            self._end(client)
        self._reporting.ended([client])
        self._settling.settle()

    @answers(SessionCalls.end)
    async def end(self) -> None:
        self._context.lease.end()

    @answers(SessionCalls.stats)
    async def stats(self) -> ShardStats:
        return self.stats_now()

    def stats_now(self) -> ShardStats:
        """Return the statistics of the shard; for a thread, too."""
        with self._lock:
            totals, memory = self._state.totals, self._segment_memory
            return ShardStats(
                shard=self._context.index,
                tensors=totals.tensors,
                bytes_memory=totals.live_bytes,
                bytes_allocated=totals.allocated - totals.copies,
                bytes_disk=totals.file_bytes + sum(file.nbytes for file in self._state.known_files.values()),
                bytes_staged=memory.bytes_filling,
                bytes_resident=memory.memory.bytes_resident,
                bytes_unwritten=self._history.persister.behind()[1] if self._history is not None else 0,
                capacity=self._context.config.capacity,
                requests=self._context.requests,
                bytes_saved=memory.bytes_saved,
                bytes_sent=self._context.bytes_sent,
                patches_made=self._patches.made,
                bytes_patches=self._patches.nbytes,
                bytes_replicated=totals.copies,
                waiting_for_memory=self._admission.waiting_for_memory,
                waiting_for_disk=self._admission.waiting_for_disk,
                counted=self._context.counts.copy(),
            )

    @answers(SessionCalls.check)
    async def check(self) -> None:
        with self._lock:
            self._state.check()

    # ---- clients that end -----------------------------------------------------------------------------

    def end_lost(self) -> None:
        """End the sessions of clients that died or fell silent; the caller settles afterwards."""
        with self._lock:
            died = self._local.died()
            for client in died:
                self._end(client)
            for client in self._state.requests.expired(time.monotonic()):
                if not self._local.watches(client):
                    self.end_saves(client)
            self._drop_over()
        if died:
            log.info("clients %s have ended: dropping their unfinished saves", died)
            self._reporting.ended(died)

    def end_saves(self, client: str) -> None:
        """Drop what a client has staged, and what this shard fills for it. Call it with the lock held."""
        for save in self._state.saves():
            if save.client == client:
                self._state.end(save)
        if not self._local.watches(client):
            self._segment_memory.drop_over(client)

    def _end(self, client: str) -> None:
        """End a client for good. Call it with the lock held."""
        self._state.requests.gone(client)
        self._local.drop(client)
        self._senders.left(client)
        self._drop_over()

    def _drop_over(self) -> None:
        self._state.sweep_saves()
        self._segment_memory.drop_over()
