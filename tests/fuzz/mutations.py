"""Damage, drawn by dice: what a reader may be given.

Rules
- All follows from the dice, which a target, a seed and a number make: the same numbers give the same input wherever the
  valid inputs are the same.
- Numbers are drawn from the borders where readers go wrong: of 1, 2, 4 and 8 bytes, of signs, and of the input's own
  length.
- Bytes know nothing of a format; `of_json` damages values and keeps the text a JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

BORDERS = (0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 32767, 32768, 65535, 65536, 1 << 20, 1 << 24)
BORDERS += (1 << 26, 1 << 29, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 62)
BORDERS += ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)
DEEP = (3, 30, 900, 1100, 20_000)
"""How deep lists are nested: Python's limit is 1000."""
_NUMBER = re.compile(rb"\d+")


def of_bytes(dice: Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Damage bytes in one to four ways.

    Args:
        dice: draws.
        content: what is damaged.
        others: inputs from which parts may be taken.

    >>> of_bytes(Random(1), b"abcdefgh") == of_bytes(Random(1), b"abcdefgh") != b"abcdefgh"
    True
    """
    found = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        dice.choice(_WAYS)(dice, found, others)
    return bytes(found)


def _flip(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    if content:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def _set(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    if content:
        content[dice.randrange(len(content))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))


def _number(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """Set what may be a length or an offset, mostly where such a field would be aligned."""
    size = dice.choice((1, 2, 4, 4, 8, 8))
    if len(content) < size:
        return
    at = dice.randrange(len(content) - size + 1)
    at -= at % size if dice.random() < 0.8 else 0
    order = dice.choice(("little", "little", "big"))
    here = int.from_bytes(content[at : at + size], order)
    value = dice.choice((here + 1, here - 1, here * 2, -here, len(content), len(content) - at, dice.choice(BORDERS)))
    content[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, order)


def _text_number(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """Set a number that is written in digits."""
    places = list(_NUMBER.finditer(content))
    if places:
        place = dice.choice(places)
        content[place.start() : place.end()] = str(dice.choice(BORDERS) * dice.choice((1, 1, -1))).encode()


def _cut_end(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    del content[dice.randrange(len(content) + 1) :]


def _cut_out(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    start = dice.randrange(len(content) + 1)
    del content[start : start + dice.choice((1, 4, 8, 64, 500))]


def _repeat(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    start, length = dice.randrange(len(content) + 1), dice.choice((1, 4, 8, 64, 500))
    content[start:start] = content[start : start + length] * dice.choice((1, 2, 20))


def _move(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """Write a part of the input, or of another one, over another part."""
    source = dice.choice((content, *others))
    start, length = dice.randrange(len(source) + 1), dice.choice((1, 4, 8, 64, 500))
    part, at = bytes(source[start : start + length]), dice.randrange(len(content) + 1)
    content[at : at + len(part)] = part


def _splice(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    """Go on as another input does."""
    other = dice.choice((content, *others))
    at = dice.randrange(len(content) + 1)
    content[at:] = other[dice.choice((at, dice.randrange(len(other) + 1))) :]


def _noise(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    at, noise = dice.randrange(len(content) + 1), dice.randbytes(dice.choice((1, 4, 8, 64)))
    content[at : at + dice.choice((0, len(noise)))] = noise


def _nest(dice: Random, content: bytearray, others: Sequence[bytes]) -> None:
    at, depth = dice.randrange(len(content) + 1), dice.choice(DEEP)
    content[at:at] = dice.choice((b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth))


_WAYS = (_flip, _flip, _set, _number, _number, _number, _number, _text_number, _cut_end, _cut_out, _repeat, _move)
_WAYS += (_splice, _noise, _nest)


# ---- values -------------------------------------------------------------------------------------------


def of_json(dice: Random, value: Any) -> Any:
    """Damage one to three values of what JSON can express; the value itself stays as it is.

    >>> of_json(Random(3), {"a": [1, 2]}) != {"a": [1, 2]}
    True
    """
    found = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 2, 3))):
        found = _damaged(dice, found)
    return found


def _damaged(dice: Random, value: Any) -> Any:
    """Damage a value, or one in it."""
    inner = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inner or dice.random() < 0.1:
        return evil(dice, value)
    key = dice.choice(inner)
    way = dice.random()
    if way < 0.08:
        del value[key]
    elif way < 0.14 and isinstance(value, list):
        value[key:key] = value[key : key + 1] * dice.choice((1, 3, 300))
    elif way < 0.14:
        value[evil_text(dice)] = value.pop(key)
    elif way < 0.2:
        value[key] = value[dice.choice(inner)]
    else:
        value[key] = _damaged(dice, value[key])
    return value


def evil(dice: Random, value: object) -> Any:
    """Return what may stand in the place of a value: mostly of its kind."""
    if isinstance(value, str) and dice.random() < 0.7:
        return evil_text(dice, value)
    if isinstance(value, int) and dice.random() < 0.7:
        return evil_number(dice, value)
    depth = dice.choice(DEEP[:3])
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    plain = (None, True, evil_number(dice), 1.5, 1e308, float("inf"), float("nan"), evil_text(dice))
    return dice.choice((*plain, [], {}, nested, [value]))


def evil_number(dice: Random, value: int = 0) -> int:
    """Return a number from a border, or beside the one that was there."""
    return dice.choice(
        (value + 1, value - 1, -value, -1, value * 2, dice.choice(BORDERS), -dice.choice(BORDERS), 10**30)
    )


def evil_text(dice: Random, value: str = "") -> str:
    """Return a text of another kind, or one that was damaged a little."""
    at = dice.randrange(len(value) + 1)
    cut = value[:at] + dice.choice(("", "\0", "\n", "/", "\ud800", "é", "@", "|", "(", "9" * 30)) + value[at + 1 :]
    whole = dice.choice(
        ("", "..", "../../x", "a" * 5000, "\0", "\ud800", "object", "V2", "datetime64", "9" * 5000, "-1")
    )
    return dice.choice((cut, cut, cut, value[:at], value * 2, whole))
