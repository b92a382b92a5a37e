"""Saving: staging what is to be written, and committing it by the shard of this node.

Rules
- A save reads the caller's tensors until it is staged, and never after, unless its caller waits for the commit.
- Where the shard is on this node, tensors are copied into its memory, once, and stay there; the shard hashes them
  meanwhile. One on another node fetches them from where they lie (`offer`).
- A client that knows the parent does not ask for it: the catalog refuses a commit by what is so no longer. Then, and
  where the parent is not known well enough to compare with it, the save begins: its parent is pinned, and stays the
  parent if there is a later version by then.
- Nothing is visible before the commit, and what a failed save staged is dropped: by its own word, or when its number is
  declared over, or when this process has died.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from ....store.errors import (
    ModelNotFoundError,
    MovedError,
    ShardUnavailableError,
    StoreFullError,
    TensorVineError,
    without_frames,
)
from ....store.graphs.graph import ModelGraph
from ....store.holders import Lease
from ....store.segments.segment import Label
from ....store.versions.architectures import Architecture
from ....store.versions.manifest import TensorEntry, check_metadata, encode_body, slots_of
from ....store.versions.slots import packed_slots
from ....store.versions.version import Draft
from ....store.waiting import Deadline
from ...memory.workers import Workers
from ...rpc.catalog_calls import CatalogCalls
from ...rpc.catalog_messages import Beginning, Committed, Refused
from ...rpc.messages import Filled, Handed
from ...shard.calls import ShardCalls
from ...shard.segment_memory import INLINE_BYTES
from ..catalog import Catalog
from ..reader import Reader
from ..requests import Numbered
from ..session import Session
from .inheritance import Inheritance, Parent, Plan, UnknownError
from .pending import LATE_S, PendingSave
from .request import Saved, SaveRequest
from .reserved import ReservedMemory
from .upload import Upload

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than its shard a saver waits: the shard knows why the catalog, or another shard, is late."""
GREET_S = 5.0
"""How long a client that came waits for the shard of its node; a save that comes then asks anew."""


class Saver:
    """Carries out saves of one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._inheritance = Inheritance(session, catalog, reader)
        self._helper = Workers(1, thread_name_prefix="tensorvine-copy")
        self.reserved = ReservedMemory(session, self._helper)
        self._filled: int | None = None
        """The shard that was written to last, or will probably be first."""

    def close(self) -> None:
        """End the helper thread."""
        self._helper.shutdown()

    def greet(self) -> None:
        """Have a connection to the shard that will probably be written to, and be expected there.

        Raises:
            TensorVineError: it does not answer.
        """
        self._filled = self._session.near(deadline=Deadline.after(GREET_S))

    def map_ahead(self) -> bool:
        """Map some of the memory that the next save will get at the shard of the last one; False: all is mapped.

        Raises:
            StoreFullError: the system has no memory for that.
        """
        connection = self._session.connections.present(self._filled) if self._filled is not None else None
        return connection is not None and connection.view is not None and connection.view.map_ahead()

    def save(
        self,
        request: SaveRequest,
        pending: PendingSave,
        staged: Callable[[], None],
        upload: Upload | None = None,
        *,
        rereads: bool,
    ) -> Saved:
        """Save, calling `staged` as soon as the caller may change its tensors.

        Args:
            request: what to save.
            pending: says whether the save was given up, and learns its number.
            staged: called once.
            upload: what `ReservedMemory.take` gave; None: the tensors are still the caller's.
            rereads: the tensors stay as they are until this returns, also after `staged` was called.

        Raises:
            TensorVineError: see `Repository.save`; nothing of the save remains.
        """
        while True:
            try:
                return self._save(request, pending, staged, upload, rereads)
            except MovedError as exc:
                what = f"save of {request.name!r}"
                if not rereads:
                    raise ShardUnavailableError(f"{what}: expected its shard to stay; {exc}") from without_frames(exc)
                self._session.moved(self._filled, what, request.deadline)
            upload = None  # memory of a shard that has ended is mapped as long as the copies there are

    def _save(
        self,
        request: SaveRequest,
        pending: PendingSave,
        staged: Callable[[], None],
        upload: Upload | None,
        rereads: bool,
    ) -> Saved:
        pending.numbered = numbered = upload.numbered if upload is not None else self._session.number()
        parent = Parent()
        try:
            check_metadata(request.name, request.metadata, self._session.metadata_bytes)
            parent, plan = self._planned(request, numbered, rereads)
            pending.check()
            if upload is None:
                upload = self._uploaded(request, plan, numbered, pending)
                staged()
                upload.finish()
            pending.commit()
            saved = self._committed(request, parent, plan, upload, rereads)
        except BaseException as exc:
            if pending.commits and not isinstance(exc, Exception):
                self._settle(request.name, numbered, upload)
            self._session.give_up(numbered)
            if isinstance(exc, StoreFullError):
                raise StoreFullError(f"save of {request.name!r}: {exc}") from exc
            raise
        finally:
            self._session.pins.forget([Lease(numbered.request)])
        self._session.requests.end(numbered)
        return saved

    def _settle(self, name: str, numbered: Numbered, upload: Upload | None) -> None:
        """Have a commit that was interrupted either stand when this returns, or never come.

        The catalog refuses it from now on. The shard is waited for as well: it sends no commit on any more, also if the
        catalog dies now, and its next process does not know what was refused.
        """
        request = numbered.request
        try:
            self._session.ask(CatalogCalls.abort(request), LATE_S)
            if upload is not None:
                with contextlib.suppress(ShardUnavailableError):  # one that has ended sends nothing on
                    self._session.send(upload.shard, ShardCalls.abort(request)).result(LATE_S)
        except TensorVineError as exc:
            log.error("save of %r: interrupted, and it is not known whether it was committed: %s", name, exc)

    # ---- the parent -----------------------------------------------------------------------------------

    def _planned(self, request: SaveRequest, numbered: Numbered, rereads: bool) -> tuple[Parent, Plan]:
        """Find out what is written and what is shared: by what is known, else with the parent pinned."""
        known = self._known(request) if rereads else None
        if known is not None:
            try:
                return known, self._inheritance.plan(request, known, request.deadline)
            except UnknownError:
                log.debug("save of %r: begins, to compare with %s", request.name, known.ref)
        parent = self._begun(request, numbered)
        return parent, self._inheritance.plan(request, parent, request.deadline)

    def _known(self, request: SaveRequest) -> Parent | None:
        """Return the parent as it is known here; None: it is to be asked for.

        A name that was never met is taken for a new one where a refusal costs little.
        """
        name, version = request.parent or (request.name, None)
        if request.parent is not None and version is None:
            return None
        ref = self._catalog.known(name, version)
        if ref is not None and (key := self._catalog.key_of(ref)) is not None:
            return Parent(ref, key, self._catalog.table(ref, None))
        nbytes = sum(array.nbytes for array in request.arrays.values())
        new = request.parent is None and not isinstance(request.inherit, Mapping) and nbytes <= INLINE_BYTES
        return Parent() if new and request.bring is None else None

    def _begun(self, request: SaveRequest, numbered: Numbered) -> Parent:
        """Have the parent pinned."""
        name, version = request.parent or (request.name, None)
        asked = Beginning(
            save=numbered.request,
            name=name,
            version=version,
            optional=request.parent is None,
            known=self._catalog.known(name, version),
            graph_key=_key_of((request.graph.to_json(), request.recipe)) if request.graph is not None else None,
            waits=isinstance(request.inherit, Mapping),
        )
        begun = self._session.ask(CatalogCalls.begin(asked), request.deadline.left_for(f"save of {request.name!r}"))
        if begun.header is None:
            return Parent(pinned=True, has_graph=begun.has_graph)
        header = begun.header
        self._catalog.meet(header, begun.body, version)
        if begun.lease is not None:
            self._session.pins.hold(begun.lease, header.ref)
        table = self._catalog.table(header.ref, begun.body)
        return Parent(header.ref, header.graph_key, table, begun.places, pinned=True, has_graph=begun.has_graph)

    # ---- the bytes ------------------------------------------------------------------------------------

    def _uploaded(self, request: SaveRequest, plan: Plan, numbered: Numbered, pending: PendingSave) -> Upload:
        """Write what is to be written to the shard that should hold it."""
        what, deadline = f"save of {request.name!r}", request.deadline
        while True:
            near = self._session.near(request.name, deadline)
            upload = Upload(
                self._session,
                near,
                numbered=numbered,
                deadline=deadline,
                what=what,
                helper=self._helper,
                check=pending.check,
            )
            try:
                if request.bring is not None:
                    request.bring(upload.allocate(plan.written), deadline)
                else:
                    upload.write(plan.written)
            except MovedError:
                self._session.moved(near, what, deadline)
                continue
            except ShardUnavailableError:  # it died, and what it was sent is gone
                if request.bring is not None:
                    raise
                self._session.moved(near, what, deadline)
                continue
            self._filled = near
            return upload

    # ---- the commit -----------------------------------------------------------------------------------

    def _committed(self, request: SaveRequest, parent: Parent, plan: Plan, upload: Upload, rereads: bool) -> Saved:
        """Make the version exist; begin again where what was known of the parent is so no longer."""
        brings_graph = False
        while True:
            rows = plan.inherited | upload.rows(plan.written)
            draft = self._draft(request, parent, plan, upload, rows, brings_graph)
            answer = self._handed(request, draft, parent, plan, upload, rows)
            if isinstance(answer, Committed):
                break
            log.info("save of %r: the catalog refused the commit: %s", request.name, answer.reason)
            request.deadline.left_for(f"save of {request.name!r}")
            if answer.missing == "graph":
                brings_graph = True
                continue
            parent = self._begun(request, upload.numbered)
            plan = self._inheritance.plan(request, parent, request.deadline)
            if lacks := upload.lacks(plan.written):
                if not rereads:
                    raise ModelNotFoundError(f"save of {request.name!r}: expected its parent to stay; {answer.reason}")
                upload.write(lacks)
                upload.finish()
        self._catalog.learn(answer.ref, draft.body, plan.graph, draft.graph_key)
        upload.learn(self._catalog, plan.digests)
        return Saved(answer.ref, draft.bytes_owned, draft.bytes_total - draft.bytes_owned)

    def _draft(
        self,
        request: SaveRequest,
        parent: Parent,
        plan: Plan,
        upload: Upload,
        rows: Mapping[str, TensorEntry],
        brings_graph: bool,
    ) -> Draft:
        architecture = plan.graph.to_json(), request.recipe
        key = _key_of(architecture)
        brought = None
        if brings_graph or not (key == parent.graph_key or (parent.has_graph and request.graph is not None)):
            brought = self._catalog.brought(key, architecture, plan.graph)
        single = {(entry.segment, entry.slot): entry for entry in rows.values()}  # tied tensors count once
        return Draft(
            name=request.name,
            save=upload.numbered.request,
            parent=parent.ref,
            quality=request.quality,
            metadata=request.metadata,
            graph_key=key,
            architecture=brought[0] if brought is not None else None,
            fingerprints=brought[1] if brought is not None else None,
            body=encode_body(rows),
            slots=packed_slots(slots_of(rows.values())),
            bytes_owned=sum(entry.nbytes for entry in single.values() if entry.owner is None),
            bytes_total=sum(entry.nbytes for entry in single.values()),
        )

    def _handed(
        self,
        request: SaveRequest,
        draft: Draft,
        parent: Parent,
        plan: Plan,
        upload: Upload,
        rows: Mapping[str, TensorEntry],
    ) -> Committed | Refused:
        """Have the shard commit; what lies in no shard's memory may be committed by any."""
        blocks = upload.blocks(rows)
        if self._session.path is not None:
            blocks = _labelled(blocks, rows, plan.graph, parent.table)
        what = f"save of {request.name!r}"
        while True:
            left = request.deadline.left_for(what)
            handed = Handed(
                draft=draft,
                default_parent=request.parent is None and not parent.pinned,
                incarnation=upload.incarnation,
                blocks=blocks,
                durable=request.durable,
                timeout=left,
            )
            try:
                commit = ShardCalls.commit(handed)
                return self._session.call(upload.shard, commit, left + GRACE_S, upload.incarnation)
            except ShardUnavailableError as exc:
                if request.durable or not upload.incarnation:
                    raise
                ended = self._session.ask(CatalogCalls.abort(upload.numbered.request), left)
                if ended is None:  # the version will not exist: the tensors that the shard had are gone
                    raise MovedError(str(exc)) from exc
                return ended
            except MovedError:
                if upload.incarnation:
                    raise
                self._session.moved(upload.shard, what, request.deadline)
            upload.shard = self._session.near(request.name, request.deadline)


def _labelled(
    blocks: Sequence[Filled], rows: Mapping[str, TensorEntry], graph: ModelGraph, parent: Mapping[str, TensorEntry]
) -> list[Filled]:
    """Say of segments what their files are to name: each slot once, a tied tensor by its last name."""
    layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
    labels: dict[tuple[int, int], dict[int, Label]] = {block.id: {} for block in blocks}
    for name, entry in rows.items():
        if entry.segment in labels:
            old = parent.get(name)
            alike = old is not None and (old.dtype, old.shape) == (entry.dtype, entry.shape)
            base = (old.segment, old.slot) if old is not None and alike else None
            label = Label(entry.slot, name, layers.get(name), entry.dtype, entry.shape, base)
            labels[entry.segment][entry.slot] = label
    return [replace(block, labels=tuple(labels[block.id].values())) for block in blocks]


def _key_of(architecture: Architecture) -> bytes:
    text, recipe = architecture
    return blake2b(f"{text}\0{recipe}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
