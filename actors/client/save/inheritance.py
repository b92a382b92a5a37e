"""What a version shares with its parent.

Rules
- By layers: the tensors that the caller names are the parent's, whatever their bytes.
- By content: tensors whose bytes equal the parent's tensor of the same name or, where it has none of that name, any of
  its tensors of the same shape and dtype (an adapter renames what it is put around). They are compared with the
  parent's bytes where those are mapped here, else by their content hashes. If these cannot be read, all is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ....store.arrays import as_bytes, dtype_name
from ....store.errors import (
    CorruptDataError,
    ModelNotFoundError,
    MovedError,
    StorageError,
    TensorMismatchError,
    TensorNotFoundError,
)
from ....store.graphs.graph import ModelGraph
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header, TensorEntry, digest_of
from ....store.waiting import Deadline
from ...rpc.messages import Begun
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
class Plan:
    """What to write and what to share."""

    graph: ModelGraph
    written: dict[str, np.ndarray]
    """In the graph's order."""
    inherited: dict[str, TensorEntry]


class Inheritance:
    """Plans saves of one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader

    def plan(self, request: SaveRequest, begun: Begun, deadline: Deadline) -> Plan:
        """Decide what a save writes, and what it takes from its parent, which has been pinned.

        Raises:
            ModelNotFoundError: it inherits layers, and there is no parent.
            GraphError, TensorMismatchError: see `inherit_layers`.
            TensorMismatchError: it neither writes nor inherits a tensor.
            TensorNotFoundError: a tensor of the graph is neither given nor inherited.
        """
        parent = begun.header
        table: Mapping[str, TensorEntry] = {}
        if parent is not None:
            table = self._catalog.table(parent.ref, begun.body)
        graph = request.graph if request.graph is not None else self._same_graph(request, parent)
        inherited: dict[str, TensorEntry] = {}
        if request.inherit == "auto":
            try:
                inherited = self._unchanged(request, table, begun, deadline)
            except (CorruptDataError, StorageError) as exc:
                parent_ref = parent.ref if parent is not None else None
                log.warning(
                    "save of %r: cannot compare with %s, so all tensors are written and none is shared: %s",
                    request.name,
                    parent_ref,
                    exc,
                )
        elif request.inherit:
            if parent is None:
                raise ModelNotFoundError(
                    f"save of {request.name!r}: expected a parent to inherit from; found no version and no parent="
                )
            old = self._catalog.graph(parent.ref, parent.graph_key)
            inherited = inherit_layers(request, graph, old, parent.ref, table)
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
        return Plan(graph, in_order(written, graph), inherited)

    def _same_graph(self, request: SaveRequest, parent: Header | None) -> ModelGraph:
        """Return the parent's graph when the save brings none and has just its tensors."""
        if parent is None or isinstance(request.inherit, Mapping):
            return ModelGraph(())
        graph = self._catalog.graph(parent.ref, parent.graph_key)
        return graph if set(graph.tensors) <= set(request.arrays) else ModelGraph(())

    def _unchanged(
        self,
        request: SaveRequest,
        table: Mapping[str, TensorEntry],
        begun: Begun,
        deadline: Deadline,
    ) -> dict[str, TensorEntry]:
        """Return the parent's rows of the tensors whose bytes are the parent's."""
        named, renamed, candidates = _alike(request.arrays, table)
        rows = {name: table[name] for name in chain(named, *candidates.values())}
        if begun.blocks is not None and begun.header is not None and rows:
            parent = self._reader.mapped(rows, begun.blocks)
            if parent is None:  # it was moved between the answer and now
                parent = self._reader.load(begun.header.ref, None, list(rows), None, deadline.left())
            same = {name: name for name in named if same_bytes(request.arrays[name], parent[name])}
            for kind, names in candidates.items():
                same |= _same_content({name: request.arrays[name] for name in renamed[kind]}, names, parent)
            return {name: rows[other] for name, other in same.items()}
        unknown = {entry.segment for entry in rows.values()} - begun.digests.keys()
        known = begun.digests | self._digests(unknown, deadline, f"save of {request.name!r}")
        digests = {name: known[row.segment][row.slot] for name, row in rows.items() if row.segment in known}
        same = {name: name for name in named if digests.get(name) == digest_of(as_bytes(request.arrays[name]))}
        for kind, names in candidates.items():
            by_digest = {digests[name]: name for name in reversed(names) if name in digests}
            for name in renamed[kind]:
                other = by_digest.get(digest_of(as_bytes(request.arrays[name])))
                same |= {name: other} if other is not None else {}
        return {name: rows[other] for name, other in same.items()}

    def _digests(self, segments: Set[SegmentId], deadline: Deadline, what: str) -> dict[SegmentId, tuple[str, ...]]:
        """Ask for the content hashes of segments, wherever they are."""
        known: dict[SegmentId, tuple[str, ...]] = {}
        while missing := segments - known.keys():
            by_shard: dict[int, list[SegmentId]] = {}
            for segment in missing:
                by_shard.setdefault(self._session.topology.where(segment), []).append(segment)
            requests = {shard: ShardCalls.digests(part) for shard, part in by_shard.items()}
            try:
                for answer in self._session.call_each(requests, deadline.left_for(what)):
                    known.update(answer)
                break
            except MovedError as exc:
                self._session.refresh(exc.version)
        return known


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
