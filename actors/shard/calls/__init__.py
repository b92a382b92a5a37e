"""What a shard can be asked, declared for callers and for the part of the shard that answers.

Depends on the messages of `rpc` and `transport` only, so that callers of a shard need not import one.
"""

from __future__ import annotations

from .orders import OrderCalls
from .patches import PatchCalls
from .reads import ReadCalls
from .sessions import SessionCalls
from .writes import WriteCalls


class ShardCalls(SessionCalls, WriteCalls, ReadCalls, PatchCalls, OrderCalls):
    """All calls of a shard."""
