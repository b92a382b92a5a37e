"""Saving: deciding what to write, staging it, committing it.

Rules
- A save reads the caller's tensors until it is staged, and never after.
- Where the shard is on this node, tensors are copied into its memory, once, and stay there; the shard hashes them
  meanwhile. To another node they go through the engine's object store.
- After a save that did not wait, memory for the next one like it is reserved: so that can be staged without a message,
  where it will stay (Viper's producer keeps its cache, section 4.4; DStore's preallocated buffer). When others wait for
  memory, it is given back at the next renewal of the session.
- A save that is to come can be announced: its first question is answered while its caller does something else.
- Nothing is visible before the commit, and what a failed save staged is dropped: by its own word, or by the shard
  when this process has died.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count

import numpy as np

from ....store.arrays import as_bytes, dtype_name
from ....store.errors import (
    GraphError,
    ModelNotFoundError,
    MovedError,
    ShardUnavailableError,
    TensorNotFoundError,
    TensorVineError,
)
from ....store.graphs.graph import ModelGraph
from ....store.holders import Lease, Save
from ....store.refs import ModelRef
from ....store.segments.arena import Part
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import Header, TensorEntry, digest_of, encode_body, slots_of
from ....store.versions.version import Draft
from ...rpc.messages import Beginning, Begun
from ...shard.calls import ShardCalls
from ..catalog import Catalog
from ..reader import Reader
from ..session import CONTROL_TIMEOUT_S, Session, time_left
from .request import Announced, Saved, SaveRequest, in_order, inherit_layers, same_bytes, to_write
from .upload import Upload, announce

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than its shard a saver waits: the shard knows why the disk, or another shard, is late."""


@dataclass(slots=True)
class _Plan:
    """What to write and what to share."""

    graph: ModelGraph
    written: dict[str, np.ndarray]
    inherited: dict[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Memory of a shard that waits for a save."""

    save: Save
    shard: int
    life: int
    """Process id of the shard."""
    lengths: list[int]
    """Of the blocks."""
    offsets: list[int]


class Saver:
    """Carries out saves of one client, one at a time, in the order they were asked for."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader
        self._serial = count(1)
        self._reserved: _Reserved | None = None
        self._reserving = threading.Lock()
        session.at_renewal = self.spare
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-copy")

    def close(self) -> None:
        """End the helper thread."""
        self._helper.shutdown()

    def stage(self, request: SaveRequest) -> tuple[SaveRequest, Upload] | None:
        """Copy the tensors into the memory that waits for them; None where none does.

        May be called while another save is under way. Gives the request on the copies, and what `save` takes.
        """
        arrays, deadline = to_write(request), time.monotonic() + request.timeout
        with self._reserving:
            reserved = self._reserved
            if reserved is None or reserved.lengths != announce(list(arrays.values())):
                return None
            self._reserved = None
        if reserved.shard not in self._session.staying:  # it drains
            self._abort(reserved.save, {reserved.shard}, [])
            return None
        try:
            if self._session.connection(reserved.shard, deadline).hello.pid != reserved.life:
                return None  # it went with that life of the shard
        except MovedError:
            return None
        what = f"save of {request.name!r}"
        upload = Upload(
            self._session,
            reserved.shard,
            save=reserved.save,
            deadline=deadline,
            what=what,
            helper=self._helper,
            granted=list(reserved.offsets),
            granter=reserved.life,
        )
        try:
            upload.write(arrays, True)
        except BaseException:
            self._abort(reserved.save, {reserved.shard}, [])
            raise
        return replace(request, arrays={**request.arrays, **upload.copies(arrays)}), upload

    def reserve(self, request: SaveRequest) -> None:
        """Have memory wait for another save like this one, its pages made."""
        lengths = announce(list(to_write(request).values()))
        with self._reserving:
            if self._reserved is not None and self._reserved.lengths == lengths:
                return
            old, self._reserved = self._reserved, None
        if old is not None:
            self._abort(old.save, {old.shard}, [])
        near = self._session.near(self._session.home(request.name))
        connection = self._session.connection(near)
        if not lengths or connection.view is None:
            return
        save = Save(self._session.client, next(self._serial), ahead=True)
        life = connection.hello.pid
        offsets = self._session.call(near, ShardCalls.reserve(self._session.client, save, lengths))
        if not offsets:
            log.info("no room to reserve memory for the next save of %r: it is staged in this process", request.name)
            return
        for offset, length in zip(offsets, lengths, strict=True):
            connection.view.part(Part(offset, length))
        with self._reserving:
            self._reserved = _Reserved(save, near, life, lengths, offsets)

    def spare(self) -> None:
        """Give the memory that waits for a save back, if others wait for it."""
        with self._reserving:
            reserved = self._reserved
        if reserved is None:
            return
        try:
            if not self._session.call(reserved.shard, ShardCalls.is_short()):
                return
        except TensorVineError as exc:  # it went with its shard, or another renewal will tell
            log.info("shard %d does not say whether it is short of memory: %s", reserved.shard, exc)
            return
        with self._reserving:
            if self._reserved is not reserved:
                return
            self._reserved = None
        log.info("memory that waited for the next save is given back: others need it in shard %d", reserved.shard)
        self._abort(reserved.save, {reserved.shard}, [])

    def announce(self, name: str, parent: tuple[str, int | None] | None, arrays: Sequence[np.ndarray]) -> Announced:
        """Begin a save that is to come, without waiting: `SaveRequest.announced` takes it up, `withdraw` ends it.

        Args:
            name: of the model.
            parent: name and version; None: the latest version of `name`, if there is one.
            arrays: like those that will probably be written, in the graph's order.

        Raises:
            TensorVineError: it cannot be sent.
        """
        self._session.keep_alive()
        save = Save(self._session.client, next(self._serial))
        shard = self._session.home(parent[0] if parent is not None else name)
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        lengths = announce(arrays) if shard == self._session.home(name) and self._is_mapped(shard, deadline) else []
        asked = self._beginning(name, parent, False, save, shard, deadline, lengths)
        return Announced(save, lengths, shard, self._session.send(shard, ShardCalls.begin(asked)))

    def withdraw(self, announced: Announced) -> None:
        """Let go of what was granted and pinned for a save that does not come; no wait."""
        try:
            begun = announced.begun.result(CONTROL_TIMEOUT_S)
        except TensorVineError as exc:
            log.debug("%s was announced and withdrawn; it had not begun: %s", announced.save, exc)
            return
        if begun.lease is not None:
            self._session.unpin_behind([begun.lease])
        self._abort(announced.save, {announced.shard}, [])

    def save(self, request: SaveRequest, staged: Callable[[], None], upload: Upload | None = None) -> Saved:
        """Save, calling `staged` as soon as the caller may change its tensors.

        Args:
            request: what to save.
            staged: called once.
            upload: what `stage` gave; None: the tensors are still the caller's.

        Raises:
            TensorVineError: see `Repository.save`; nothing of the save remains.
        """
        deadline = time.monotonic() + request.timeout
        try:
            return self._save(request, staged, upload, deadline)
        except ShardUnavailableError:
            if upload is None or upload.shard in self._session.topology.alive:
                raise
        # The shard has drained and ended. Its memory is mapped as long as the copies there are.
        return self._save(request, staged, None, deadline)

    def _save(self, request: SaveRequest, staged: Callable[[], None], upload: Upload | None, deadline: float) -> Saved:
        if upload is not None:
            save = upload.save
        elif request.announced is not None:
            save = request.announced.save
        else:
            save = Save(self._session.client, next(self._serial))
        home = self._session.home(request.name)
        self._session.keep_alive()
        leases: list[Lease] = []
        asked = {home} if upload is None else {home, upload.shard}  # shards that may have granted memory
        try:
            lengths = self._lengths(request, home, deadline) if upload is None else []
            begun = self._early(request, deadline) or self._begun(request, home, deadline, save, lengths)
            if begun.offsets:
                asked.add(begun.shard)  # the name may have moved since
            parent, table = self._parent(request, begun, leases)
            plan = self._plan(request, parent, table, begun, deadline)
            if upload is not None:
                upload.keep(plan.written)
            else:
                fits = lengths == announce(list(plan.written.values()))
                upload = self._written(request, plan, save, begun, begun.offsets if fits else [], deadline, asked)
                staged()
                upload.finish()
            saved, at = self._commit(request, begun, plan, upload, leases, deadline)
        except BaseException:
            self._abort(save, asked | (upload.at if upload is not None else set()), leases)
            raise
        self._tidy(save, (asked | upload.at) - {at}, leases)
        return saved

    def _written(
        self,
        request: SaveRequest,
        plan: _Plan,
        save: Save,
        begun: Begun,
        granted: list[int],
        deadline: float,
        asked: set[int],
    ) -> Upload:
        """Write what is to be written to the shard that should hold it; who answered may have `granted` memory.

        Notes in `asked` whom it asks for memory, also where that fails.
        """
        while True:
            home = self._session.home(request.name)
            what = f"save of {request.name!r}"
            try:
                near = self._session.near(home, deadline) if plan.written else home
                asked.add(near)
                offsets = granted if near == begun.shard else []
                upload = Upload(
                    self._session,
                    near,
                    save=save,
                    deadline=deadline,
                    what=what,
                    helper=self._helper,
                    granted=offsets,
                    granter=begun.life,
                )
                upload.write(plan.written, home == near)
            except MovedError as exc:  # it drains
                time_left(deadline, what)
                self._session.refresh(exc.version)
                continue
            return upload

    def _early(self, request: SaveRequest, deadline: float) -> Begun | None:
        """Return the answer that a save was announced for; None: it was not, or the answer is none to go on with."""
        announced = request.announced
        if announced is None:
            return None
        try:
            return announced.begun.result(deadline - time.monotonic())
        except TensorVineError as exc:
            log.info("%s was announced for nothing, it begins now: %s", announced.save, exc)
            return None

    def _begun(self, request: SaveRequest, home: int, deadline: float, save: Save, lengths: list[int]) -> Begun:
        """Have the parent pinned, and memory granted for blocks of `lengths` where its home is the save's, too."""
        name = request.parent[0] if request.parent is not None else request.name
        while True:
            shard = self._session.home(name)
            left = time_left(deadline, f"save of {request.name!r}")
            try:
                inherits = request.inherit == "auto"
                sizes = lengths if shard == home else []
                asked = self._beginning(request.name, request.parent, inherits, save, shard, deadline, sizes)
                return self._session.call(shard, ShardCalls.begin(asked), left + 1.0)
            except MovedError as exc:
                self._session.moved(name, shard, exc, deadline)

    def _beginning(
        self,
        name: str,
        parent: tuple[str, int | None] | None,
        inherits: bool,
        save: Save,
        shard: int,
        deadline: float,
        sizes: list[int],
    ) -> Beginning:
        of, version = parent or (name, None)
        return Beginning(
            client=self._session.client,
            name=of,
            version=version,
            optional=parent is None,
            known=self._catalog.known(of, version),
            inherits=inherits,
            compares=self._is_mapped(shard, deadline),
            save=save,
            sizes=sizes,
            timeout=deadline - time.monotonic(),
        )

    def _parent(
        self, request: SaveRequest, begun: Begun, leases: list[Lease]
    ) -> tuple[Header | None, Mapping[str, TensorEntry]]:
        """Return the parent's header and its table."""
        if begun.lease is not None:
            leases.append(begun.lease)
        if begun.header is None:
            if isinstance(request.inherit, Mapping) and request.inherit:
                raise ModelNotFoundError(
                    f"save of {request.name!r}: expected a parent to inherit from; it has none and no parent= was given"
                )
            return None, {}
        return begun.header, self._catalog.table(begun.header.ref, begun.body)

    def _is_mapped(self, shard: int, deadline: float) -> bool:
        return self._session.connection(shard, deadline).view is not None

    def _plan(
        self,
        request: SaveRequest,
        parent: Header | None,
        table: Mapping[str, TensorEntry],
        begun: Begun,
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
            plan.inherited = self._unchanged(request, table, begun, deadline)
        for name in plan.inherited:
            plan.written.pop(name, None)
        for name in graph.tensors:
            if name not in plan.written and name not in plan.inherited:
                raise TensorNotFoundError(
                    f"save of {request.name!r}: expected tensor {name!r}, which its graph names; "
                    f"found neither it among the {len(request.arrays)} given nor inherited"
                )
        plan.written = in_order(plan.written, graph)
        return plan

    def _lengths(self, request: SaveRequest, home: int, deadline: float) -> list[int]:
        """Return the lengths of the blocks that the save will probably need, to ask memory for them at once."""
        if request.announced is not None:
            return request.announced.lengths
        try:
            if not self._is_mapped(home, deadline):
                return []
        except MovedError:  # it has drained
            return []
        return announce(list(to_write(request).values()))

    def _unchanged(
        self,
        request: SaveRequest,
        table: Mapping[str, TensorEntry],
        begun: Begun,
        deadline: float,
    ) -> dict[str, TensorEntry]:
        """Return the parent's rows of the tensors whose bytes are the parent's."""
        alike = {
            name: entry
            for name, array in request.arrays.items()
            if (entry := table.get(name)) is not None
            and (entry.shape, entry.dtype) == (array.shape, dtype_name(array.dtype))
        }
        if begun.blocks is not None and begun.header is not None and alike:
            parent = self._reader.mapped(alike, begun.blocks)
            if parent is None:  # it was moved between the answer and now
                parent = self._reader.load(begun.header.ref, None, list(alike), None, deadline - time.monotonic())
            return {name: row for name, row in alike.items() if same_bytes(request.arrays[name], parent[name])}
        unknown = {entry.segment for entry in alike.values()} - begun.digests.keys()
        known = begun.digests | self._digests(unknown, deadline, f"save of {request.name!r}")
        return {
            name: entry
            for name, entry in alike.items()
            if entry.segment in known and digest_of(as_bytes(request.arrays[name])) == known[entry.segment][entry.slot]
        }

    def _digests(self, segments: Set[SegmentId], deadline: float, what: str) -> dict[SegmentId, tuple[str, ...]]:
        """Ask for the content hashes of segments, wherever they are."""
        known: dict[SegmentId, tuple[str, ...]] = {}
        while missing := segments - known.keys():
            by_shard: dict[int, list[SegmentId]] = {}
            for segment in missing:
                by_shard.setdefault(self._session.topology.where(segment), []).append(segment)
            requests = {shard: ShardCalls.digests(part) for shard, part in by_shard.items()}
            try:
                for answer in self._session.call_each(requests, time_left(deadline, what)):
                    known.update(answer)
                break
            except MovedError as exc:
                self._session.refresh(exc.version)
        return known

    def _same_graph(self, request: SaveRequest, parent: Header | None) -> ModelGraph:
        """Return the parent's graph when the save brings none and has just its tensors."""
        if parent is None or isinstance(request.inherit, Mapping):
            return ModelGraph(())
        graph = self._catalog.graph(parent.ref, parent.graph_key)
        return graph if set(graph.tensors) <= set(request.arrays) else ModelGraph(())

    def _commit(
        self,
        request: SaveRequest,
        begun: Begun,
        plan: _Plan,
        upload: Upload,
        leases: list[Lease],
        deadline: float,
    ) -> tuple[Saved, int]:
        """Make the version exist; gives the shard that did, too."""
        entries = {**plan.inherited, **upload.entries}
        text = plan.graph.to_json()
        key = blake2b(f"{text}\0{request.recipe}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        parent, home = begun.header, self._session.home(request.name)
        kept = parent is not None and parent.graph_key == key and begun.shard == home
        written = sum(entry.nbytes for entry in entries.values() if entry.owner is None)
        inherited = sum(entry.nbytes for entry in entries.values() if entry.owner is not None)
        draft = Draft(
            name=request.name,
            save=upload.save,
            parent=parent.ref if parent is not None else None,
            quality=request.quality,
            metadata=request.metadata,
            graph_key=key,
            architecture=None if kept else (text, request.recipe),
            body=encode_body(entries),
            holds=slots_of(entries.values()),
            bytes_owned=written,
            bytes_total=written + inherited,
        )
        while True:
            mine = list(leases) if begun.shard == home else []
            try:
                ref = self._commit_at(home, draft, upload, mine, request.durable, deadline)
                break
            except MovedError as exc:
                self._session.moved(request.name, home, exc, deadline)
            except GraphError:  # the parent, and its graph with it, has moved away from there
                if draft.architecture is not None:
                    raise
            draft = replace(draft, architecture=(text, request.recipe))
            home = self._session.home(request.name)
        leases[:] = [lease for lease in leases if lease not in mine]
        self._catalog.learn(ref, draft.body, plan.graph, key)
        return Saved(ref, written, inherited), home

    def _commit_at(
        self, home: int, draft: Draft, upload: Upload, leases: list[Lease], durable: bool, deadline: float
    ) -> ModelRef:
        """Have a shard commit; what lies on another one is taken there first."""
        what = f"save of {draft.name!r}"
        topology = self._session.topology
        for shard, blocks in upload.places(topology.where).items():
            if shard == home:
                continue
            try:
                self._session.connection(shard, deadline)  # it must know this client
                adopt = ShardCalls.adopt(upload.save, upload.life, blocks)
                self._session.call(shard, adopt, time_left(deadline, what))
            except MovedError as exc:
                if shard == upload.shard:
                    raise ShardUnavailableError(f"{what}: expected its tensors in shard {shard}; {exc}") from exc
                raise
            upload.taken(shard, blocks)
        left = time_left(deadline, what)
        commit = ShardCalls.commit(draft, self._session.client, upload.life, upload.blocks, leases, durable, left)
        waits = self._session.path is not None or self._session.topology.replicas > 1
        grace = GRACE_S if waits else 0.0
        return self._session.call(home, commit, left + grace)[0]

    def _tidy(self, save: Save, shards: set[int], leases: Sequence[Lease]) -> None:
        """Let go of what the commit did not: it stands, so a shard that died now is no error of this save."""
        try:
            for shard in shards:
                self._session.call(shard, ShardCalls.abort(save, []))
            self._session.unpin(leases)
        except TensorVineError as exc:
            log.warning("save %s: committed, but what it held could not be released yet: %s", save, exc)
            for lease in leases:
                self._session.drop(lease)

    def _abort(self, save: Save, shards: set[int], leases: Sequence[Lease]) -> None:
        """Give a failed save up without waiting: the shard in question may be what failed."""
        for lease in leases:
            self._session.drop(lease)
        for shard in shards:
            try:
                self._session.send(shard, ShardCalls.abort(save, []))
            except TensorVineError as exc:
                log.debug("shard %d did not hear that %s was given up: %s", shard, save, exc)
