"""The shard actor: `store.shard.ShardState` brought to life by the parts that stand in this room.

Rules
- The state decides, the parts act: they take the lock, ask the state, and carry out what the state left. What concerns
  bytes is in `segment_memory`. No rule of what is kept or freed stands in a part.
- Each part answers the calls of one matter (`calls`); the shard makes the parts, in the order in which they need each
  other, and hands calls on to them.
- Concurrency groups run in threads of their own: `ctl` for short answers, `data` for bytes, `watch` for long polls.
  Copies run in worker threads, so that no group's loop ever waits for memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...store.errors import StorageError
from ...store.metrics import METRICS, SHOWN
from ..collective.rendezvous import LocalRendezvous
from ..engine.engine import Engine
from ..engine.room import outlast_workers
from ..memory.page_care import LOOK_S
from ..rpc.calls import answers, composed
from ..rpc.messages import Disk, ShardConfig, Tag
from .admission import Admission
from .calls.changes import ChangeCalls
from .context import ShardContext, open_context
from .copying import Copying
from .disk.history import History
from .handoff.name_handoff import NameHandoff
from .handoff.reconciliation import Reconciliation
from .handoff.segment_handoff import SegmentHandoff
from .handoff.strays import Strays
from .local_clients import LocalClients
from .parts.changes import Changes
from .parts.files import Files
from .parts.holders import Holders
from .parts.notes import Notes
from .parts.queries import Queries
from .parts.reads import Reads
from .parts.sessions import Sessions
from .parts.writes import Writes
from .replicas.replica_store import ReplicaStore
from .replicas.replication import Replication
from .replicas.securing import Securing
from .restart import take_back
from .serving.block_server import BlockServer
from .serving.exports import Exports
from .serving.patches import Patches
from .serving.redis_index import RedisIndex
from .serving.senders import Senders
from .settling import Settling
from .sweep import Sweep
from .ticker import Ticker

log = logging.getLogger(__name__)

DISK_PAUSE_S = 2.0
SHOW_S = 10.0
"""How often gauges are set in the engine's dashboard."""


@composed([Sessions, Writes, Reads, Patches, Queries, Holders, Files, ReplicaStore, Securing, Notes, Changes])
class Shard:
    """One shard of a repository, as an actor."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        outlast_workers()
        context = open_context(engine, config)
        self._tenure = context.tenure
        block_server = _open_block_server(context)
        segment_handoff = SegmentHandoff(context)
        settling = Settling(context, segment_handoff)
        history = _open_history(context, config.disk, settling) if config.disk is not None else None
        local = LocalClients()
        room = Admission(context, local, history.persister if history is not None else None)
        recovered = history.recovery.recovered if history is not None else []
        reconciliation = Reconciliation(context, recovered) if context.recovery_info else None

        def calm() -> bool:
            return reconciliation is None or not reconciliation.open

        strays = Strays(context, calm)
        restored = take_back(context, history)
        redis_index = open_redis_index(context, config.redis)
        if redis_index is not None and context.tcp_address is not None:
            redis_index.shard_at(*context.tcp_address)
        rendezvous = LocalRendezvous()
        senders = Senders(config, block_server, rendezvous)
        exports = Exports(context)
        patches = Patches(context, block_server)
        copying = Copying(context, room)
        replica_store = ReplicaStore(context, copying, settling.settle_from_thread)
        replication = Replication(context, restored, history) if config.replicas > 1 else None
        securing = Securing(context, replication, history, room)
        names = self._names = NameHandoff(context, history, redis_index, securing)
        sessions = Sessions(context, settling, local=local, senders=senders)
        writes = Writes(
            context,
            settling,
            admission=room,
            history=history,
            names=names,
            segment_handoff=segment_handoff,
            securing=securing,
            redis_index=redis_index,
        )
        changes = Changes(
            context,
            settling,
            names=names,
            segment_handoff=segment_handoff,
            reconciliation=reconciliation,
            history=history,
            copying=copying,
            securing=securing,
            writes=writes,
        )
        queries = Queries(
            context,
            settling,
            names=names,
            admission=room,
            history=history,
            securing=securing,
            replica_store=replica_store,
            patches=patches.cache,
        )
        parts = (
            sessions,
            writes,
            Reads(
                context,
                admission=room,
                history=history,
                names=names,
                senders=senders,
                rendezvous=rendezvous,
                exports=exports,
            ),
            patches,
            queries,
            Holders(
                context,
                settling,
                history=history,
                segment_handoff=segment_handoff,
                reconciliation=reconciliation,
                strays=strays,
            ),
            Files(context, settling, history, segment_handoff),
            replica_store,
            securing,
            Notes(context, names),
            changes,
        )
        self.parts: Mapping[type, object] = {type(part): part for part in parts}
        if history is not None:
            history.care.start(calm)
        Sweep(
            context,
            settling,
            sessions=sessions,
            reconciliation=reconciliation,
            strays=strays,
            replica_store=replica_store,
            senders=senders,
            exports=exports,
            patches=patches.cache,
        )
        Ticker("gauges", f"shard {context.index}", lambda: SHOW_S, lambda: _show(context, queries))
        care = context.segment_memory.page_care
        care.soon = Ticker("pages", f"shard {context.index}", lambda: LOOK_S, care.look).soon

    @answers(ChangeCalls.gathered)
    async def gathered(self, method: str, arguments: Sequence[object]) -> tuple[Tag, Any]:
        self._tenure.check_running()
        before = self._names.tag()
        answer = await getattr(self, method)(*arguments)
        return (before if self._names.tag() == before else replace(before, sending=True)), answer


def _show(context: ShardContext, queries: Queries) -> None:
    """Set this shard's gauges in the engine's dashboard."""
    stats = queries.stats_now()
    gauges = {metric.name: float(getattr(stats, metric.field)) for metric in METRICS if metric.field in SHOWN}
    context.engine.show(gauges, {"repository": context.config.repository, "shard": str(context.index)})


def _open_history(context: ShardContext, disk: Disk, settling: Settling) -> History:
    """Bring back what is on disk. A shard that starts again waits for a disk that is not there just now."""
    pause = threading.Event()
    while True:
        try:
            history = History(context, disk, settling.settle_from_thread)
            settling.also(history.tidy)
            return history
        except StorageError as exc:
            if context.recovery_info is None:
                raise
            log.error("shard %d restarts and is waiting for its path: make it accessible: %s", context.index, exc)
            pause.wait(DISK_PAUSE_S)


def _open_block_server(context: ShardContext) -> BlockServer | None:
    """Serve those who cannot map the memory; without it, the engine's object store does."""
    try:
        block_server = BlockServer(context)
        context.tcp_address = block_server.address
        return block_server
    except OSError as exc:
        log.warning("shard %d: the TCP server could not start: %s", context.index, exc)
        return None


def open_redis_index(context: ShardContext, redis: str | None) -> RedisIndex | None:
    """Post what lives here in Redis, from now on; a shard that drained and starts again has nothing to post."""
    state, recovery_info = context.state, context.recovery_info
    if redis is None or (recovery_info is not None and context.index in recovery_info.topology.gone):
        return None

    def graph_of(key: bytes) -> str:
        with context.lock:
            return state.graphs.architecture(key)[0]

    records = [state.record(ref.name, ref.version, "") for ref in state.models()]
    versions = [(record.header, record.body) for record in records]
    return RedisIndex(redis, context.config, graph_of, context.peers.topology, versions)
