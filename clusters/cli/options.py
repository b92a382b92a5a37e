"""Options that are written as text: sizes, policies, seconds.

Rules
- What is written wrongly is wrong usage: it is said with the option's name before anything is started or asked.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from functools import reduce
from typing import TYPE_CHECKING, Annotated

import typer

from ...store.sizes import bytes_of
from .. import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...planner.scaling import ScalePolicy
    from ...store.versions.retention import Retention

_POLICY = re.compile(r"\s*([a-z]+)\(([^()]*)\)\s*")


def check_seconds(value: float, least: float = 0.0) -> float:
    """Refuse what is no number of seconds, or less than `least`.

    Raises:
        typer.BadParameter: says so.
    """
    if math.isnan(value) or value < least:
        raise typer.BadParameter(f"expected at least {least:g} seconds; found {value:g}")
    return value


def _from_zero(value: float) -> float:
    return check_seconds(value)


Timeout = Annotated[
    float, typer.Option(help="Timeout in seconds. inf means no limit.", callback=_from_zero, metavar="SECONDS")
]


def bytes_from(text: str, option: str, least: int = 0) -> int:
    """Read a size such as 4GB.

    Raises:
        typer.BadParameter: it is none, or less than `least` bytes.
    """
    try:
        found = bytes_of(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint=option) from exc
    if found < least:
        raise typer.BadParameter(f"expected at least {words.count(least, 'byte')}; found {text!r}", param_hint=option)
    return found


def keep_from(text: str) -> Retention:
    """Read which versions of a name stay in memory, such as "last(3)|best(1)".

    Raises:
        typer.BadParameter: the text names no policy.

    >>> keep_from("last(3)|bytes(4GB)").policies
    (KeepLast(n=3), KeepBytes(nbytes=4000000000))
    """
    from ...store.versions.retention import KeepBest, KeepBytes, KeepEvery, KeepLast

    kinds: dict[str, Callable[[str], Retention]] = {
        "last": lambda n: KeepLast(int(n)),
        "best": lambda n: KeepBest(int(n)),
        "every": lambda n: KeepEvery(int(n)),
        "bytes": lambda size: KeepBytes(bytes_of(size)),
    }
    found: list[Retention] = []
    for part in text.split("|"):
        match = _POLICY.fullmatch(part)
        make = kinds.get(match[1]) if match is not None else None
        try:
            if match is None or make is None:
                raise ValueError("not a policy")
            found.append(make(match[2]))
        except ValueError as exc:
            expected = "expected last(N), best(N), every(N) or bytes(SIZE), joined by '|', with N of at least 1"
            raise typer.BadParameter(f"{expected}; found {part!r:.100} in {text!r:.100}", param_hint="--keep") from exc
    return reduce(lambda one, other: one | other, found)


def nodes_from(text: str) -> dict[str, float | str]:
    """Read what a node must have to hold a shard, such as "tensorvine=1,zone=a".

    A number is an amount of a resource, all else the value of a label; so no label can be asked for whose value is a
    number.

    Raises:
        typer.BadParameter: it is no such list.

    >>> nodes_from("tensorvine=1, ray.io/market-type=on-demand")
    {'tensorvine': 1.0, 'ray.io/market-type': 'on-demand'}
    """
    from ...planner.membership import check_rule

    rule: dict[str, float | str] = {}
    for part in text.split(","):
        name, sign, value = (word.strip() for word in part.partition("="))
        if not sign or name in rule:
            message = "expected RESOURCE=AMOUNT or LABEL=VALUE, each once, joined by ','; found "
            hint = f"; to wait for {name} nodes, use --wait-nodes {name}" if name.isdigit() else ""
            raise typer.BadParameter(f"{message}{part!r:.100}{hint}", param_hint="--nodes")
        try:
            rule[name] = float(value)
        except ValueError:
            rule[name] = value
    try:
        return check_rule(rule)
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--nodes") from exc


def count_from(text: str) -> int | None:
    """Read how many shards there are to be; None: one on each node.

    Raises:
        typer.BadParameter: it is no number from 1, and not "per-node".

    >>> count_from("3"), count_from("per-node")
    (3, None)
    """
    if text == "per-node":
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text):
        raise typer.BadParameter(f"expected a number of at least 1, or per-node; found {text!r:.100}", param_hint="N")
    return int(text)


def redis_from(url: str) -> str:
    """Look whether this is the URL of a Redis server, and give it back; the message shows no password.

    Raises:
        typer.BadParameter: it is none.
    """
    from ...actors.rpc.redis_connection import where_is

    try:
        where_is(url, "up")
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--redis") from exc
    return url


def scaling_from(text: str) -> ScalePolicy:
    """Read when shards join and drain, such as "least=1,most=8,full=0.75".

    Raises:
        typer.BadParameter: a name or a value is none that the policy has.

    >>> scaling_from("least=2, most=8").bound(nodes=3)
    8
    """
    from ...planner.scaling import ScalePolicy

    kinds = {field.name: float if field.type == "float" else int for field in fields(ScalePolicy)}
    given: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = (word.strip() for word in part.partition("="))
        try:
            if not sign or name not in kinds or name in given:
                raise ValueError("not a field of the policy, or given twice")
            given[name] = kinds[name](value)
        except ValueError as exc:
            expected = ", ".join(f"{known}={'N' if kind is int else 'NUMBER'}" for known, kind in kinds.items())
            message = f"expected some of {expected}, each once, joined by ','; found {part!r:.100}"
            raise typer.BadParameter(message, param_hint="--scaling") from exc
    try:
        return ScalePolicy(**given)  # pyright: ignore[reportArgumentType]  # of the kinds of its fields
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--scaling") from exc
