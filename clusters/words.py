"""How numbers and lists are written for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

_UNITS = ("kB", "MB", "GB", "TB", "PB")


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


def quality(value: float | None) -> str:
    """Write a quality; any number may be one.

    >>> quality(0.91449), quality(None), quality(-12345.6)
    ('0.9145', '-', '-1.235e+04')
    """
    return f"{value:.4g}" if value is not None else "-"


def moment(when: datetime | None) -> str:
    """Write a time, UTC, to the second.

    >>> from datetime import UTC
    >>> moment(datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)), moment(None)
    ('2026-05-04 03:02:01', '-')
    """
    return when.strftime("%Y-%m-%d %H:%M:%S") if when is not None else "-"


def count(number: int, noun: str) -> str:
    """Write how many there are.

    >>> count(1, "layer"), count(1234, "layer")
    ('1 layer', '1,234 layers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], width: int) -> str:
    """Write as many names as fit into `width` characters, and how many more there are.

    >>> listed(["conv1", "conv2", "dense", "head"], 20), listed(["head"], 2), listed([], 9)
    ('conv1, conv2, +2', '+1', '')
    """
    shown = len(names)
    while shown >= 0:
        left = len(names) - shown
        text = ", ".join([*names[:shown], *([f"+{left}"] if left else [])])
        if len(text) <= width or not shown:
            return text
        shown -= 1
    return ""
