"""The regular work of a shard: end the sessions of dead clients, and free what nobody uses.

Rules
- It waits for no other actor: a client that died is noticed within `SWEEP_S`.
"""

from __future__ import annotations

from ..rpc.ticker import Ticker
from .context import ShardContext
from .parts.sessions import Sessions
from .serving.exports import Exports
from .serving.patch_cache import PatchCache
from .serving.senders import Senders
from .settling import Settling

SWEEP_S = 0.5


class Sweep:
    """The sweep of one shard; begins at once.

    Args:
        context: the shard's.
        settling: carries out what follows.
        sessions: of the shard's clients.
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
        senders: Senders,
        exports: Exports,
        patches: PatchCache,
    ) -> None:
        self._lock = context.lock
        self._hashing = context.segment_memory.hashing
        self._settling = settling
        self._sessions = sessions
        self._senders = senders
        self._exports = exports
        self._patches = patches
        Ticker("sweep", f"shard {context.index}", lambda: SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sessions.end_lost()
        self._hashing.start()
        self._exports.drop_idle()
        self._patches.drop_idle()
        with self._lock:
            self._senders.close_idle()
        self._settling.settle()
