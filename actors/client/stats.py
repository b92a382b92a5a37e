"""What a repository holds, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...store.shard import ShardStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryStats:
    """What a repository holds, in all and per shard."""

    models: int
    """Live versions."""
    tensors: int
    """Stored tensors, each once however many versions share it."""
    bytes_memory: int
    """Bytes of those tensors that are in memory."""
    bytes_disk: int
    """Bytes of the files that hold tensors."""
    shards: tuple[ShardStats, ...]

    @classmethod
    def of(cls, shards: Sequence[ShardStats]) -> RepositoryStats:
        """Sum up what the shards hold."""
        return cls(
            models=sum(s.models for s in shards),
            tensors=sum(s.tensors for s in shards),
            bytes_memory=sum(s.bytes_memory for s in shards),
            bytes_disk=sum(s.bytes_disk for s in shards),
            shards=tuple(shards),
        )
