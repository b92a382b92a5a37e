"""A chain of deltas in slime's format: the peer of patches.

Written from slime's documents: for each changed tensor one blob, compressed by Zstandard at level 1, with the number of
changed elements, their places as 32-bit integers, and their new values. The receiver writes them into its copy of the
version before, and compares the xxh3-128 of the result. A reader that is N versions behind replays N blobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from .measure import Tensors

NAME = "a chain in slime's format"
Words = NDArray[Any]


def bits(tensor: NDArray[Any]) -> Words:
    """View a tensor as unsigned integers."""
    return tensor.reshape(-1).view(f"u{tensor.itemsize}")


class Link:
    """One step of a chain: the changed tensors of a version, each as a blob with its hash."""

    def __init__(self, new: Tensors, old: Tensors) -> None:
        pairs = ((name, bits(tensor), bits(old[name])) for name, tensor in new.items())
        made = ((name, *_blob(after, before)) for name, after, before in pairs)
        self.blobs: dict[str, tuple[bytes, bytes]] = {name: (blob, digest) for name, blob, digest in made if blob}

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return sum(len(blob) + len(digest) for blob, digest in self.blobs.values())

    def apply(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Bring a copy of the version before up to date, in place.

        Raises:
            ValueError: if the result has another hash.
        """
        for name, (blob, digest) in self.blobs.items():
            words = bits(tensors[name])
            data = zstandard.ZstdDecompressor().decompress(blob)
            count = int.from_bytes(data[:8], "little")
            places = np.frombuffer(data, "<u4", count, 8)
            words[places] = np.frombuffer(data, words.dtype, count, 8 + 4 * count)
            if xxhash.xxh3_128_digest(words.data) != digest:
                raise ValueError(f"{name}: expected the hash of the new version; found another")


def replay(links: Sequence[Link], tensors: Mapping[str, NDArray[Any]]) -> None:
    """Apply all links."""
    for link in links:
        link.apply(tensors)


def _blob(new: Words, old: Words) -> tuple[bytes, bytes]:
    places = np.flatnonzero(new != old)
    if not len(places):
        return b"", b""
    content = len(places).to_bytes(8, "little") + places.astype("<u4").tobytes() + new[places].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(content), xxhash.xxh3_128_digest(new.data)
