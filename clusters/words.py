"""Numbers, qualities and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime


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
