"""What a shard can be asked, declared for those who ask and for the part of the shard that answers.

Stands on the messages of `rpc` and `transport` only, so that whoever calls a shard need not load one.
"""

from __future__ import annotations

from .changes import ChangeCalls
from .files import FileCalls
from .holders import HolderCalls
from .notes import NoteCalls
from .patches import PatchCalls
from .queries import QueryCalls
from .reads import ReadCalls
from .replicas import ReplicaCalls
from .sessions import SessionCalls
from .writes import WriteCalls


class ShardCalls(
    SessionCalls,
    WriteCalls,
    ReadCalls,
    PatchCalls,
    QueryCalls,
    HolderCalls,
    FileCalls,
    ReplicaCalls,
    NoteCalls,
    ChangeCalls,
):
    """All calls of a shard."""
