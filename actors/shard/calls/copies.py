"""What is said of a segment that one shard copies from another."""

from __future__ import annotations

from dataclasses import dataclass

from ...rpc.redis_keys import Address

__all__ = ["Address", "Original"]


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
