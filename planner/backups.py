"""Which shards keep copies of another one's memory: on other nodes, if there are any."""

from __future__ import annotations

from collections.abc import Mapping


def backups_of(shard: int, nodes: Mapping[int, str], copies: int) -> tuple[int, ...]:
    """Choose the shards that keep a shard's copies, in ring order after it, each on a node of its own.

    Where there are fewer nodes than copies, the rest goes to shards that share one: a process can die alone, too.

    Args:
        shard: whose memory is copied.
        nodes: shard -> id of its node, of all that are there, itself among them.
        copies: how many, besides its own.

    Raises:
        ValueError: the shard is not among them.

    >>> nodes = {0: "a", 1: "a", 2: "b", 3: "c"}
    >>> backups_of(0, nodes, 1), backups_of(0, nodes, 2), backups_of(3, nodes, 1), backups_of(0, nodes, 3)
    ((2,), (2, 3), (0,), (2, 3, 1))
    """
    if shard not in nodes:
        raise ValueError(f"backups of shard {shard}: expected it among the shards; found {sorted(nodes)}")
    ring = sorted((other for other in nodes if other != shard), key=lambda other: (other < shard, other))
    taken, apart = {nodes[shard]}, list[int]()
    for other in ring:
        if nodes[other] not in taken:
            taken.add(nodes[other])
            apart.append(other)
    rest = [other for other in ring if other not in apart]
    return tuple([*apart, *rest][:copies])
