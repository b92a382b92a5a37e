"""The shard actor: `store.shard.ShardState` brought to life.

Rules
- The state decides, the actor acts: it takes the lock, asks the state, and carries out what the state left. What
  concerns bytes is in `holdings`. No rule of what is kept or freed stands in the actor.
- Its methods stand by who asks: `sessions`, `writes`, `reads`, `queries` are for clients, `peer_calls` and `changes`
  for the other shards and the planner; all of them act on `parts`.
- Concurrency groups run in threads of their own: `ctl` for short answers, `data` for bytes, `watch` for long polls.
  Copies run in worker threads, so that no group's loop ever waits for memory.
"""

from __future__ import annotations

from .changes import ShardChanges
from .peer_calls import ShardPeers
from .queries import ShardQueries
from .reads import ShardReads
from .sessions import ShardSessions
from .writes import ShardWrites


class Shard(ShardSessions, ShardWrites, ShardReads, ShardQueries, ShardPeers, ShardChanges):
    """One shard of a repository, as an actor."""
