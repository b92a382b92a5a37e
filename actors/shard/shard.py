"""The shard actor: `store.shard.ShardState` brought to life by the parts that stand in this room.

Rules
- The state decides, the parts act: they take the lock, ask the state, and carry out what the state left. What concerns
  bytes is in `holdings`. No rule of what is kept or freed stands in a part.
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
from ..collective.rendezvous import LocalRendezvous
from ..engine.engine import Engine
from ..rpc.calls import answers, composed
from ..rpc.messages import Disk, ShardConfig, Tag
from ..rpc.sockets.server import LazyServer
from .calls.changes import ChangeCalls
from .context import ShardContext, open_context
from .copying import Copying
from .disk.history import History
from .handoff.claims import Claims
from .handoff.elastic import Elastic
from .handoff.estate import Estate
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
from .replicas.mirrors import Mirrors
from .replicas.securing import Securing
from .replicas.shelf import Shelf
from .restart import take_back
from .room import Room
from .serving.outlet import Outlet
from .serving.redis_board import RedisBoard
from .serving.senders import Senders
from .settling import Settling
from .sweep import Sweep

log = logging.getLogger(__name__)

DISK_PAUSE_S = 2.0


@composed([Sessions, Writes, Reads, Queries, Holders, Files, Shelf, Securing, Notes, Changes])
class Shard:
    """One shard of a repository, as an actor."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        context = open_context(engine, config)
        outlet = _open_outlet(context)
        estate = Estate(context)
        settling = Settling(context, estate)
        history = _open_history(context, config.disk, settling) if config.disk is not None else None
        local = LocalClients()
        room = Room(context, local, history.persister if history is not None else None)
        claims = Claims(context, history.recovered if history is not None else []) if context.standing else None

        def calm() -> bool:
            return claims is None or not claims.open

        strays = Strays(context, calm)
        restored = take_back(context, history)
        board = _open_board(context, config.redis) if config.redis is not None else None
        if board is not None and context.wire is not None:
            board.shard_at(*context.wire)
        rendezvous = LocalRendezvous()
        senders = Senders(config, outlet, rendezvous)
        copying = Copying(context, room)
        shelf = Shelf(context, copying, settling.settle_from_thread)
        mirrors = Mirrors(context, restored, history) if config.replicas > 1 else None
        securing = Securing(context, mirrors, history, room)
        names = self._names = Elastic(context, history, board, securing)
        server = LazyServer(self, f"shard {config.index}")
        sessions = Sessions(context, settling, local=local, senders=senders, server=server)
        writes = Writes(
            context,
            settling,
            room=room,
            history=history,
            names=names,
            estate=estate,
            securing=securing,
            board=board,
        )
        changes = Changes(
            context,
            settling,
            names=names,
            estate=estate,
            claims=claims,
            history=history,
            copying=copying,
            securing=securing,
            writes=writes,
        )
        parts = (
            sessions,
            writes,
            Reads(context, room=room, history=history, names=names, senders=senders, rendezvous=rendezvous),
            Queries(context, settling, names=names, history=history, securing=securing, shelf=shelf),
            Holders(context, settling, estate=estate, claims=claims, strays=strays),
            Files(context, settling, history, estate),
            shelf,
            securing,
            Notes(context, names),
            changes,
        )
        self.parts: Mapping[type, object] = {type(part): part for part in parts}
        if history is not None:
            history.care.start(calm)
        Sweep(context, settling, sessions=sessions, claims=claims, strays=strays, shelf=shelf, senders=senders)

    @answers(ChangeCalls.gathered)
    async def gathered(self, method: str, arguments: Sequence[Any]) -> tuple[Tag, Any]:
        before = self._names.tag()
        answer = await getattr(self, method)(*arguments)
        return (before if self._names.tag() == before else replace(before, sending=True)), answer


def _open_history(context: ShardContext, disk: Disk, settling: Settling) -> History:
    """Bring back what is on disk. A shard that starts again waits for a disk that is not there just now."""
    pause = threading.Event()
    while True:
        try:
            history = History(context, disk, settling.settle_from_thread)
            settling.also(history.tidy)
            return history
        except StorageError as exc:
            if context.standing is None:
                raise
            log.error("shard %d starts again and waits for its path: %s", context.index, exc)
            pause.wait(DISK_PAUSE_S)


def _open_outlet(context: ShardContext) -> Outlet | None:
    """Serve those who cannot map the memory; without it, the engine's object store does."""
    try:
        outlet = Outlet(context)
        context.wire = outlet.address
        return outlet
    except OSError as exc:
        log.warning("shard %d: no wire: %s", context.index, exc)
        return None


def _open_board(context: ShardContext, redis: str) -> RedisBoard:
    """Post what lives here in Redis, from now on."""
    state = context.state

    def graph_of(key: bytes) -> str:
        with context.lock:
            return state.graphs.architecture(key)[0]

    board = RedisBoard(redis, context.config, graph_of, lambda name: context.peers.topology.home(name))
    records = [state.record(ref.name, ref.version, "") for ref in state.models()]
    board.announce((record.header, record.body) for record in records)
    return board
