"""Zlib's streams that somebody else wrote: they are stopped where they say more than they may."""

from __future__ import annotations

import zlib

from ..errors import CorruptDataError


def inflated(content: bytes, limit: int, what: str) -> bytes:
    """Decompress a whole zlib stream.

    Args:
        content: the stream, and nothing behind it.
        limit: bytes that it may hold.
        what: names it in errors.

    Raises:
        CorruptDataError: it is none, or holds more.

    >>> inflated(zlib.compress(b"abc"), 3, "m")
    b'abc'
    >>> inflated(zlib.compress(bytes(1000)), 999, "m")
    Traceback (most recent call last):
    tensorvine.store.errors.CorruptDataError: m: expected at most 999 bytes in a zlib stream of 17; found more
    """
    running = zlib.decompressobj()
    try:
        found = running.decompress(content, limit + 1)
    except zlib.error as exc:
        raise CorruptDataError(f"{what}: expected a zlib stream; found {exc}") from exc
    if len(found) > limit:
        raise CorruptDataError(f"{what}: expected at most {limit} bytes in a zlib stream of {len(content)}; found more")
    if not running.eof or running.unused_data:
        raise CorruptDataError(f"{what}: expected one whole zlib stream; found {len(content)} other bytes")
    return found
