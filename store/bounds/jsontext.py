"""JSON text that somebody else wrote.

Rules
- Python takes up to 45 times the bytes of a text for what it says: `[[[]]]` is one list of 88 bytes per two bytes. So
  what a text would take is estimated first, from the characters that make structure.
- Nobody sees a RecursionError or an OverflowError of it: whatever is wrong with it is one kind of error.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from ..errors import CorruptDataError
from .allowance import SPARE_BYTES, allowed

_WORST = 45
"""Bytes of objects per byte of text, at most."""
_STRUCTURE = (("[", 96), ("{", 256), (",", 72), (":", 72))
"""Bytes that a list, an object, a further item and a value take."""
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def parsed(text: str | bytes | bytearray, what: str, limit: int | None = None, *, once: bool = False) -> Any:
    """Read a text.

    Args:
        text: the JSON; bytes are UTF-8.
        what: names it in errors.
        limit: bytes that what it says may take; None: as many as `allowed` for its length.
        once: refuse a key that an object has twice; else the last one counts.

    Raises:
        CorruptDataError: it is no JSON, or says too much.

    >>> parsed('{"format": 1}', "m")
    {'format': 1}
    >>> parsed("[1", "m")
    Traceback (most recent call last):
    tensorvine.store.errors.CorruptDataError: m: expected JSON; found Expecting ',' delimiter: line 1 column 3 (char 2)
    """
    try:
        plain = text if isinstance(text, str) else str(text, "utf-8", "surrogatepass")
        check(plain, what, allowed(len(text)) if limit is None else limit)
        return json.loads(plain, object_pairs_hook=_once if once else None)
    except CorruptDataError:
        raise
    except (ValueError, OverflowError, RecursionError) as exc:
        raise CorruptDataError(f"{what}: expected JSON; found {exc}") from exc


def mapping(
    text: str | bytes | bytearray, what: str, limit: int | None = None, *, once: bool = False
) -> dict[str, Any]:
    """Read a text that is a JSON object; arguments and errors as of `parsed`."""
    found = parsed(text, what, limit, once=once)
    if not isinstance(found, dict):
        raise CorruptDataError(f"{what}: expected a JSON object; found {type(found).__name__}")
    return cast("dict[str, Any]", found)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.100} twice in one object")
    return found


def check(text: str, what: str, limit: int) -> None:
    """Refuse a text whose objects would take more than so many bytes.

    Raises:
        CorruptDataError: they would.
    """
    if _WORST * len(text) <= min(limit, SPARE_BYTES):
        return
    if (needed := memory_of(text)) > limit:
        raise CorruptDataError(f"{what}: expected JSON that takes at most {limit} bytes of memory; found {needed}")


def memory_of(text: str) -> int:
    """Estimate the bytes that what a text says takes as Python's objects: not less than it is.

    >>> memory_of("[[[]]]"), memory_of('["[[["]')
    (300, 110)
    """
    needed = sum(size * text.count(mark) for mark, size in _STRUCTURE)
    # What stands in strings makes no structure. Looking for strings takes long, so only where it may decide.
    if needed > SPARE_BYTES or len(text) < 1 << 10:
        inside = (found[0] for found in _STRING.finditer(text))
        needed -= sum(size * part.count(mark) for part in inside for mark, size in _STRUCTURE)
    wide = not text.isascii() or "\\u" in text
    return needed + (7 if wide else 2) * len(text)
