"""Saving: having it begun at the shard, staging what is to be written, committing it.

Rules
- A save reads the caller's tensors until it is staged, and never after.
- Where the shard is on this node, tensors are copied into its memory, once, and stay there; the shard hashes them
  meanwhile. One on another node fetches them from where they lie (`offer`).
- A save that is to come can be announced: its first question is answered, and its graph read by the shard, while its
  caller does something else.
- Nothing is visible before the commit, and what a failed save staged is dropped: by its own word, or by the shard
  when this process has died.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count

import numpy as np

from ....store.errors import GraphError, MovedError, ShardUnavailableError, StoreFullError, TensorVineError
from ....store.holders import Lease, Save
from ....store.refs import ModelRef
from ....store.versions.architectures import Architecture
from ....store.versions.manifest import check_metadata, encode_body, slots_of
from ....store.versions.version import Draft
from ....store.waiting import Deadline
from ...memory.workers import Workers
from ...rpc.messages import Beginning, Begun
from ...shard.calls import ShardCalls
from ..catalog import Catalog
from ..pins import Asked
from ..reader import Reader
from ..session import CONTROL_TIMEOUT_S, Session
from .inheritance import Inheritance, Plan
from .pending import PendingSave
from .request import Announced, Saved, SaveRequest, to_write
from .reserved import ReservedMemory
from .upload import Upload, announce

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How much longer than its shard a saver waits: the shard knows why the disk, or another shard, is late."""
GREET_S = 5.0
"""How long a client that came waits for the shard of its node; a save that comes then asks anew."""


class Saver:
    """Carries out saves of one client, one at a time, in the order they were asked for."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._inheritance = Inheritance(session, catalog, reader)
        self._serial = count(1)
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

    def announce(
        self,
        name: str,
        parent: tuple[str, int | None] | None,
        arrays: Mapping[str, np.ndarray],
        architecture: Architecture | None = None,
    ) -> Announced:
        """Begin a save that is to come, without waiting: `SaveRequest.announced` takes it up, `withdraw` ends it.

        Args:
            name: of the model.
            parent: name and version; None: the latest version of `name`, if there is one.
            arrays: like those that will probably be written, in the graph's order.
            architecture: the graph that will probably be saved, and its recipe; None: that is not known yet.

        Raises:
            TensorVineError: it cannot be sent.
        """
        self._session.keep_alive()
        save = Save(self._session.client, next(self._serial))
        own = Asked(save, self._session.pins)
        shard = self._session.home(parent[0] if parent is not None else name)
        deadline = Deadline.after(CONTROL_TIMEOUT_S)
        at_home = shard == self._session.home(name)
        lengths = announce(arrays) if at_home and self._is_mapped(shard, deadline) else []
        asked = self._beginning(name, parent, False, save, shard, deadline, lengths)
        key = _key_of(architecture) if architecture is not None and at_home else None
        if architecture is not None and key is not None:
            asked = replace(asked, graph=(key, architecture))
        return Announced(save, lengths, shard, self._session.send(shard, ShardCalls.begin(asked)), own, key)

    def withdraw(self, announced: Announced) -> None:
        """Drop what was granted and pinned for a save that does not come; does not wait."""
        announced.asked.abort()

    def save(
        self,
        request: SaveRequest,
        pending: PendingSave,
        staged: Callable[[], None],
        upload: Upload | None = None,
    ) -> Saved:
        """Save, calling `staged` as soon as the caller may change its tensors.

        Args:
            request: what to save.
            pending: says whether the save was given up, and learns its id.
            staged: called once.
            upload: what `ReservedMemory.take` gave; None: the tensors are still the caller's.

        Raises:
            TensorVineError: see `Repository.save`; nothing of the save remains.
        """
        try:
            return self._save(request, pending, staged, upload)
        except ShardUnavailableError:
            if upload is None or upload.shard in self._session.topology.alive:
                raise
        # The shard has drained and ended. Its memory is mapped as long as the copies there are.
        return self._save(request, pending, staged, None)

    def _save(
        self, request: SaveRequest, pending: PendingSave, staged: Callable[[], None], upload: Upload | None
    ) -> Saved:
        deadline = request.deadline
        if upload is not None:
            save = upload.save
        elif request.announced is not None:
            save = request.announced.save
        else:
            save = Save(self._session.client, next(self._serial))
        pending.save = save
        home = self._session.home(request.name)
        self._session.keep_alive()
        leases: list[Lease] = []
        asked = {home} if upload is None else {home, upload.shard}  # shards that may have granted memory
        try:
            self._check_metadata(request, home, deadline)
            lengths = self._lengths(request, home, deadline) if upload is None else []
            begun = self._early(request, deadline) or self._begun(request, home, deadline, save, lengths)
            if begun.offsets:
                asked.add(begun.shard)  # the name may have moved since
            if begun.lease is not None:
                leases.append(begun.lease)
            pending.check()
            plan = self._inheritance.plan(request, begun, deadline)
            if upload is not None:
                upload.keep(plan.written)
            else:
                fits = lengths == announce(plan.written)
                upload = self._written(request, plan, save, begun, begun.offsets if fits else [], deadline, asked)
                staged()
                upload.finish()
            pending.commit()
            saved, at = self._commit(request, begun, plan, upload, leases, deadline)
        except BaseException as exc:
            # at all shards, as requests without an answer may be at any, and at one that drains with what it adopted
            self._session.pins.abort(save, asked.union(self._session.topology.alive))
            if isinstance(exc, StoreFullError):
                raise StoreFullError(f"save of {request.name!r}: {exc}") from exc
            raise
        if request.announced is not None:
            request.announced.asked.kept()
        self._tidy(save, (asked | upload.at) - {at}, leases)
        return saved

    def _check_metadata(self, request: SaveRequest, home: int, deadline: Deadline) -> None:
        """Raise what the commit would raise for too much metadata, before any tensor is copied."""
        with contextlib.suppress(MovedError):  # the home has drained: the commit checks it
            check_metadata(
                request.name, request.metadata, self._session.connection(home, deadline).hello.metadata_bytes
            )

    def _written(
        self,
        request: SaveRequest,
        plan: Plan,
        save: Save,
        begun: Begun,
        granted: list[int],
        deadline: Deadline,
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
                    granter=begun.incarnation,
                )
                if request.bring is not None:
                    request.bring(upload.allocate(plan.written), deadline)
                else:
                    upload.write(plan.written, home == near)
                self._filled = near
            except MovedError as exc:  # it drains
                deadline.left_for(what)
                self._session.refresh(exc.version)
                continue
            return upload

    def _early(self, request: SaveRequest, deadline: Deadline) -> Begun | None:
        """Return the answer that a save was announced for; None: it was not, or the answer is none to go on with."""
        announced = request.announced
        if announced is None:
            return None
        try:
            return announced.begun.result(deadline.left())
        except TensorVineError as exc:
            log.info("the announcement of %s failed, the save begins now: %s", announced.save, exc)
            return None

    def _begun(self, request: SaveRequest, home: int, deadline: Deadline, save: Save, lengths: list[int]) -> Begun:
        """Have the parent pinned, and memory granted for blocks of `lengths` where its home is the save's, too."""
        name = request.parent[0] if request.parent is not None else request.name
        while True:
            shard = self._session.home(name)
            left = deadline.left_for(f"save of {request.name!r}")
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
        deadline: Deadline,
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
            timeout=deadline.left(),
        )

    def _is_mapped(self, shard: int, deadline: Deadline) -> bool:
        return self._session.connection(shard, deadline).view is not None

    def _lengths(self, request: SaveRequest, home: int, deadline: Deadline) -> list[int]:
        """Return the lengths of the blocks that the save will probably need, to ask memory for them at once."""
        if request.announced is not None:
            return request.announced.lengths
        if request.bring is not None:
            return []
        try:
            if not self._is_mapped(home, deadline):
                return []
        except MovedError:  # it has drained
            return []
        return announce(to_write(request))

    def _commit(
        self,
        request: SaveRequest,
        begun: Begun,
        plan: Plan,
        upload: Upload,
        leases: list[Lease],
        deadline: Deadline,
    ) -> tuple[Saved, int]:
        """Make the version exist; gives the shard that did, too."""
        entries = {**plan.inherited, **upload.entries}
        architecture = plan.graph.to_json(), request.recipe
        key = _key_of(architecture)
        parent, home = begun.header, self._session.home(request.name)
        announced = request.announced.graph_key if request.announced is not None else None
        kept = begun.shard == home and key in (parent.graph_key if parent is not None else None, announced)
        single = {(entry.segment, entry.slot): entry for entry in entries.values()}  # tied tensors count once
        written = sum(entry.nbytes for entry in single.values() if entry.owner is None)
        inherited = sum(entry.nbytes for entry in single.values() if entry.owner is not None)
        draft = Draft(
            name=request.name,
            save=upload.save,
            parent=parent.ref if parent is not None else None,
            quality=request.quality,
            metadata=request.metadata,
            graph_key=key,
            architecture=None if kept else architecture,
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
            except GraphError:  # who had it there, and the graph with it, has moved away
                if draft.architecture is not None:
                    raise
            draft = replace(draft, architecture=architecture)
            home = self._session.home(request.name)
        leases[:] = [lease for lease in leases if lease not in mine]
        self._catalog.learn(ref, draft.body, plan.graph, key)
        return Saved(ref, written, inherited), home

    def _commit_at(
        self, home: int, draft: Draft, upload: Upload, leases: list[Lease], durable: bool, deadline: Deadline
    ) -> ModelRef:
        """Have a shard commit; what lies on another one is taken there first."""
        what = f"save of {draft.name!r}"
        topology = self._session.topology
        for shard, blocks in upload.places(topology.where).items():
            if shard == home:
                continue
            try:
                self._session.connection(shard, deadline)  # it must know this client
                adopt = ShardCalls.adopt(upload.save, upload.incarnation, blocks)
                self._session.call(shard, adopt, deadline.left_for(what))
            except MovedError as exc:
                if shard == upload.shard:
                    raise ShardUnavailableError(f"{what}: expected its tensors in shard {shard}; {exc}") from exc
                raise
            upload.taken(shard, blocks)
        left = deadline.left_for(what)
        commit = ShardCalls.commit(
            draft, self._session.client, upload.incarnation, upload.blocks, leases, durable, left
        )
        waits = self._session.path is not None or self._session.topology.replicas > 1
        grace = GRACE_S if waits else 0.0
        return self._session.call(home, commit, left + grace)[0]

    def _tidy(self, save: Save, shards: set[int], leases: Sequence[Lease]) -> None:
        """Release what the commit did not: it stands, so a shard that died now is no error of this save."""
        try:
            for shard in shards:
                self._session.call(shard, ShardCalls.abort(save))
            self._session.pins.unpin(leases)
        except TensorVineError as exc:
            log.warning("save %s: committed, but its memory and pins could not be released yet: %s", save, exc)
            self._session.pins.abort(save, shards)
            self._session.pins.unpin_behind(leases)


def _key_of(architecture: Architecture) -> bytes:
    text, recipe = architecture
    return blake2b(f"{text}\0{recipe}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
