"""Numbers of bytes as people read and write them: "4GB", "512MiB", 1000."""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from .errors import OptionError

_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_BYTES = {"": 1, "b": 1} | {
    unit.lower(): base**power
    for power, prefix in enumerate("kMGTP", 1)
    for unit, base in ((f"{prefix}B", 1000), (f"{prefix}iB", 1024))
}
"""Unit -> its bytes."""


def size(count: int | None) -> str:
    """Write a number of bytes.

    >>> size(0), size(999), size(5_140), size(2_345_678), size(None)
    ('0', '999 B', '5.1 kB', '2.3 MB', '-')
    """
    if count is None:
        return "-"
    if count < 1000:
        return f"{count} B" if count else "0"
    amount, power = count / 1000, 0
    while amount >= 999.95 and power < len(_UNITS) - 1:
        amount, power = amount / 1000, power + 1
    return f"{amount:.1f} {_UNITS[power]}"


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
