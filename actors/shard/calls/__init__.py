"""What a shard can be asked, declared for those who ask and for the shard.

A file here declares what the file of the same name in `shard/` answers (`peers`: `peer_calls`). Stands on the messages
of `rpc`, `transport` and `replicas` only, so that whoever calls a shard need not load one.
"""

from __future__ import annotations

from .changes import ChangeCalls
from .peers import PeerCalls
from .queries import QueryCalls
from .reads import ReadCalls
from .sessions import SessionCalls
from .writes import WriteCalls


class ShardCalls(SessionCalls, WriteCalls, ReadCalls, QueryCalls, PeerCalls, ChangeCalls):
    """All calls of a shard."""
