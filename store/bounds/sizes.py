"""Numbers of bytes as people write them: "4GB", "512MiB", 1000."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from ..errors import OptionError

_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_BYTES = {"": 1, "b": 1} | {
    unit.lower(): base**power
    for power, prefix in enumerate("kMGTP", 1)
    for unit, base in ((f"{prefix}B", 1000), (f"{prefix}iB", 1024))
}
"""Unit -> its bytes."""


def bytes_of(text: str) -> int:
    """Read a number of bytes.

    Raises:
        OptionError: it is none.

    >>> bytes_of("4GB"), bytes_of("512MiB"), bytes_of("2.3 MB"), bytes_of("1000")
    (4000000000, 536870912, 2300000, 1000)
    """
    match = _SIZE.fullmatch(text)
    unit = _BYTES.get(match[2].lower()) if match is not None else None
    if match is None or unit is None or (unit == 1 and "." in match[1]):
        raise OptionError(f"expected bytes, such as 1000, 4GB (of 1000) or 512MiB (of 1024); found {text!r:.100}")
    return round(Fraction(match[1]) * unit)


def check_bytes(what: str, value: SupportsIndex | str, least: int = 0) -> int:
    """Return a number of bytes that is given as an integer or as text.

    Args:
        what: names it in errors.
        value: what is given.
        least: the least that it may be.

    Raises:
        OptionError: it is neither, or less than `least`.

    >>> check_bytes("store_bytes", "200MB", 1)
    200000000
    """
    try:
        found = bytes_of(value) if isinstance(value, str) else operator.index(value)
    except (OptionError, TypeError) as exc:
        expected = "expected an integer or text such as '200MB' or '512MiB'"
        raise OptionError(f"{what}: {expected}; found {value!r:.100}") from exc
    if isinstance(value, bool) or found < least:
        raise OptionError(f"{what}: expected at least {least} bytes; found {value!r:.100}")
    return found
