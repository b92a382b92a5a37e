"""What a save is asked for, and what can be said of it without asking anybody.

Rules
- A request is checked when it is made, and nothing of it changes after that.
- What is inherited by layers is told by the two graphs and the parent's table alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import numpy as np

from ....store import html
from ....store.arrays import as_bytes, as_numpy, dtype_name
from ....store.bounds import jsontext
from ....store.errors import CorruptDataError, GraphError, OptionError, TensorMismatchError
from ....store.graphs.graph import ModelGraph
from ....store.refs import Model, ModelRef, Which, check_name, split_ref
from ....store.sizes import size
from ....store.versions.manifest import TensorEntry
from ....store.waiting import Deadline
from .place import Place

PROBE_BYTES = 4096
NAME_MOST = 4096
"""Characters that the name of a tensor may have: names take memory of the shard beyond its capacity."""
COMPARE_BYTES = 1 << 20
"""Tensors are compared in pieces: a small one, since most differ there, then of this size."""
ODD_DEPTH = 20
"""How many keys one after the other an error about metadata names at most."""
Inherit = Mapping[str, str] | Literal["auto"] | None
Bring = Callable[[Mapping[str, Place], Deadline], None]
"""Returns when each tensor is in its place."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save: the new version, and the numbers of bytes written and inherited."""

    ref: ModelRef
    """The new version."""
    bytes_written: int
    """Bytes of the tensors that the save wrote."""
    bytes_inherited: int
    """Bytes of the tensors that the new version shares with its ancestors."""

    def _repr_html_(self) -> str:
        sizes = (("written", size(self.bytes_written)), ("inherited", size(self.bytes_inherited)))
        return html.facts(f"Saved {self.ref}", sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A checked call of `Repository.save`."""

    name: str
    arrays: Mapping[str, np.ndarray]
    graph: ModelGraph | None
    parent: tuple[str, Which] | None
    """None: the latest version of `name`, if there is one."""
    inherit: Inherit
    quality: float | None
    metadata: str
    recipe: str | None
    deadline: Deadline
    """Of all of it, from when it was asked for: what it waits for earlier saves counts."""
    durable: bool = False
    """On disk before it is committed."""
    bring: Bring | None = None
    """Has other processes bring the tensors; `arrays` are like them. All is written: `inherit` is None."""


class Said(dict[str, Any]):
    """Metadata that a file says: older versions wrote NaN and infinity, which are kept."""


class SaveOptions(TypedDict, total=False):
    """The further arguments of `requested`: those of `Repository.save`, and what its callers within add."""

    recipe: str | None
    parent: Model | None
    inherit: Inherit
    quality: float | None
    metadata: Mapping[str, object] | None
    durability: str
    timeout: float
    bring: Bring | None


def requested(
    name: str,
    tensors: Mapping[str, object],
    graph: ModelGraph | None,
    *,
    recipe: str | None = None,
    parent: Model | None = None,
    inherit: Inherit = "auto",
    quality: float | None = None,
    metadata: Mapping[str, object] | None = None,
    durability: str = "memory",
    timeout: float = 60.0,
    bring: Bring | None = None,
) -> SaveRequest:
    """Check what a save was asked for.

    Raises:
        InvalidNameError, GraphError, TensorMismatchError, OptionError: an argument is wrong.
    """
    where = f"save of {check_name(name)!r}"
    if graph is not None and not isinstance(graph, ModelGraph):
        raise GraphError(f"{where}: graph: expected a ModelGraph; found {type(graph).__name__}")
    if not (inherit is None or inherit == "auto" or isinstance(inherit, Mapping)):
        raise GraphError(f"{where}: inherit: expected 'auto', a mapping of layers or None; found {inherit!r}")
    if isinstance(inherit, Mapping) and graph is None and inherit:
        raise GraphError(f"{where}: inherit: expected graph= with a mapping of layers; found none")
    if durability not in ("memory", "disk"):
        raise OptionError(f"{where}: durability: expected 'memory' or 'disk'; found {durability!r}")
    return SaveRequest(
        name=name,
        arrays=_arrays_of(tensors, where),
        graph=graph,
        parent=split_ref(parent) if parent is not None else None,
        inherit=inherit,
        quality=quality_of(quality, f"{where}: quality"),
        metadata=_metadata_text(name, metadata),
        recipe=recipe,
        deadline=Deadline.after(timeout),
        durable=durability == "disk",
        bring=bring,
    )


def _arrays_of(tensors: Mapping[str, object], where: str) -> dict[str, np.ndarray]:
    """Return a caller's tensors as NumPy arrays, without a copy where that can be.

    Raises:
        TensorMismatchError: they are none, or their names are no Unicode text; `where` begins the message.
    """
    if not isinstance(tensors, Mapping):
        raise TensorMismatchError(
            f"{where}: tensors: expected a mapping of names to arrays; found {type(tensors).__name__}"
        )
    arrays: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not name or not _is_text(name):
            raise TensorMismatchError(f"{where}: tensors: expected non-empty Unicode strings as names; found {name!r}")
        if len(name) > NAME_MOST:
            raise TensorMismatchError(
                f"{where}: tensors: expected names of at most {NAME_MOST} characters; found {len(name)}, "
                f"{name[:40]!r}..."
            )
        arrays[name] = as_numpy(value, f"{where}: tensor {name!r}")
    return arrays


def _is_text(name: str) -> bool:
    """Tell whether a name can be written as UTF-8: half a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def quality_of(quality: object, where: str) -> float | None:
    """Return a quality as the number that it is; NaN ranks below every number, as none does.

    Raises:
        TensorMismatchError: it is no number, or larger than a float can be; `where` begins the message.
    """
    try:
        return None if quality is None else float(cast(Any, quality))
    except (OverflowError, RuntimeError, TypeError, ValueError) as exc:
        raise TensorMismatchError(f"{where}: expected a number that a float can hold, or None; {exc}") from exc


def _metadata_text(name: str, metadata: Mapping[str, object] | None) -> str:
    """Write the user's metadata as JSON. Scalars of NumPy are written as the numbers that they are.

    Raises:
        TensorMismatchError: it is no mapping of JSON values, has NaN or infinity, which JSON has not, or keys that
            are one text; or takes too much memory. Names the key.
    """
    said = isinstance(metadata, Said)
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=said, default=_plain)
        jsontext.parsed(text, "metadata", once=True)  # else nobody could read it again
        return text
    except (CorruptDataError, OverflowError, RecursionError, TypeError, ValueError) as exc:
        odd = _odd_key(metadata, said)
        expected = f"{odd}: expected a JSON value" if odd else ": expected a mapping of JSON values"
        raise TensorMismatchError(f"save of {name!r}: metadata{expected}; {exc}") from exc


def _plain(value: object) -> float:
    """Return the Python number that a scalar of NumPy is, for JSON."""
    plain: object = cast(Any, value).item() if isinstance(value, np.generic) else None
    if isinstance(plain, bool | int | float):
        return plain
    raise TypeError(f"found {type(cast(object, value)).__name__}")


def _odd_key(value: object, said: bool, depth: int = 0) -> str:
    """Return where in a value the first one is that JSON does not have, such as "['history'][3]"."""
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
    elif isinstance(value, list | tuple):
        entries = enumerate(cast("Sequence[object]", value))
    for key, item in entries if depth < ODD_DEPTH else ():
        try:
            json.dumps({key: item}, allow_nan=said, default=_plain)
        except (OverflowError, RecursionError, TypeError, ValueError):
            return f"[{key!r:.100}]{_odd_key(item, said, depth + 1)}"
    return ""


def inherit_layers(
    request: SaveRequest,
    graph: ModelGraph,
    old: ModelGraph,
    parent: ModelRef,
    table: Mapping[str, TensorEntry],
) -> dict[str, TensorEntry]:
    """Give, for the layers in `request.inherit`, the parent's rows under the child's tensor names.

    Raises:
        GraphError: a layer is unknown, two layers' configs or numbers of tensors differ, or a tensor of several layers
            would be two tensors of the parent.
        TensorMismatchError: a tensor that was given as well has another shape or dtype than the parent's.
    """
    rows: dict[str, TensorEntry] = {}
    where = f"save of {request.name!r}: inherit"
    if not isinstance(request.inherit, Mapping):
        return rows
    for mine, theirs in request.inherit.items():
        layer, source = graph.by_name.get(mine), old.by_name.get(theirs)
        if layer is None:
            raise GraphError(f"{where}: expected layers of the graph that is saved; found {mine!r}")
        if source is None:
            raise GraphError(f"{where}: expected layers of the parent {parent}; found {theirs!r}")
        if graph.canonical_configs[mine] != old.canonical_configs[theirs]:
            raise GraphError(
                f"{where}: expected layer {mine!r} to match {theirs!r} of {parent}; their configs differ: "
                f"{graph.canonical_configs[mine]} and {old.canonical_configs[theirs]}"
            )
        if len(layer.tensors) != len(source.tensors):
            raise GraphError(
                f"{where}: expected layer {mine!r} to have the {len(source.tensors)} tensors of {theirs!r} of "
                f"{parent}; found {len(layer.tensors)}"
            )
        for name, theirs_name in zip(layer.tensors, source.tensors, strict=True):
            if rows.setdefault(name, table[theirs_name]) != table[theirs_name]:
                raise GraphError(
                    f"{where}: tensor {name!r} of several layers: expected the same tensor of {parent} for all; "
                    f"found another, {theirs_name!r}, for layer {mine!r}"
                )
            given = request.arrays.get(name)
            if given is not None and (given.shape, dtype_name(given.dtype)) != (
                rows[name].shape,
                rows[name].dtype,
            ):
                raise TensorMismatchError(
                    f"{where}: tensor {name!r}: expected {rows[name].dtype} {rows[name].shape} as in {parent}; "
                    f"found {dtype_name(given.dtype)} {given.shape}"
                )
    return rows


def to_write(request: SaveRequest) -> dict[str, np.ndarray]:
    """Return the tensors that the save will write unless they are unchanged, in the graph's order."""
    arrays = in_order(request.arrays, request.graph)
    if request.graph is not None and isinstance(request.inherit, Mapping):
        for layer in request.inherit.keys() & request.graph.by_name.keys():
            for tensor in request.graph.by_name[layer].tensors:
                arrays.pop(tensor, None)
    return arrays


def once(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return, for each tensor, the first one that is the very same memory: its own name but for tied tensors.

    Of small ones, only the same array counts: to look closer takes longer than to write them twice.
    """
    first: dict[object, str] = {}
    return {
        name: first.setdefault(id(array) if array.nbytes < PROBE_BYTES else _place_of(array), name)
        for name, array in arrays.items()
    }


def _place_of(array: np.ndarray) -> object:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def same_bytes(array: np.ndarray, other: np.ndarray) -> bool:
    """Compare two arrays of one shape and dtype by their bytes; soon done where they differ soon."""
    mine, theirs = as_bytes(array), as_bytes(other)
    if mine.nbytes != theirs.nbytes:
        return False
    start, length = 0, PROBE_BYTES
    while start < mine.nbytes:
        if not (_words(mine[start : start + length]) == _words(theirs[start : start + length])).all():
            return False
        start, length = start + length, COMPARE_BYTES
    return True


def _words(piece: np.ndarray) -> np.ndarray:
    return piece.view(np.uint64) if piece.nbytes % 8 == 0 else piece


def in_order(arrays: Mapping[str, np.ndarray], graph: ModelGraph | None) -> dict[str, np.ndarray]:
    """Sort tensors as the graph's layers come, so that a prefix is a run of segments; others come last."""
    order = {name: position for position, name in enumerate(graph.tensors)} if graph is not None else {}
    return dict(sorted(arrays.items(), key=lambda item: order.get(item[0], len(order))))
