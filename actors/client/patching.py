"""Loads into arrays that hold another version: `Repository.load` with `have`.

Rules
- Tensors whose shard is on this node are mapped and copied, as in any load: nothing is encoded for them. The rest of
  these rules is about the others.
- Claims are proved. A tensor counts as unchanged if the array has the content hash of the version's; a patch counts
  once its result has it. Other arrays get the whole tensor, whose hash is checked, too.
- All tensors are ready, outside of the caller's arrays, before the first array is written to.
- The version that was loaded last stays pinned until the next such load of this client. So its tensors are there as
  bases, whatever is retired.
- Only a shard that has both tensors makes a patch. A reader asks for one if it is predicted to be sooner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import numpy as np
from cachetools import LRUCache

from ...store.archive.segmentfile import Slot
from ...store.arrays import Array, as_bytes, dtype_of
from ...store.errors import (
    CorruptDataError,
    ModelLostError,
    ModelNotFoundError,
    MovedError,
    OptionError,
    TensorMismatchError,
    TensorVineError,
)
from ...store.patches import apply_patch, header_of
from ...store.refs import Model, ModelRef, split_ref, text_of
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import TensorEntry, digest_of
from ...store.waiting import Deadline
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.channel import Answer
from ..shard.calls import ShardCalls
from ..shard.calls.patches import GONE, OTHER, Update
from .catalog import Catalog
from .fetch.buffers import Expected, targets_of
from .fetch.transports import AUTO
from .patch_costs import PATCH, WHOLE, PatchCosts
from .pinned import Pinned
from .reader import Reader, Selection
from .session import Session

log = logging.getLogger(__name__)

Have = Model | Mapping[str, str]
"""A version, or tensor -> content hash."""

BATCH_BYTES = 128 << 20
"""Of tensors, in one question. The next questions are on their way while patches are applied."""
AHEAD = 3
LEAST_BYTES = 1 << 10
"""A smaller tensor comes whole: no patch of it is worth a look."""
THREADS = 2
MODELS = 256
"""Whose costs are kept."""

RETIRED = "the base was retired"
OTHER_KIND = "the base has another dtype or shape"
ELSEWHERE = "the base is in another shard"
LIED = "the array does not hold the base"
UNPLAIN = "the array is not contiguous, or has another byte order"
DAMAGED = "the patch was damaged"
FAILED = "the shard sent no patches"
"""Causes, in addition to those of `shard.calls.patches`."""


@dataclass(frozen=True, slots=True)
class _Load:
    """One load under way."""

    ref: ModelRef
    transport: str
    deadline: Deadline
    chosen: Mapping[str, TensorEntry]
    targets: Mapping[str, Array]
    """The caller's arrays."""
    where: dict[SegmentId, int]
    """Segment -> the shard that answers for it; those of a base, too."""

    @property
    def what(self) -> str:
        """Names it in errors and the log."""
        return f"load of {self.ref}"


@dataclass(frozen=True, slots=True)
class _Base:
    """The content of an array, as its owner claims."""

    content: str
    place: Slot | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that is to come as a patch."""

    update: Update
    content: str
    """Content hash of the tensor."""
    nbytes: int


_Sent = list[np.ndarray | str]
"""Patches, or reasons for their absence."""


class Patching:
    """The loads of one client into arrays that hold other versions."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader
        self._meter = reader.meter
        self._costs: LRUCache[str, PatchCosts] = LRUCache(MODELS)
        self._held: Pinned | None = None
        self._lock = threading.Lock()

    def load(
        self,
        model: Model,
        selection: Selection,
        into: Mapping[str, object] | None,
        have: Have,
        timeout: float,
        transport: str,
    ) -> dict[str, np.ndarray]:
        """Load a version; see `Repository.load`."""
        self._session.opened.check()
        self._reader.check_transport(transport)
        if into is None:
            raise OptionError(f"load of {model}: have=: expected into= with the arrays that hold it; found none")
        base, deadline = _checked(have), Deadline.after(timeout)
        pin = self._pinned(model, deadline)
        try:
            found = self._loaded(pin.ref, selection, into, base, transport, deadline)
        except BaseException:
            pin.release()
            raise
        with self._lock:
            pin, self._held = self._held, pin
        if pin is not None:
            pin.release()
        return found

    def _pinned(self, model: Model, deadline: Deadline) -> Pinned:
        """Pin the version, or the latest one: the next one is tried if it is retired just now."""
        name, which = split_ref(model)
        while True:
            request = CatalogCalls.header(self._session.client, name, which)
            ref = self._session.ask(request, deadline.left_for(f"load of {model}")).ref
            try:
                return Pinned(self._session, ref)
            except ModelNotFoundError:
                if isinstance(which, int):
                    raise

    def _loaded(
        self,
        ref: ModelRef,
        selection: Selection,
        into: Mapping[str, object],
        base: ModelRef | Mapping[str, str],
        transport: str,
        deadline: Deadline,
    ) -> dict[str, Array]:
        located = self._reader.located(ref, transport, deadline)
        chosen = self._reader.select(ref, self._catalog.table(ref, located.body), selection)
        expected = {name: Expected(dtype_of(e.dtype), e.shape, (e.segment, e.slot)) for name, e in chosen.items()}
        targets = targets_of(expected, into, str(ref))
        while True:
            where = {segment: place[0] for segment, place in located.places.items()}
            if missing := {entry.segment for entry in chosen.values()} - where.keys():
                raise ModelLostError(f"{ref}: expected the places of all segments; found none of {sorted(missing)}")
            try:
                came = self._arrays(_Load(ref, transport, deadline, chosen, targets, where), base)
                break
            except MovedError:  # a shard has left just now
                self._session.moved(None, f"load of {ref}", deadline)
                located = self._reader.located(ref, transport, deadline)
        for name, array in came.items():
            np.copyto(targets[name], array)
        return targets

    def _arrays(self, load: _Load, base: ModelRef | Mapping[str, str]) -> dict[str, Array]:
        """Bring the tensors that the arrays do not have."""
        shards = {load.where[entry.segment] for entry in load.chosen.values()}
        near = {shard for shard in shards if self._reader.is_near(shard, load.transport, load.deadline)}
        far = {name: entry for name, entry in load.chosen.items() if load.where[entry.segment] not in near}
        held, updates = self._sorted(load, far, base)
        costs = self._costs_of(load.ref.name)
        nbytes, came = sum(each.nbytes for each in updates.values()), dict[str, Array]()
        if updates and load.transport == AUTO and costs.prefers_patches(nbytes):
            came = self._patched(load, updates, costs)
        self._meter.asked(sum(load.chosen[name].nbytes for name in (*held, *came)))
        rest = [name for name in load.chosen if name not in held and name not in came]
        return {**came, **self._whole(load, rest, far, costs)} if rest else came

    def _costs_of(self, name: str) -> PatchCosts:
        with self._lock:
            return self._costs.setdefault(name, PatchCosts())

    def _whole(
        self, load: _Load, names: Sequence[str], far: Mapping[str, TensorEntry], costs: PatchCosts
    ) -> Mapping[str, Array]:
        began, left = time.monotonic(), load.deadline.left_for(load.what)
        loaded = self._reader.fetch(load.ref, tensors=names, timeout=left, transport=load.transport, verify=True)
        if nbytes := sum(far[name].nbytes for name in names if name in far):
            costs.measured(WHOLE, nbytes, time.monotonic() - began)
        return loaded.arrays

    # ---- bases ----------------------------------------------------------------------------------------

    def _sorted(
        self, load: _Load, far: Mapping[str, TensorEntry], base: ModelRef | Mapping[str, str]
    ) -> tuple[set[str], dict[str, _Wanted]]:
        """Return the names of unchanged tensors, and the tensors for which an array has a base."""
        bases = self._bases(load, far, base)
        hashes = self._hashes(load, {far[name].segment for name in bases})
        held: set[str] = set()
        updates: dict[str, _Wanted] = {}
        for name, found in bases.items():
            entry, target = far[name], load.targets[name]
            content = _hash(hashes, entry)
            if not (target.flags.c_contiguous and target.dtype.isnative):
                self._meter.fell_back(UNPLAIN, load.what)
            elif found.content != content:
                if content and entry.nbytes >= LEAST_BYTES:
                    slot = entry.segment, entry.slot
                    update = Update(slot, found.content, found.place, entry.dtype, entry.shape)
                    updates[name] = _Wanted(update, content, entry.nbytes)
            elif digest_of(as_bytes(target)) == content:
                held.add(name)
            else:
                self._meter.fell_back(LIED, load.what)
        return held, updates

    def _bases(
        self, load: _Load, far: Mapping[str, TensorEntry], base: ModelRef | Mapping[str, str]
    ) -> dict[str, _Base]:
        """Return the claimed contents of arrays from which a patch can start."""
        if not isinstance(base, ModelRef):
            return {name: _Base(base[name], None) for name in far if name in base}
        try:
            before = self._table_of(load, base)
        except (ModelNotFoundError, ModelLostError):
            for _ in far:
                self._meter.fell_back(RETIRED, load.what)
            return {}
        usable = {name: before[name] for name in far if name in before and self._fits(load, far[name], before[name])}
        hashes = self._hashes(load, {entry.segment for entry in usable.values()})
        found = {name: _Base(_hash(hashes, e), (e.segment, e.slot)) for name, e in usable.items()}
        for each in found.values():
            if not each.content:
                self._meter.fell_back(GONE, load.what)
        return {name: each for name, each in found.items() if each.content}

    def _table_of(self, load: _Load, base: ModelRef) -> Mapping[str, TensorEntry]:
        """Return the table of a base, and learn where it is; one that is known need not exist any more."""
        try:
            located = self._reader.located(base, load.transport, load.deadline)
        except (ModelNotFoundError, ModelLostError):
            if self._catalog.known(base.name, base.version) is None:
                raise
            return self._catalog.table(base, None)
        load.where.update((segment, place[0]) for segment, place in located.places.items())
        return self._catalog.table(base, located.body)

    def _fits(self, load: _Load, new: TensorEntry, old: TensorEntry) -> bool:
        """Return whether a shard can make a patch from one tensor to another."""
        cause = None
        if (new.dtype, new.shape) != (old.dtype, old.shape):
            cause = OTHER_KIND
        elif old.segment not in load.where:
            cause = GONE
        elif load.where[new.segment] != load.where[old.segment]:
            cause = ELSEWHERE
        if cause is not None:
            self._meter.fell_back(cause, load.what)
        return cause is None

    def _hashes(self, load: _Load, segments: Iterable[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Ask the shards for content hashes."""
        by_shard: dict[int, list[SegmentId]] = {}
        for segment in segments:
            by_shard.setdefault(load.where[segment], []).append(segment)
        requests = {shard: ShardCalls.digests(part) for shard, part in by_shard.items()}
        answers = self._session.call_each(requests, load.deadline.left_for("content hashes")) if requests else []
        return {segment: hashes for answer in answers for segment, hashes in answer.items()}

    # ---- patches --------------------------------------------------------------------------------------

    def _patched(self, load: _Load, updates: Mapping[str, _Wanted], costs: PatchCosts) -> dict[str, Array]:
        """Bring patches, and return the tensors that they lead to."""
        began, until = time.monotonic(), Deadline.after(load.deadline.left() / 2)
        questions = deque(self._questions(load, updates))
        asked: deque[tuple[list[str], Answer[_Sent] | None]] = deque()
        came: dict[str, Array] = {}

        def applied(name: str, sent: np.ndarray | str) -> Array | None:
            return self._applied(load, name, updates[name], sent)

        with ThreadPoolExecutor(THREADS, thread_name_prefix="tensorvine-patch") as threads:
            while questions or asked:
                while questions and len(asked) < AHEAD:
                    shard, names = questions.popleft()
                    asked.append((names, self._ask(shard, [updates[name].update for name in names], until)))
                names, answer = asked.popleft()
                found = self._answered(load, names, answer, until)
                arrays = threads.map(applied, names, found)
                came.update((name, array) for name, array in zip(names, arrays, strict=True) if array is not None)
        costs.measured(PATCH, sum(array.nbytes for array in came.values()), time.monotonic() - began)
        return came

    def _questions(self, load: _Load, updates: Mapping[str, _Wanted]) -> Iterator[tuple[int, list[str]]]:
        """Yield the shard and the tensors of each question."""
        batches: dict[int, list[str]] = {}
        for name, wanted in updates.items():
            shard = load.where[wanted.update.tensor[0]]
            batch = batches.setdefault(shard, [])
            batch.append(name)
            if sum(updates[each].nbytes for each in batch) >= BATCH_BYTES:
                yield shard, batches.pop(shard)
        yield from batches.items()

    def _ask(self, shard: int, updates: Sequence[Update], until: Deadline) -> Answer[_Sent] | None:
        try:
            return self._session.send(shard, ShardCalls.patches(updates, until.left()))
        except TensorVineError as exc:
            log.debug("shard %d: no patches: %s", shard, exc)
            return None

    def _answered(self, load: _Load, names: Sequence[str], answer: Answer[_Sent] | None, until: Deadline) -> _Sent:
        if answer is None:
            return [FAILED] * len(names)
        try:
            found = answer.result(until.left())
        except TensorVineError as exc:
            log.info("%s: expected patches; whole tensors are loaded instead: %s", load.what, exc)
            return [FAILED] * len(names)
        sent = [each for each in found if not isinstance(each, str)]
        self._meter.moved(PATCH, sum(each.nbytes for each in sent), len(sent))
        return found

    def _applied(self, load: _Load, name: str, wanted: _Wanted, patch: np.ndarray | str) -> Array | None:
        """Apply a patch. A failure is counted, and returns None."""
        base, cause = load.targets[name], patch
        if not isinstance(patch, str):
            try:
                if header_of(patch)[0].result == wanted.content:
                    return apply_patch(patch, base)
                cause = OTHER
            except (CorruptDataError, TensorMismatchError) as exc:
                log.debug("%s: tensor %r: %s", load.what, name, exc)
                cause = DAMAGED if digest_of(as_bytes(base)) == wanted.update.base else LIED
        self._meter.fell_back(str(cause), load.what)
        return None


def _checked(have: Have) -> ModelRef | Mapping[str, str]:
    """Return the version, or the content hashes, that a caller has.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(have, Mapping):
        pairs = cast("Mapping[object, object]", have).items()
        if odd := [pair for pair in pairs if not all(isinstance(each, str) for each in pair)]:
            raise OptionError(f"load: have=: expected names and content hashes; found {odd[0]!r:.100}")
        return dict(have)
    name, version = split_ref(have)
    if not isinstance(version, int):
        found = text_of(name, version)
        raise OptionError(f"load: have=: expected a version, such as '{name}@3'; found {found!r}, which may be any")
    return ModelRef(name, version)


def _hash(hashes: Mapping[SegmentId, Sequence[str]], entry: TensorEntry) -> str:
    """Return a tensor's content hash, or "" if its shard did not send it."""
    found = hashes.get(entry.segment, ())
    return found[entry.slot] if entry.slot < len(found) else ""
