"""The regular work of a shard: end the sessions of dead clients, and free unused memory and files.

Rules
- Ending sessions waits for no other shard: a client that died is noticed within `SWEEP_S`, however many are silent.
  Questions to other shards have a thread of their own.
"""

from __future__ import annotations

from .context import ShardContext
from .handoff.reconciliation import Reconciliation
from .handoff.strays import Strays
from .parts.sessions import Sessions
from .replicas.replica_store import ReplicaStore
from .serving.exports import Exports
from .serving.patch_cache import PatchCache
from .serving.senders import Senders
from .settling import Settling
from .ticker import Ticker

SWEEP_S = 0.5


class Sweep:
    """The sweep of one shard; begins at once.

    Args:
        context: the shard's.
        settling: carries out what follows.
        sessions: of the shard's clients.
        reconciliation: what other homes name here, where they must still be asked.
        strays: holders here that may be no version's.
        replica_store: copies of other shards, which may have drained.
        senders: have groups that may be idle.
        exports: blocks in the object store that may be idle.
        patches: that may be idle.
    """

    def __init__(
        self,
        context: ShardContext,
        settling: Settling,
        *,
        sessions: Sessions,
        reconciliation: Reconciliation | None,
        strays: Strays,
        replica_store: ReplicaStore,
        senders: Senders,
        exports: Exports,
        patches: PatchCache,
    ) -> None:
        self._lock = context.lock
        self._segment_memory = context.segment_memory
        self._peers = context.peers
        self._settling = settling
        self._sessions = sessions
        self._reconciliation = reconciliation
        self._strays = strays
        self._replica_store = replica_store
        self._senders = senders
        self._exports = exports
        self._patches = patches
        for what, step in (("sweep", self._sweep), ("ask", self._ask_others)):
            Ticker(what, f"shard {context.index}", lambda: SWEEP_S, step)

    def _ask_others(self) -> None:
        if self._reconciliation is not None and self._reconciliation.open and not self._peers.topology.former:
            self._reconciliation.gather()
        self._strays.look()
        self._settling.settle_from_thread()

    def _sweep(self) -> None:
        self._sessions.end_lost()
        self._segment_memory.hashing.start()
        self._exports.drop_idle()
        self._patches.drop_idle()
        topology = self._peers.topology
        with self._lock:
            self._replica_store.forget(topology.gone.keys() - set(topology.alive))
            self._senders.close_idle()
        self._settling.settle_from_thread()
        self._settling.tell_left()
