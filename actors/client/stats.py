"""What a repository holds, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...store import html
from ...store.shard import ShardStats
from ...store.sizes import size


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryStats:
    """Statistics of a repository, in total and per shard."""

    models: int
    """Number of versions. Retired versions do not count."""
    tensors: int
    """Number of stored tensors. A tensor that several versions share counts once."""
    bytes_memory: int
    """Size of the tensors in memory, in bytes, without padding."""
    bytes_disk: int
    """Size of the segment files on disk, in bytes. The segment files contain the tensors."""
    shards: tuple[ShardStats, ...]
    """Statistics of each shard."""

    def _repr_html_(self) -> str:
        columns = ("shard", "versions", "tensors", "in memory", "capacity", "on disk", "unwritten")
        rows = [
            (
                one.shard,
                f"{one.models:,}",
                f"{one.tensors:,}",
                *map(size, (one.bytes_memory, one.capacity, one.bytes_disk)),
                one.versions_unwritten,
            )
            for one in self.shards
        ]
        title = f"{self.models:,} versions, {self.tensors:,} tensors, {size(self.bytes_memory)} in memory"
        return html.table(title, columns, rows)

    @classmethod
    def of(cls, shards: Sequence[ShardStats]) -> RepositoryStats:
        """Create the statistics of a repository from the statistics of its shards."""
        return cls(
            models=sum(s.models for s in shards),
            tensors=sum(s.tensors for s in shards),
            bytes_memory=sum(s.bytes_memory for s in shards),
            bytes_disk=sum(s.bytes_disk for s in shards),
            shards=tuple(shards),
        )
