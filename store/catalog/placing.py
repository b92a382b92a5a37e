"""Which shard is to have bytes: keepers of files by rendezvous hashing, and backups in ring order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from ..segments.segment import SegmentId


def keeper_of(segment: SegmentId, shards: Sequence[int]) -> int:
    """Choose the shard that keeps a segment's file, by rendezvous hashing (Thaler and Ravishankar 1998).

    Raises:
        ValueError: there is no shard.

    >>> keeper_of((0, 255), [1]), keeper_of((0, 255), [0, 1]) == keeper_of((0, 255), [1, 0])
    (1, True)
    """
    if len(shards) == 1:
        return shards[0]
    serial = f"{segment[1]:x}".encode()
    return max(shards, key=lambda shard: (_weight(serial, shard), shard))


def backups_of(shard: int, nodes: Mapping[int, str], copies: int) -> tuple[int, ...]:
    """Choose the shards that keep a shard's copies, in ring order after it, each on a node of its own.

    Where there are fewer nodes than copies, the rest goes to shards that share one: a process can die alone, too.

    Args:
        shard: whose memory is copied.
        nodes: shard -> id of its node, of all that are there, itself among them.
        copies: how many, besides its own.

    >>> nodes = {0: "a", 1: "a", 2: "b", 3: "c"}
    >>> backups_of(0, nodes, 1), backups_of(0, nodes, 2), backups_of(3, nodes, 1), backups_of(0, nodes, 3)
    ((2,), (2, 3), (0,), (2, 3, 1))
    """
    ring = sorted((other for other in nodes if other != shard), key=lambda other: (other < shard, other))
    taken, apart = {nodes.get(shard)}, list[int]()
    for other in ring:
        if nodes[other] not in taken:
            taken.add(nodes[other])
            apart.append(other)
    rest = [other for other in ring if other not in apart]
    return tuple([*apart, *rest][:copies])


def _weight(serial: bytes, shard: int) -> bytes:
    return blake2b(serial, digest_size=8, person=b"keep" + shard.to_bytes(4, "big")).digest()
