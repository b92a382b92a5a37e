"""Saving: deciding what to write, staging it, committing it.

Rules
- A save reads the caller's tensors until it is staged, and never after.
- Where the shard is on this node, tensors are copied into its memory, once, and stay there; the shard hashes them
  meanwhile. To another node they go through the engine's object store.
- Nothing is visible before the commit, and what a failed save staged is dropped: by its own word, or by the shard
  when this process has died.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Literal

import numpy as np

from ..store.arrays import as_bytes, dtype_name
from ..store.errors import (
    GraphError,
    ModelNotFoundError,
    TensorMismatchError,
    TensorNotFoundError,
    TensorVineError,
)
from ..store.graph import ModelGraph
from ..store.manifest import Header, TensorEntry, digest_of, encode_body, slots_of
from ..store.refs import ModelRef
from ..store.segment import SegmentId
from ..store.shard import Draft
from .catalog import Catalog
from .messages import Begun
from .session import Session, time_left
from .upload import Upload, announce

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than its shard a saver waits: the shard knows why the disk is late."""
Inherit = Mapping[str, str] | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    ref: ModelRef
    bytes_written: int
    """Bytes of the tensors that this version wrote."""
    bytes_inherited: int
    """Bytes of the tensors that it shares with ancestors."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checked call of `Repository.save`."""

    name: str
    arrays: Mapping[str, np.ndarray]
    graph: ModelGraph | None
    parent: tuple[str, int | None] | None
    """Name and version; None: the latest version of `name`, if there is one."""
    inherit: Inherit
    quality: float | None
    metadata: str
    recipe: str | None
    timeout: float
    durable: bool = False
    """On disk before it is committed."""


@dataclass(slots=True)
class _Plan:
    """What to write and what to share."""

    graph: ModelGraph
    written: dict[str, np.ndarray]
    inherited: dict[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])


class Saver:
    """Carries out saves of one client, one at a time, in the order they were asked for."""

    def __init__(self, session: Session, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog
        self._serial = count(1)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-copy")

    def close(self) -> None:
        """End the helper thread."""
        self._helper.shutdown()

    def save(self, request: SaveRequest, staged: Callable[[], None]) -> Saved:
        """Save, calling `staged` as soon as the caller may change its tensors.

        Raises:
            TensorVineError: see `Repository.save`; nothing of the save remains.
        """
        deadline = time.monotonic() + request.timeout
        save_id = f"{self._session.client}/s{next(self._serial)}"
        home = self._session.home(request.name)
        self._session.keep_alive()
        leases: list[str] = []
        near = home
        try:
            lengths = self._announced(request, home)
            parent, table, begun = self._parent(request, home, deadline, leases, save_id, lengths)
            plan = self._plan(request, parent, table, begun.digests, deadline)
            near = self._session.near(home) if plan.written else home
            fits = lengths == announce(list(plan.written.values()))
            granted = begun.offsets if fits else []
            what = f"save of {request.name!r}"
            upload = Upload(self._session, near, save_id, deadline, what, self._helper, granted)
            upload.write(plan.written, home == near)
            staged()
            upload.finish()
            if near != home and upload.blocks:
                left = time_left(deadline, f"save of {request.name!r}")
                self._session.call(near, "adopt", save_id, upload.life, upload.blocks, timeout=left)
                upload.blocks = []
            saved = self._commit(request, parent, plan, upload, home, leases, deadline)
        except BaseException:
            self._abort(save_id, {home, near}, leases)
            raise
        self._tidy(save_id, near if near != home else None, leases)
        return saved

    def _parent(
        self, request: SaveRequest, home: int, deadline: float, leases: list[str], save_id: str, lengths: list[int]
    ) -> tuple[Header | None, Mapping[str, TensorEntry], Begun]:
        """Pin the parent and give its header, its table, and what else its home answered."""
        optional = request.parent is None
        name, version = request.parent or (request.name, None)
        shard = self._session.home(name)
        known = self._catalog.known(name, version)
        left = time_left(deadline, f"save of {request.name!r}")
        self._session.connection(shard)
        question = (self._session.client, name, version, optional, known, request.inherit == "auto", save_id)
        lengths = lengths if shard == home else []
        begun: Begun = self._session.call(shard, "begin", *question, lengths, left, timeout=left + 1.0, again=True)
        if begun.lease is not None:
            leases.append(begun.lease)
        if begun.header is None:
            if isinstance(request.inherit, Mapping) and request.inherit:
                raise ModelNotFoundError(
                    f"save of {request.name!r}: expected a parent to inherit from; it has none and no parent= was given"
                )
            return None, {}, begun
        return begun.header, self._catalog.table(begun.header.ref, begun.body), begun

    def _plan(
        self,
        request: SaveRequest,
        parent: Header | None,
        table: Mapping[str, TensorEntry],
        digests: dict[SegmentId, tuple[str, ...]],
        deadline: float,
    ) -> _Plan:
        graph = request.graph
        if graph is None:
            graph = self._same_graph(request, parent)
        plan = _Plan(graph, dict(request.arrays))
        if isinstance(request.inherit, Mapping):
            if parent is not None and request.inherit:
                old = self._catalog.graph(parent.ref, parent.graph_key)
                plan.inherited = inherit_layers(request, graph, old, parent.ref, table)
        elif request.inherit == "auto":
            plan.inherited = self._unchanged(request, table, digests, deadline)
        for name in plan.inherited:
            plan.written.pop(name, None)
        for name in graph.tensors:
            if name not in plan.written and name not in plan.inherited:
                raise TensorNotFoundError(
                    f"save of {request.name!r}: expected tensor {name!r}, which its graph names; "
                    f"found neither it among the {len(request.arrays)} given nor inherited"
                )
        plan.written = _in_order(plan.written, graph)
        return plan

    def _announced(self, request: SaveRequest, home: int) -> list[int]:
        """Give the lengths of the blocks that the save will probably need, to ask memory for them at once."""
        if self._session.connection(home).view is None:
            return []
        arrays = _in_order(request.arrays, request.graph)
        if request.graph is not None and isinstance(request.inherit, Mapping):
            for layer in request.inherit.keys() & request.graph.by_name.keys():
                for tensor in request.graph.by_name[layer].tensors:
                    arrays.pop(tensor, None)
        return announce(list(arrays.values()))

    def _unchanged(
        self,
        request: SaveRequest,
        table: Mapping[str, TensorEntry],
        digests: dict[SegmentId, tuple[str, ...]],
        deadline: float,
    ) -> dict[str, TensorEntry]:
        """Give the parent's rows of the tensors whose bytes are the parent's."""
        alike = {
            name: entry
            for name, array in request.arrays.items()
            if (entry := table.get(name)) is not None
            and (entry.shape, entry.dtype) == (array.shape, dtype_name(array.dtype))
        }
        elsewhere: dict[int, list[SegmentId]] = {}
        for segment in {entry.segment for entry in alike.values()} - digests.keys():
            elsewhere.setdefault(segment[0], []).append(segment)
        questions = {shard: ("digests", segments) for shard, segments in elsewhere.items()}
        left = time_left(deadline, f"save of {request.name!r}")
        known = dict(digests)
        for answer in self._session.ask(questions, left) if questions else []:
            known.update(answer)
        return {
            name: entry
            for name, entry in alike.items()
            if entry.segment in known and digest_of(as_bytes(request.arrays[name])) == known[entry.segment][entry.slot]
        }

    def _same_graph(self, request: SaveRequest, parent: Header | None) -> ModelGraph:
        """Give the parent's graph when the save brings none and has just its tensors."""
        if parent is None or isinstance(request.inherit, Mapping):
            return ModelGraph(())
        graph = self._catalog.graph(parent.ref, parent.graph_key)
        return graph if set(graph.tensors) <= set(request.arrays) else ModelGraph(())

    def _commit(
        self,
        request: SaveRequest,
        parent: Header | None,
        plan: _Plan,
        upload: Upload,
        home: int,
        leases: list[str],
        deadline: float,
    ) -> Saved:
        entries = {**plan.inherited, **upload.entries}
        text = plan.graph.to_json()
        key = blake2b(f"{text}\0{request.recipe}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        kept = parent is not None and parent.graph_key == key and self._session.home(parent.ref.name) == home
        written = sum(entry.nbytes for entry in entries.values() if entry.owner is None)
        inherited = sum(entry.nbytes for entry in entries.values() if entry.owner is not None)
        draft = Draft(
            request.name,
            upload.save_id,
            parent.ref if parent is not None else None,
            request.quality,
            request.metadata,
            key,
            None if kept else (text, request.recipe),
            encode_body(entries),
            slots_of(entries.values()),
            written,
            written + inherited,
        )
        mine = [lease for lease in leases if self._session.home(parent.ref.name) == home] if parent else []
        left = time_left(deadline, f"save of {request.name!r}")
        arguments = (draft, self._session.client, upload.life, upload.blocks, mine, request.durable, left)
        grace = GRACE_S if self._session.path is not None else 0.0
        ref, _ = self._session.call(home, "commit", *arguments, timeout=left + grace)
        leases[:] = [lease for lease in leases if lease not in mine]
        self._catalog.learn(ref, draft.body, plan.graph, key)
        return Saved(ref, written, inherited)

    def _tidy(self, save_id: str, near: int | None, leases: Sequence[str]) -> None:
        """Let go of what the commit did not: it stands, so a shard that died now is no error of this save."""
        try:
            if near is not None:
                self._session.call(near, "abort", save_id, [], again=True)
            self._session.unpin(leases)
        except TensorVineError as exc:
            log.warning("save %s: committed, but what it held could not be released yet: %s", save_id, exc)
            for lease in leases:
                self._session.drop(lease)

    def _abort(self, save_id: str, shards: set[int], leases: Sequence[str]) -> None:
        """Give a failed save up without waiting: the shard in question may be what failed."""
        for lease in leases:
            self._session.drop(lease)
        for shard in shards:
            try:
                self._session.send(shard, "abort", save_id, [])
            except TensorVineError as exc:
                log.debug("shard %d did not hear that %s was given up: %s", shard, save_id, exc)


def inherit_layers(
    request: SaveRequest,
    graph: ModelGraph,
    old: ModelGraph,
    parent: ModelRef,
    table: Mapping[str, TensorEntry],
) -> dict[str, TensorEntry]:
    """Give, for the layers in `request.inherit`, the parent's rows under the child's tensor names.

    Raises:
        GraphError: a layer is unknown, or two layers' configs or numbers of tensors differ.
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
            rows[name] = table[theirs_name]
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


def metadata_text(name: str, metadata: Mapping[str, Any] | None) -> str:
    """Write the user's metadata as JSON.

    Raises:
        TensorMismatchError: it is no mapping of JSON values.
    """
    try:
        return json.dumps(dict(metadata or {}))
    except (TypeError, ValueError) as exc:
        raise TensorMismatchError(f"save of {name!r}: metadata: expected a mapping of JSON values; {exc}") from exc


def _in_order(arrays: Mapping[str, np.ndarray], graph: ModelGraph | None) -> dict[str, np.ndarray]:
    """Sort tensors as the graph's layers come, so that a prefix is a run of segments; others come last."""
    order = {name: position for position, name in enumerate(graph.tensors)} if graph is not None else {}
    return dict(sorted(arrays.items(), key=lambda item: order.get(item[0], len(order))))
