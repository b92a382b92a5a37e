"""What is said of bytes that a shard is to fetch: another shard's segment, or a piece of a tensor that is saved."""

from __future__ import annotations

from dataclasses import dataclass

from ....store.segments.segment import Label
from ...rpc.redis_keys import Address

__all__ = ["Address", "Original", "Piece"]


@dataclass(frozen=True, slots=True)
class Original:
    """A segment that is to be copied."""

    sizes: tuple[int, ...]
    """Bytes of all its slots."""
    slots: tuple[int, ...]
    """Those that are there, in ascending order."""
    data: bytes | None
    """The bytes of these, laid out as `segment.layout` does it, where they are few or cannot be read there; None: they
    are at the source's address."""
    labels: tuple[Label, ...] = ()
    """For its file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor, in C order, that is to be fetched to where the tensor is put together."""

    offset: int
    """Where the tensor starts in its part of the shard's memory."""
    shape: tuple[int, ...]
    """The tensor's, with the bytes of an element as its last axis."""
    start: tuple[int, ...]
    """Where the slice starts, in each axis."""
    stop: tuple[int, ...]
    """Where it ends."""
    data: bytes | None
    """Its bytes, where they are few or cannot be read there; None: they are at the source's address."""
