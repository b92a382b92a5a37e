"""The shard actor: `store.shard.ShardState` brought to life.

Rules
- The state decides, the actor acts: it takes the lock, asks the state, and carries out what the state left. What
  concerns bytes is in `holdings`. No rule of what is kept or freed stands in the actor.
- Its methods stand by who asks: `shard_sessions`, `shard_writes`, `shard_reads`, `shard_queries` are for clients,
  `shard_peers` and `shard_changes` for the other shards and the planner; all of them act on `shard_parts`.
- Concurrency groups run in threads of their own: `ctl` for short answers, `data` for bytes, `watch` for long polls.
  Copies run in worker threads, so that no group's loop ever waits for memory.
"""

from __future__ import annotations

from .shard_changes import ShardChanges
from .shard_peers import ShardPeers
from .shard_queries import ShardQueries
from .shard_reads import ShardReads
from .shard_sessions import ShardSessions
from .shard_writes import ShardWrites


class Shard(ShardSessions, ShardWrites, ShardReads, ShardQueries, ShardPeers, ShardChanges):
    """One shard of a repository, as an actor."""
