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
from collections.abc import Mapping

from ...store.metrics import METRICS, SHOWN, Source
from ..collective.rendezvous import LocalRendezvous
from ..engine.engine import Engine
from ..engine.room import outlast_workers
from ..memory.page_care import LOOK_S
from ..rpc.calls import composed
from ..rpc.messages import ShardConfig
from ..rpc.ticker import Ticker
from .admission import Admission
from .context import ShardContext, open_context
from .copying import Copying
from .disk.history import History
from .local_clients import LocalClients
from .parts.copies import Copies
from .parts.journal import Journal
from .parts.orders import Orders
from .parts.reads import Reads
from .parts.sessions import Sessions
from .parts.writes import Writes
from .proposals import Proposals
from .reporting import Reporting
from .serving.block_server import BlockServer
from .serving.exports import Exports
from .serving.patches import Patches
from .serving.senders import Senders
from .settling import Settling
from .sweep import Sweep

log = logging.getLogger(__name__)

SHOW_S = 10.0
"""How often gauges are set in the engine's dashboard."""


@composed([Sessions, Writes, Reads, Patches, Orders, Copies, Journal])
class Shard:
    """One shard of a repository, as an actor."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        outlast_workers()
        context = open_context(engine, config)
        block_server = _open_block_server(context)
        settling = Settling(context)
        reporting = Reporting(context, settling.settle)
        history: History | None = None
        if config.disk is not None:
            history = History(context, config.disk, settling.settle, reporting.soon)
            settling.also(history.tidy)
            reporting.refused = history.persister.refused
        local, rendezvous = LocalClients(), LocalRendezvous()
        admission = Admission(context, local, history.persister if history is not None else None)
        senders, exports = Senders(config, block_server, rendezvous), Exports(context)
        patches = Patches(context, block_server)
        sessions = Sessions(
            context,
            settling,
            reporting=reporting,
            admission=admission,
            history=history,
            local=local,
            senders=senders,
            patches=patches.cache,
        )
        copies = Copies(context, settling, Copying(context, admission), reporting)
        writes = Writes(
            context,
            settling,
            admission=admission,
            history=history,
            copies=copies,
            proposals=Proposals(context, reporting),
        )
        reads = Reads(
            context, admission=admission, history=history, senders=senders, rendezvous=rendezvous, exports=exports
        )
        orders = Orders(context, settling, reporting=reporting, history=history, sessions=sessions, copies=copies)
        parts = (sessions, writes, reads, patches, orders, copies, Journal(context, reporting))
        self.parts: Mapping[type, object] = {type(part): part for part in parts}
        Sweep(context, settling, sessions=sessions, senders=senders, exports=exports, patches=patches.cache)
        care = context.segment_memory.page_care
        care.soon = Ticker("pages", f"shard {context.index}", lambda: LOOK_S, care.look).soon
        Ticker("gauges", f"shard {context.index}", lambda: SHOW_S, lambda: _show(context, sessions))
        reporting.start()


def _show(context: ShardContext, sessions: Sessions) -> None:
    """Set this shard's gauges in the engine's dashboard."""
    stats = sessions.stats_now()
    shown = [metric for metric in METRICS if metric.source is Source.SHARD and metric.field in SHOWN]
    gauges = {metric.name: float(getattr(stats, metric.field)) for metric in shown}
    context.engine.show(gauges, {"repository": context.config.repository, "shard": str(context.index)})


def _open_block_server(context: ShardContext) -> BlockServer | None:
    """Serve those who cannot map the memory; without it, the engine's object store does."""
    try:
        block_server = BlockServer(context)
        context.tcp_address = block_server.address
        return block_server
    except OSError as exc:
        log.warning("shard %d: the TCP server could not start: %s", context.index, exc)
        return None
