"""Where things live: rendezvous hashing.

Every name has a home shard: the one with the highest hash of (name, shard). When a shard joins or leaves,
only the names whose highest hash changes move (Thaler and Ravishankar 1998).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b


def home_of(name: str, shards: Sequence[int]) -> int:
    """Return the number of a model's home shard, which stores the metadata of all versions of the model.

    The home shard is chosen by rendezvous hashing of the name. If a shard joins or leaves, most models keep their home.

    Args:
        name: Name of the model.
        shards: Numbers of the available shards, in any order.

    Raises:
        ValueError: if there are no shards.

    >>> home_of("digits", [0]), home_of("digits", [0, 1, 2]) == home_of("digits", [2, 1, 0])
    (0, True)
    """
    if not shards:
        raise ValueError(f"home of {name!r}: expected at least one shard; found none")
    if len(shards) == 1:
        return shards[0]
    return max(shards, key=lambda shard: (_weight(name, shard), shard))


def keeper_of(segment: tuple[int, int], shards: Sequence[int]) -> int:
    """Choose the shard that takes a segment over from one that drains.

    Args:
        segment: its id.
        shards: those that stay.

    Raises:
        ValueError: there is no shard.

    >>> keeper_of((3, 255), [1]), keeper_of((3, 255), [0, 1]) == keeper_of((3, 255), [1, 0])
    (1, True)
    """
    return home_of(f"{segment[0]}/{segment[1]:x}", shards)


def holder_of(segment: tuple[int, int], gone: Mapping[int, Sequence[int]]) -> int:
    """Return the shard that holds a segment: the one that made it, or who took it over when that one drained.

    Args:
        segment: its id.
        gone: shard that drained -> those that took its segments over; none of them had drained before it. Whoever
            reads such a table from elsewhere checks that.

    >>> holder_of((3, 255), {}), holder_of((3, 255), {3: [1], 1: [0]})
    (3, 0)
    """
    shard = segment[0]
    while shard in gone:
        shard = keeper_of(segment, gone[shard])
    return shard


def _weight(name: str, shard: int) -> bytes:
    return blake2b(name.encode(), digest_size=8, person=b"home" + shard.to_bytes(4, "big")).digest()
