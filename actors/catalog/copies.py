"""Copies of the catalog's stream on shards: what a term finds when the file of the one before is out of reach.

Rules
- Copies are opaque bytes, sent in the background, in batches of at most `PAUSE_S`. With `replicas=k` a commit is
  answered when shards on k - 1 other nodes have it.
- Shards on other nodes than the catalog's are chosen, at most `MOST` of them, or as many as `replicas` asks for.
"""

from __future__ import annotations

import logging

from ...store.catalog.journal import Stream
from ...store.errors import ShardUnavailableError, TensorVineError
from ...store.waiting import Deadline
from ..rpc.shard_channels import ShardChannels
from ..rpc.ticker import Ticker
from ..shard.calls import ShardCalls
from .context import CatalogContext, Change
from .lines import Lines

log = logging.getLogger(__name__)

PAUSE_S = 0.05
PIECE_BYTES = 4 << 20
SEND_S = 10.0
MOST = 3


class JournalCopies:
    """Sends the stream of one term to shards.

    Args:
        context: the catalog's.
        lines: to the shards.
        channels: to the shards.
    """

    def __init__(self, context: CatalogContext, lines: Lines, channels: ShardChannels) -> None:
        self._context = context
        self._lines = lines
        self._channels = channels
        self._node = context.engine.this_node()
        self._have: dict[tuple[int, int], tuple[Stream, int]] = {}
        """(shard, incarnation) -> the stream, and how much of it is there."""
        self._ticker = Ticker("journal", "catalog", lambda: PAUSE_S, self._step)

    async def secured(self, deadline: Deadline) -> None:
        """Wait until as many nodes have the stream, as it is now, as `replicas` says, or all that there are.

        Raises:
            ShardUnavailableError: they do not have it in time.
        """
        replicas = self._context.topology.replicas
        if replicas == 1:
            return
        with self._context.lock:
            stream, length = self._context.journal.stream, self._context.journal.length
        self._ticker.soon()

        def look() -> bool | None:
            nodes = {line.node for line in self._lines.all() if self._has(line.shard, line.incarnation, stream, length)}
            others = {line.node for line in self._lines.all()} - {self._node}
            return True if len(nodes) >= min(replicas - 1, len(others)) else None

        if not await self._context.notifier.until(Change.COPIES, look, deadline):
            raise ShardUnavailableError(
                f"catalog: expected {replicas - 1} other nodes to have the journal in time; they do not"
            )

    def _has(self, shard: int, incarnation: int, stream: Stream, length: int) -> bool:
        have = self._have.get((shard, incarnation))
        return have is not None and (have[0] > stream or (have[0] == stream and have[1] >= length))

    def _step(self) -> None:
        with self._context.lock:
            replicas = self._context.topology.replicas
            targets = [line for line in self._lines.all() if line.node != self._node][: max(MOST, replicas)]
            self._have = {key: have for key, have in self._have.items() if key[0] in self._lines}
        for line in targets:
            try:
                if self._send(line.shard, line.incarnation):
                    self._context.notifier.tell(Change.COPIES)
            except TensorVineError as exc:
                log.debug("catalog: shard %d has no copy of the journal: %s", line.shard, exc)

    def _send(self, shard: int, incarnation: int) -> bool:
        """Send what a shard lacks; tell whether that was anything."""
        sent = False
        while True:
            stream = self._context.journal.stream
            known, offset = self._have.get((shard, incarnation), (stream, 0))
            if known != stream:
                offset = 0
            piece = self._context.journal.read(stream, offset, PIECE_BYTES)
            if not piece:
                return sent
            request = ShardCalls.append_journal(self._context.term, stream.number, offset, piece)
            kept = self._channels[shard].call(request, SEND_S)
            self._have[shard, incarnation] = stream, kept
            sent = True
