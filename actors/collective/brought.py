"""What the members bring to an operation, which must be the same on all ranks, and the error where it is not.

Rules
- A collective is the same where its kind, root, reduction, bounds, dtype and shape are. A message is where its
  size and dtype are: its shape is the receiver's own.
- What is told is compared itself, no digest of it; so what differs can be said at once, by whoever notices. Only what
  is very long is told in short, with a digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, cast
from zlib import crc32

import ml_dtypes
import numpy as np

from ...store.arrays import dtype_name
from ...store.errors import TensorMismatchError
from .links import WORDS_BYTES
from .reduction import Numbers
from .standing import ranks

_SHOWN = 160
"""Bytes of long words."""


class Brought(NamedTuple):
    """What this member brings to a collective."""

    verb: str
    """What messages call it."""
    words: bytes
    """All that must be the same on all ranks."""


def brought(verb: str, detail: str = "", of: str = "") -> Brought:
    """Put it in words.

    Args:
        verb: what it is.
        detail: how it is done.
        of: the array; see `array`.

    >>> brought("broadcast", "of rank 1", "int8 of shape (3,)").words
    b'broadcast of rank 1, int8 of shape (3,)'
    """
    raw = f"{verb}{detail and ' '}{detail}{of and ', '}{of}".encode()
    if len(raw) > WORDS_BYTES:
        raw = raw[:_SHOWN] + b"... (" + blake2b(raw, digest_size=16).hexdigest().encode() + b")"
    return Brought(verb, raw)


def array(given: object, numbers: Numbers) -> str:
    """Say dtype and shape of an array, the same for all frameworks; what has no shape is as long as its numbers.

    >>> array(np.zeros((2, 3), np.int8), Numbers(np.dtype(np.int8), 6))
    'int8 of shape (2, 3)'
    """
    shape = getattr(given, "shape", None)
    lengths = (numbers.size,) if shape is None else tuple(int(length) for length in shape)
    return f"{dtype_name(numbers.dtype)} of shape {lengths}"


def mismatch(where: str, found: Mapping[int, bytes]) -> TensorMismatchError:
    """Make the error of a collective to which ranks brought different things.

    Args:
        where: which collective of which group this member is in.
        found: what is known to have been brought, by rank.

    >>> str(mismatch("barrier", {0: b"barrier", 1: b"broadcast of rank 0, int8 of shape (1,)", 2: b"barrier"}))
    'barrier: expected the same of all ranks; found barrier at ranks 0, 2; broadcast of rank 0, int8 of shape (1,) at \
rank 1'
    """
    by_words: dict[bytes, list[int]] = {}
    for rank in sorted(found):
        by_words.setdefault(found[rank], []).append(rank)
    parts = [f"{words.decode(errors='replace')} at {ranks(numbers)}" for words, numbers in by_words.items()]
    return TensorMismatchError(f"{where}: expected the same of all ranks; found {'; '.join(parts)}")


class Content(NamedTuple):
    """What a message holds."""

    nbytes: int
    code: int
    """Its dtype's; see `code_of`."""


@lru_cache(maxsize=256)
def code_of(dtype: str) -> int:
    """Give a dtype's number, the same in all processes, in 32 bits."""
    return crc32(dtype.encode())


def unlike(where: str, sent: Content, room: Content) -> TensorMismatchError | None:
    """Compare a message with the memory that is to receive it.

    Args:
        where: which message of which group.
        sent: what the sender has.
        room: what the receiver has.

    >>> print(unlike("g", Content(8, code_of("int8")), Content(8, code_of("float32"))))
    g: expected float32; found int8
    >>> print(unlike("g", Content(8, code_of("int8")), Content(4, code_of("int8"))))
    g: expected 4 bytes; found 8 bytes
    """
    if sent == room:
        return None
    if sent.nbytes == room.nbytes:
        return TensorMismatchError(f"{where}: expected {_name_of(room.code)}; found {_name_of(sent.code)}")
    return TensorMismatchError(f"{where}: expected {room.nbytes} bytes; found {sent.nbytes} bytes")


def _name_of(code: int) -> str:
    return next((name for name in _names() if code_of(name) == code), "another dtype")


@lru_cache(maxsize=1)
def _names() -> Sequence[str]:
    """All dtypes of numbers."""
    plain = [np.dtype(kind).name for kind in "?bhilqBHILQefdgFDG"]
    kinds: list[Any] = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type)]
    return [*plain, *(np.dtype(cast(Any, kind)).name for kind in kinds if issubclass(kind, np.generic))]
