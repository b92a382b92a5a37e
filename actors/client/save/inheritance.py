"""What a version shares with its parent.

Rules
- By layers: the tensors that the caller names are the parent's, whatever their bytes.
- By content: tensors whose bytes equal the parent's tensor of the same name or, where it has none of that name, any of
  its tensors of the same shape and dtype (an adapter renames what it is put around). They are compared with the
  parent's bytes where those are mapped or known here, else by their content hashes. If these cannot be read, all is
  written.
- What this client knows of a parent may be old: the catalog refuses the commit then, and the save begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ....store.arrays import as_bytes, dtype_name
from ....store.errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    MovedError,
    StorageError,
    TensorMismatchError,
    TensorNotFoundError,
)
from ....store.graphs.graph import ModelGraph
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import TensorEntry, digest_of
from ....store.waiting import Deadline
from ...rpc.catalog_messages import Location
from ...shard.calls import ShardCalls
from ..catalog import Catalog
from ..reader import Reader
from ..session import Session
from .request import SaveRequest, in_order, inherit_layers, same_bytes

log = logging.getLogger(__name__)

ENDS_BYTES = 64
_Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The version that a save derives from, as far as this client knows it."""

    ref: ModelRef | None = None
    """None: there is none."""
    graph_key: bytes | None = None
    table: Mapping[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])
    places: Mapping[SegmentId, Location] = field(default_factory=dict[SegmentId, Location])
    """Where its segments are that are whole, if the catalog was asked."""
    pinned: bool = False
    """The save has begun: the catalog keeps the parent for it."""
    has_graph: bool = False
    """The catalog has the graph that the save names."""

    def may_have(self, row: TensorEntry) -> bool:
        """Return whether a tensor is not known to be lost."""
        return not self.pinned or row.segment in self.places


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to write and what to share."""

    graph: ModelGraph
    written: dict[str, np.ndarray]
    """In the graph's order."""
    inherited: dict[str, TensorEntry]
    digests: Mapping[str, str]
    """Content hashes of tensors of the save, of those that were needed."""


class UnknownError(Exception):
    """The parent's bytes are not known here: the save must begin."""


class Inheritance:
    """Plans saves of one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader

    def plan(self, request: SaveRequest, parent: Parent, deadline: Deadline) -> Plan:
        """Decide what a save writes, and what it takes from its parent.

        Raises:
            UnknownError: the parent is not pinned, and not known well enough.
            ModelNotFoundError: it inherits layers, and there is no parent.
            ModelLostError: it inherits layers, and tensors of these are lost.
            GraphError, TensorMismatchError: see `inherit_layers`.
            TensorMismatchError: it neither writes nor inherits a tensor.
            TensorNotFoundError: a tensor of the graph is neither given nor inherited.
        """
        graph = request.graph if request.graph is not None else self._same_graph(request, parent)
        inherited: dict[str, TensorEntry] = {}
        mine = _Digests(request.arrays)
        if request.inherit == "auto":
            try:
                inherited = self._unchanged(request, parent, mine, deadline)
            except (CorruptDataError, ModelLostError, MovedError, StorageError) as exc:
                log.warning(
                    "save of %r: cannot compare with %s, so all tensors are written and none is shared: %s",
                    request.name,
                    parent.ref,
                    exc,
                )
        elif request.inherit:
            if parent.ref is None or parent.graph_key is None:
                raise ModelNotFoundError(
                    f"save of {request.name!r}: expected a parent to inherit from; found no version and no parent="
                )
            old = self._catalog.graph(parent.ref, parent.graph_key)
            inherited = inherit_layers(request, graph, old, parent.ref, parent.table)
            if lost := [name for name, row in inherited.items() if not parent.may_have(row)]:
                raise ModelLostError(
                    f"save of {request.name!r}: inherit: expected all tensors of its layers in {parent.ref}; "
                    f"{len(lost)} are lost: {lost[:5]}"
                )
        written = {name: array for name, array in request.arrays.items() if name not in inherited}
        for name in graph.tensors:
            if name not in written and name not in inherited:
                raise TensorNotFoundError(
                    f"save of {request.name!r}: expected tensor {name!r} of its graph; it is neither "
                    f"among the {len(request.arrays)} given tensors nor inherited"
                )
        if not written and not inherited:
            raise TensorMismatchError(
                f"save of {request.name!r}: expected at least one tensor, own or inherited; found none"
            )
        return Plan(graph, in_order(written, graph), inherited, mine.known)

    def _same_graph(self, request: SaveRequest, parent: Parent) -> ModelGraph:
        """Return the parent's graph when the save brings none and has just its tensors."""
        if parent.ref is None or parent.graph_key is None or isinstance(request.inherit, Mapping):
            return ModelGraph(())
        graph = self._catalog.graph(parent.ref, parent.graph_key)
        return graph if set(graph.tensors) <= set(request.arrays) else ModelGraph(())

    def _unchanged(
        self, request: SaveRequest, parent: Parent, mine: _Digests, deadline: Deadline
    ) -> dict[str, TensorEntry]:
        """Return the parent's rows of the tensors whose bytes are the parent's."""
        table = {name: row for name, row in parent.table.items() if parent.may_have(row)}
        named, renamed, candidates = _alike(request.arrays, table)
        rows = {name: table[name] for name in chain(named, *candidates.values())}
        theirs = self._reader.mapped(rows, parent.places)
        known = self._digests({rows[name].segment for name in rows.keys() - theirs.keys()}, rows, parent, deadline)
        digests = {name: hashed for name, row in rows.items() if (hashed := known.get((row.segment, row.slot)))}
        same: dict[str, str] = {}
        for name in named:
            if name in theirs:
                same |= {name: name} if same_bytes(request.arrays[name], theirs[name]) else {}
            elif name in digests and digests[name] == mine[name]:
                same[name] = name
        for kind, names in candidates.items():
            mapped = [name for name in names if name in theirs]
            same |= _same_content({name: request.arrays[name] for name in renamed[kind]}, mapped, theirs)
            by_digest = {digests[name]: name for name in reversed(names) if name in digests}
            for name in renamed[kind] if by_digest else ():
                if name not in same and (other := by_digest.get(mine[name])) is not None:
                    same[name] = other
        return {name: rows[other] for name, other in same.items()}

    def _digests(
        self, segments: Set[SegmentId], rows: Mapping[str, TensorEntry], parent: Parent, deadline: Deadline
    ) -> dict[tuple[SegmentId, int], str]:
        """Return content hashes of slots of these segments; shards are asked for those that are not known here.

        Raises:
            UnknownError: some are not, and it is not known whom to ask.
        """
        needed = {(row.segment, row.slot) for row in rows.values() if row.segment in segments}
        known = {segment: self._catalog.digests(segment) for segment in segments}
        missing = {segment for segment, slot in needed if slot not in known[segment]}
        if missing and not parent.pinned:
            raise UnknownError
        by_shard: dict[int, list[SegmentId]] = {}
        for segment in missing:
            by_shard.setdefault(parent.places[segment][0], []).append(segment)
        requests = {shard: ShardCalls.digests(part) for shard, part in by_shard.items()}
        for answer in self._session.call_each(requests, deadline.left()):
            for segment, hashes in answer.items():
                known[segment] = dict(enumerate(hashes))
                self._catalog.put_digests(segment, known[segment])
        return {(segment, slot): known[segment][slot] for segment, slot in needed if slot in known[segment]}


class _Digests:
    """Content hashes of the tensors of a save, each computed when it is needed."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.known: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self.known:
            self.known[name] = digest_of(as_bytes(self._arrays[name]))
        return self.known[name]


def _alike(
    arrays: Mapping[str, np.ndarray], table: Mapping[str, TensorEntry]
) -> tuple[list[str], dict[_Kind, list[str]], dict[_Kind, list[str]]]:
    """Find out what may be the parent's.

    Returns:
        Tensors of which the parent has one of the same name, shape and dtype; by shape and dtype, those whose names it
        does not have; and for each of these shapes and dtypes, all tensors of the parent that have it.
    """
    named: list[str] = []
    renamed: dict[_Kind, list[str]] = {}
    for name, array in arrays.items():
        kind = array.shape, dtype_name(array.dtype)
        row = table.get(name)
        if row is None:
            renamed.setdefault(kind, []).append(name)
        elif (row.shape, row.dtype) == kind:
            named.append(name)
    candidates: dict[_Kind, list[str]] = {}
    for name, entry in sorted(table.items()) if renamed else ():
        if (entry.shape, entry.dtype) in renamed:
            candidates.setdefault((entry.shape, entry.dtype), []).append(name)
    return named, renamed, candidates


def _same_content(
    arrays: Mapping[str, np.ndarray], candidates: Sequence[str], parent: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Return, for each tensor, the first of the candidates that has its bytes; without those of which none has."""
    by_ends: dict[bytes, list[str]] = {}
    for name in candidates:
        by_ends.setdefault(_ends(parent[name]), []).append(name)
    digests: dict[bytes, dict[str, str]] = {}
    """Ends that several have -> digest of each -> the first that has it."""
    found: dict[str, str] = {}
    for name, array in arrays.items():
        ends = _ends(array)
        alike = by_ends.get(ends, [])
        if len(alike) > 1:
            if ends not in digests:
                digests[ends] = {digest_of(as_bytes(parent[other])): other for other in reversed(alike)}
            alike = [digests[ends].get(digest_of(as_bytes(array)), alike[0])]
        if alike and same_bytes(array, parent[alike[0]]):
            found[name] = alike[0]
    return found


def _ends(array: np.ndarray) -> bytes:
    """Return the first and the last bytes of an array, to tell it from most others."""
    content = as_bytes(array)
    return content[:ENDS_BYTES].tobytes() + content[-ENDS_BYTES:].tobytes()
