"""Comparison of two versions: matching layers, and the state of each tensor.

Rules
- Layers of the longest common prefix match. Of the others, those with the same name do.
- Tensors of matching layers are paired in their order, if there are as many, and else by name; other tensors by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...actors.client.repository import Repository
from ...store.graphs.graph import Layer, ModelGraph
from ...store.refs import ModelRef
from .differences import Difference, differences, sizes

REST = "(tensors of no layer)"


@dataclass(slots=True)
class Row:
    """Two matching layers, or one layer without a match."""

    a: Layer | None
    b: Layer | None
    match: str
    """"prefix", "name", "new", "gone" or "rest"."""
    pairs: list[tuple[str | None, str | None]] = field(default_factory=list[tuple[str | None, str | None]])
    """Tensors of both."""


def compare(repository: Repository, a: ModelRef, b: ModelRef) -> dict[str, object]:
    """Compare two versions.

    Raises:
        TensorVineError: the errors of `Repository.graph` and `Repository.load`.
    """
    owners = repository.owners(a), repository.owners(b)
    rows = matched(repository.graph(a), repository.graph(b), *owners)
    both = [(old, new) for row in rows for old, new in row.pairs if old is not None and new is not None]
    found = dict(zip(both, differences(repository, a, b, both), strict=True))
    gone = sizes(repository, a, [old for row in rows for old, new in row.pairs if old is not None and new is None])
    fresh = sizes(repository, b, [new for row in rows for old, new in row.pairs if new is not None and old is None])
    listed = [_row(row, [_tensor(pair, found, gone, fresh, owners) for pair in row.pairs]) for row in rows]
    return {"a": str(a), "b": str(b), "summary": _summary(listed), "layers": listed}


def matched(a: ModelGraph, b: ModelGraph, in_a: Iterable[str], in_b: Iterable[str]) -> list[Row]:
    """Return the rows of a comparison: the layers of `b` in order, those that only `a` has, and the other tensors.

    Args:
        a, b: the architectures.
        in_a, in_b: names of the tensors of both versions.
    """
    prefix = b.common_prefix(a)
    taken, rows = set(prefix.values()), list[Row]()
    for layer in b.layers:
        if (name := prefix.get(layer.name)) is not None:
            rows.append(_paired(a.by_name[name], layer, "prefix"))
        elif layer.name in a.by_name and layer.name not in taken:
            taken.add(layer.name)
            rows.append(_paired(a.by_name[layer.name], layer, "name"))
        else:
            rows.append(Row(None, layer, "new", [(None, name) for name in layer.tensors]))
    rows += [Row(old, None, "gone", [(n, None) for n in old.tensors]) for old in a.layers if old.name not in taken]
    left = [name for name in in_a if name not in set(a.tensors)], [name for name in in_b if name not in set(b.tensors)]
    if left[0] or left[1]:
        rows.append(Row(None, None, "rest", _by_name(*left)))
    known = set(in_a), set(in_b)
    for row in rows:  # a version may lack tensors of its architecture
        row.pairs = [pair for old, new in row.pairs if (pair := _kept(old, new, *known)) != (None, None)]
    return rows


def _paired(a: Layer, b: Layer, match: str) -> Row:
    same = len(a.tensors) == len(b.tensors)
    return Row(a, b, match, list(zip(a.tensors, b.tensors, strict=True)) if same else _by_name(a.tensors, b.tensors))


def _by_name(a: Sequence[str], b: Sequence[str]) -> list[tuple[str | None, str | None]]:
    olds, news = set(a), set(b)
    pairs: list[tuple[str | None, str | None]] = [(name if name in olds else None, name) for name in b]
    return pairs + [(name, None) for name in a if name not in news]


def _kept(old: str | None, new: str | None, in_a: set[str], in_b: set[str]) -> tuple[str | None, str | None]:
    return old if old in in_a else None, new if new in in_b else None


def _tensor(
    pair: tuple[str | None, str | None],
    found: Mapping[tuple[str, str], Difference],
    gone: Mapping[str, tuple[str, tuple[int, ...], int]],
    fresh: Mapping[str, tuple[str, tuple[int, ...], int]],
    owners: tuple[Mapping[str, ModelRef], Mapping[str, ModelRef]],
) -> dict[str, object]:
    old, new = pair
    row: dict[str, object] = {"a": old, "b": new}
    row |= {"owner_a": owners[0].get(old) if old else None, "owner_b": owners[1].get(new) if new else None}
    if old is not None and new is not None:
        told = found[old, new]
        return row | {"state": "equal" if told.equal else "changed"} | asdict(told)
    dtype, shape, nbytes = gone[old] if old is not None else fresh[new or ""]
    row |= {"state": "gone" if new is None else "new", "dtypes": [dtype], "shapes": [shape], "nbytes": nbytes}
    return row


def _row(row: Row, tensors: list[dict[str, object]]) -> dict[str, object]:
    layer = row.b or row.a
    return {
        "match": row.match,
        "a": row.a.name if row.a else None,
        "b": row.b.name if row.b else None,
        "class": layer.config.get("class", "-") if layer else REST,
        "config": list(_config(row.a, row.b)),
        "tensors": tensors,
    }


def _config(a: Layer | None, b: Layer | None) -> Iterator[dict[str, object]]:
    """Yield the keys of which two layers have other values."""
    if a is None or b is None:
        return
    for key in sorted({*a.config, *b.config}):
        old, new = a.config.get(key), b.config.get(key)
        if old != new:
            yield {"key": key, "a": old, "b": new}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    states = ("equal", "changed", "new", "gone")
    tensors = [tensor for row in rows for tensor in row["tensors"]]
    return {
        "layers": {match: sum(row["match"] == match for row in rows) for match in ("prefix", "name", "new", "gone")},
        "tensors": {state: sum(tensor["state"] == state for tensor in tensors) for state in states},
        "bytes": {state: sum(tensor["nbytes"] for tensor in tensors if tensor["state"] == state) for state in states},
    }
