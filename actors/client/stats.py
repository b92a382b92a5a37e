"""What a repository holds, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...store import html
from ...store.shard import ShardStats
from ...store.sizes import size
from ..rpc.catalog_messages import CatalogStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryStats:
    """Statistics of a repository: in total, of the catalog (the actor that keeps all metadata), and of each shard."""

    models: int
    """Number of versions. Retired versions do not count."""
    tensors: int
    """Number of stored tensors. A tensor that several versions share counts once."""
    bytes_memory: int
    """Size of the tensors in memory, in bytes, without padding."""
    bytes_disk: int
    """Size of the segment files on disk, in bytes. The segment files contain the tensors."""
    catalog: CatalogStats
    """Statistics of the catalog."""
    shards: tuple[ShardStats, ...]
    """Statistics of each shard."""

    def _repr_html_(self) -> str:
        columns = ("shard", "tensors", "in memory", "capacity", "on disk", "unwritten")
        rows = [
            (
                one.shard,
                f"{one.tensors:,}",
                *map(size, (one.bytes_memory, one.capacity, one.bytes_disk)),
                size(one.bytes_unwritten),
            )
            for one in self.shards
        ]
        title = f"{self.models:,} versions, {self.tensors:,} tensors, {size(self.bytes_memory)} in memory"
        return html.table(title, columns, rows)

    @classmethod
    def of(cls, catalog: CatalogStats, shards: Sequence[ShardStats]) -> RepositoryStats:
        """Create the statistics of a repository from the statistics of its catalog and its shards."""
        return cls(
            models=catalog.models,
            tensors=sum(s.tensors for s in shards),
            bytes_memory=sum(s.bytes_memory for s in shards),
            bytes_disk=sum(s.bytes_disk for s in shards),
            catalog=catalog,
            shards=tuple(shards),
        )
