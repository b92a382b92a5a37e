"""Logs of version numbers, as earlier versions of TensorVine wrote them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from tensorvine.store.refs import ModelRef


def encoded(refs: Iterable[ModelRef]) -> bytes:
    """Return the lines of versions."""
    texts = [str(ref).encode() for ref in refs]
    return b"".join(b"\n%08x %b" % (zlib.crc32(text), text) for text in texts)
