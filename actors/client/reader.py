"""Loading: from a model's name to read-only arrays, which lie where the shard has them wherever that can be mapped.

Rules
- One message to the catalog finds a model that was never met: its table and the places of its segments. What lies
  elsewhere than was said, or in no mapped memory, is asked of its shard.
- A load that was made before needs none. A version that was named is the one whose headers are found where it lay. The
  latest one is that, as long as the version page shows the counter of its name that was told with it.
- No place is believed: a block counts when it is locked and its header says that it is the one (`memory`).
- A shard that has not what the catalog said of it is no error: the catalog is asked again, until the time is over.
- No memory is kept: an array locks its block in the shard until nobody uses it any more. So arrays stay intact,
  whatever becomes of the model.
- What is not mapped is carried, by the transport (`fetcher`) that is predicted to be the fastest, or that the caller
  names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache

from ...store import traces
from ...store.arrays import dtype_of
from ...store.counting import Counts
from ...store.errors import (
    EngineStoppedError,
    ModelLostError,
    MovedError,
    OperationTimeoutError,
    OptionError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorMismatchError,
    TensorNotFoundError,
    without_frames,
)
from ...store.metrics import LOAD, LOADED_BYTES, LOOKUPS
from ...store.refs import Model, ModelRef, Which, split_ref, text_of
from ...store.segments.arena import Part
from ...store.segments.segment import GONE, Block, Offset, SegmentId, layout
from ...store.versions.manifest import TensorEntry, sizes_of
from ...store.waiting import NEVER, Backoff, Deadline
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import Located, Location
from ..shard.calls import ShardCalls
from ..transport.frames import Received, Slots
from .catalog import Catalog
from .fetch import buffers
from .fetch.fetcher import Fetcher, Wish
from .fetch.transports import AUTO, REACH_S, SHARED, SharedMemoryTransport, Transport, far_transports
from .session import Session
from .traffic import Meter

PLANS = 256
"""Loads whose places are kept."""
TOLD = 64
"""Versions that were told of unasked, and not loaded yet."""
AGAIN_S = (0.002, 0.5)
"""Shortest and longest pause before the catalog is asked again where segments are."""

Selection = tuple[str, tuple[str, ...]] | None
"""("layers" or "tensors", their names); None: all tensors."""
Key = tuple[str, Which, Selection]
_Row = tuple[str, SegmentId, Offset, tuple[int, ...], np.dtype]
"""(name, segment, offset in its block, shape, dtype)."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model's tensors, and how they came."""

    arrays: dict[str, np.ndarray]
    """Tensor -> read-only array."""
    ref: ModelRef
    """The version."""
    transports: dict[str, int]
    """Transport -> bytes of the tensors that came by it; those that this client has already count for none."""
    digests_checked: bool
    """All that travelled was held against its content hashes."""
    created_ns: int
    """When the version was committed, by the clock of its shard."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the tensors of a load lie in mapped memory."""

    ref: ModelRef
    created_ns: int
    rows: list[_Row]
    nbytes: int
    """Of the tensors."""
    blocks: dict[SegmentId, Block]
    counter: int
    """Of the name: the version is the latest while the version page shows it."""


class _NowhereError(ModelLostError):
    """No shard has some segments; only a file could."""


class _AwayError(ShardUnavailableError):
    """A shard that was asked for blocks does not answer."""


_Offsets = Mapping[int, int] | Sequence[Offset]
"""Slot -> where it starts."""


class _Held(dict[SegmentId, tuple[Block, np.ndarray]]):
    """Blocks that are locked, and are what they were said to be."""


class Reader:
    """Loads tensors for one client.

    Args:
        session: the client's.
        catalog: what it knows of models.
        far: transports to shards whose memory is not mapped, the preferred one first; None: all that there are.
    """

    def __init__(self, session: Session, catalog: Catalog, far: Sequence[Transport] | None = None) -> None:
        self._session = session
        self._catalog = catalog
        self._shared = SharedMemoryTransport(session)
        self.meter = Meter()
        """Counts what loads move."""
        self._fetcher = Fetcher(far if far is not None else far_transports(session), session.counts, self.meter)
        self._plans: LRUCache[Key, _Plan] = LRUCache(PLANS)
        self._told: LRUCache[ModelRef, Located] = LRUCache(TOLD)
        self._lock = threading.Lock()

    def load(
        self,
        model: Model,
        layers: Sequence[str] | None,
        tensors: Sequence[str] | None,
        into: Mapping[str, object] | None,
        timeout: float,
        transport: str = AUTO,
    ) -> dict[str, np.ndarray]:
        """Load a model's tensors; see `Repository.load`."""
        arrays = self._loaded(model, selection_of(layers, tensors, into), timeout, transport, False).arrays
        return arrays if into is None else buffers.filled(arrays, into, str(model))

    def fetch(
        self,
        model: Model,
        layers: Sequence[str] | None = None,
        tensors: Sequence[str] | None = None,
        timeout: float = 60.0,
        transport: str = AUTO,
        verify: bool = False,
    ) -> Loaded:
        """Load a model's tensors, and tell how they came.

        Args:
            model: the version.
            layers: names of layers.
            tensors: names of tensors.
            timeout: seconds.
            transport: a transport's name, or `"auto"`.
            verify: hold what travels against the content hashes that its shard has.

        Raises:
            OptionError: there is no such transport.
            CorruptDataError: what travelled is not what the shard has.
            TensorVineError: see `Repository.load`.
        """
        return self._loaded(model, selection_of(layers, tensors, None), timeout, transport, verify)

    def expect(self, located: Located) -> None:
        """Take what was told of a version unasked, with its table, for the answer to the next load of it."""
        with self._lock:
            self._told[located.header.ref] = located

    def forget(self, ref: ModelRef) -> None:
        """Have the next load of a version that this client retired ask the catalog, which may keep it for a pin."""
        with self._lock:
            for key in [key for key, plan in self._plans.items() if plan.ref == ref]:
                del self._plans[key]
            self._told.pop(ref, None)

    def mapped(self, entries: Mapping[str, TensorEntry], places: Mapping[SegmentId, Location]) -> dict[str, np.ndarray]:
        """Return those of these tensors that lie in mapped memory, or whose bytes are here, without a message.

        Args:
            entries: name -> which.
            places: where the catalog says that segments are; others may be where they were met.
        """
        sizes, held = sizes_of(entries.values()), _Held()
        for segment, slots in sizes.items():
            told = _block_of(places[segment], slots) if segment in places else None
            for block in (told, self._catalog.block(segment)):
                if segment not in held and block is not None and block.covers(slots):
                    self._lock_all(held, {segment: block})
        here = {name: entry for name, entry in entries.items() if entry.segment in held}
        offsets = {segment: block.offsets for segment, (block, _) in held.items()}
        return _views(_rows(here, offsets), {segment: array for segment, (_, array) in held.items()})

    def is_mapped(self, shard: int, deadline: Deadline = NEVER) -> bool:
        """Tell whether a shard's memory can be read in place."""
        node = self._session.nodes.get(shard, self._session.node)
        return node == self._session.node and self._shared.brings(shard, deadline)

    def check_transport(self, transport: str) -> None:
        """Make sure that there is a transport of this name.

        Raises:
            OptionError: no transport has this name.
        """
        if transport not in (AUTO, SHARED, *self._fetcher.names):
            raise OptionError(f"transport: expected one of {[AUTO, SHARED, *self._fetcher.names]}; found {transport!r}")

    def is_near(self, shard: int, transport: str, deadline: Deadline) -> bool:
        """Return whether a load by this transport maps the segments of a shard."""
        return transport in (AUTO, SHARED) and self.is_mapped(shard, deadline)

    def located(self, ref: ModelRef, transport: str, deadline: Deadline) -> Located:
        """Return where a version's segments are, as the catalog says now.

        Raises:
            ModelNotFoundError, ModelLostError: there is no such live version.
        """
        return self._located(ref.name, ref.version, Wish(f"load of {ref}", transport, False, deadline))

    @property
    def far_transports(self) -> tuple[str, ...]:
        """Names of the transports by which what is not mapped may come, the preferred one first."""
        return tuple(self._fetcher.automatic)

    def close(self) -> None:
        """Let go of what the transports keep open."""
        self._fetcher.close()

    def _loaded(self, model: Model, selection: Selection, timeout: float, transport: str, verify: bool) -> Loaded:
        """Load, and count it."""
        begun, counts = time.perf_counter(), self._session.counts
        with traces.span("load") as traced:
            try:
                loaded, planned = self._brought(model, selection, timeout, transport, verify)
            except Exception as exc:
                counts.failed("load", exc)
                raise
            if traced is not None:
                traces.note(version=str(loaded.ref), bytes=sum(loaded.transports.values()))
        count_load(counts, loaded.transports, planned, time.perf_counter() - begun)
        return loaded

    def _brought(
        self, model: Model, selection: Selection, timeout: float, transport: str, verify: bool
    ) -> tuple[Loaded, bool]:
        """Load; return also whether the places were known without a message."""
        self._session.opened.check()
        self.check_transport(transport)
        name, which = split_ref(model)
        key: Key = (name, which, selection)
        plan = self._planned(key) if transport in (AUTO, SHARED) else None
        if plan is not None:
            self.meter.asked(plan.transports[SHARED], plan.transports[SHARED])
            return plan, True
        self._session.keep_alive()
        wish = Wish(f"load of {model}", transport, verify, Deadline.after(timeout))
        held, pauses = _Held(), Backoff(*AGAIN_S)
        while True:
            located = self._located(name, which, wish)
            try:
                return self._fetched(key, located, held, wish), False
            except (ModelLostError, MovedError, _AwayError) as exc:
                if (isinstance(exc, _NowhereError) and self._session.path is None) or not pauses.wait(wish.deadline):
                    if isinstance(exc, ShardUnavailableError):
                        raise
                    raise ModelLostError(f"{located.header.ref} is lost in part: {exc}") from without_frames(exc)
            except BaseException:
                held.clear()  # whoever keeps the error keeps this frame
                raise

    # ---- without a message ----------------------------------------------------------------------------

    def _planned(self, key: Key) -> Loaded | None:
        """Return the arrays of a load that was planned before, if its plan still holds."""
        with self._lock:
            plan = self._plans.get(key)
        if plan is None or not (isinstance(key[1], int) or self._counter_of(*key[:2]) == plan.counter):
            return None
        blocks: dict[SegmentId, np.ndarray] = {}
        for segment, block in plan.blocks.items():
            locked = self._shared.lock(segment, block)
            if locked is None:
                return None
            blocks[segment] = locked
        return Loaded(_views(plan.rows, blocks), plan.ref, {SHARED: plan.nbytes}, True, plan.created_ns)

    # ---- with messages --------------------------------------------------------------------------------

    def _located(self, name: str, which: Which, wish: Wish) -> Located:
        """Return a version's header, its table unless that is known, and where its segments are."""
        known = self._catalog.known(name, which)
        located = self._heard(name, which if isinstance(which, int) or known is None else known.version)
        if located is not None and (isinstance(which, int) or self._is_current(located, name, which)):
            return located
        request = CatalogCalls.locate(self._session.client, name, which, known)
        located = self._session.ask(request, wish.deadline.left_for(wish.what))
        self._catalog.meet(located.header, located.body, which)
        if not isinstance(which, int):
            self._session.look_for_page(text_of(name, which))
        return located

    def _is_current(self, located: Located, name: str, which: Which) -> bool:
        """Return whether what was pushed is still the latest version, or that of an alias."""
        return located.asked == text_of(name, which) and self._counter_of(name, which) == located.counter

    def _counter_of(self, name: str, which: Which) -> int | None:
        return self._session.counter_of(text_of(name, which))

    def _heard(self, name: str, which: Which) -> Located | None:
        """Give, once, what was told unasked of a version."""
        with self._lock:
            told = self._told.pop(ModelRef(name, which), None) if isinstance(which, int) else None
        if told is not None:
            self._catalog.meet(told.header, told.body, which)
        return told

    def _fetched(self, key: Key, located: Located, held: _Held, wish: Wish) -> Loaded:
        """Lock what lies in mapped memory, and carry the rest.

        What is `held` stays so when this is tried again: it cannot change any more.

        Raises:
            ModelLostError, MovedError, _AwayError: segments are not where they were said to be.
        """
        ref, places = located.header.ref, located.places
        chosen = self.select(ref, self._catalog.table(ref, located.body), key[2])
        sizes = sizes_of(chosen.values())
        if missing := sizes.keys() - places.keys():
            raise _NowhereError(f"expected the places of all segments; found none of {sorted(missing)}")
        here = wish.transport in (AUTO, SHARED)
        near = {s for s in sizes if here and (s in held or self.is_mapped(places[s][0], wish.deadline))}
        told = {s: block for s in near if (block := _block_of(places[s], sizes[s])) is not None}
        self._lock_all(held, {s: told[s] for s in _lacking(held, {s: list(sizes[s]) for s in told})})
        if self._session.path is not None and _lacking(held, {s: list(sizes[s]) for s in near}):
            held.clear()  # who waits for room keeps nothing, so that no two loads wait for each other
        while lacking := _lacking(held, {s: list(sizes[s]) for s in near}):
            wish.deadline.left_for(wish.what)
            self._lock_all(held, self._blocks(lacking, places, wish))
        far = {name: entry for name, entry in chosen.items() if entry.segment not in near}
        carried, transports = self._carried(far, {s: places[s][0] for s in sizes}, wish)
        offsets: dict[SegmentId, _Offsets] = {segment: held[segment][0].offsets for segment in near}
        offsets.update((segment, part.offsets) for segment, part in carried.items())
        rows = _rows(chosen, offsets)
        nbytes = sum(entry.nbytes for name, entry in chosen.items() if name not in far)
        if not far:
            places_here = {segment: held[segment][0] for segment in near}
            plan = _Plan(ref, located.header.created_ns, rows, nbytes, places_here, located.counter)
            with self._lock:
                self._plans[key] = plan
        blocks = {segment: held[segment][1] for segment in near}
        blocks.update((segment, part.block) for segment, part in carried.items())
        if len(far) < len(chosen):
            transports[SHARED] = nbytes
        self.meter.asked(sum(entry.nbytes for entry in chosen.values()), nbytes)
        return Loaded(_views(rows, blocks), ref, transports, wish.verify or not far, located.header.created_ns)

    def _carried(
        self, far: Mapping[str, TensorEntry], where: Mapping[SegmentId, int], wish: Wish
    ) -> tuple[dict[SegmentId, Received], dict[str, int]]:
        """Carry what is not mapped; a shard that does not answer may have been left for another one."""
        try:
            return self._fetcher.carried(far, where, wish)
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            if wish.transport != AUTO or wish.deadline.passed or isinstance(exc, EngineStoppedError):
                raise
            if isinstance(exc, OperationTimeoutError):  # of a part of the time: it may answer by now, without the bytes
                raise _AwayError(str(exc)) from exc
            for shard in {where[entry.segment] for entry in far.values()}:
                self._check_answers(shard, wish)
            raise

    def _check_answers(self, shard: int, wish: Wish) -> None:
        try:
            self._session.connection(shard, wish.deadline.sooner(REACH_S))
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            raise _AwayError(str(exc)) from exc

    def _blocks(self, wanted: Slots, places: Mapping[SegmentId, Location], wish: Wish) -> dict[SegmentId, Block]:
        """Ask shards whose memory is mapped where segments lie, or for their bytes."""
        by_shard: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in wanted.items():
            by_shard.setdefault(places[segment][0], {})[segment] = slots
        sent = {shard: self._session.send(shard, ShardCalls.blocks(part)) for shard, part in by_shard.items()}
        found: dict[SegmentId, Block] = {}
        for shard, answer in sent.items():
            try:
                found |= answer.result(wish.deadline.left_for(wish.what))
            except EngineStoppedError:
                raise
            except (ShardUnavailableError, RepositoryNotFoundError) as exc:
                self._session.lost(shard, exc)
                raise _AwayError(str(exc)) from exc
        return found

    def _lock_all(self, held: _Held, blocks: Mapping[SegmentId, Block]) -> None:
        """Lock blocks, and add to what is `held` those that are what they were said to be."""
        for segment, block in blocks.items():
            array = self._shared.lock(segment, block)
            if array is not None:
                held[segment] = (block, array)
                self._catalog.put_block(segment, block)

    def select(self, ref: ModelRef, table: Mapping[str, TensorEntry], selection: Selection) -> dict[str, TensorEntry]:
        """Return the rows of a version's table that a load names.

        Raises:
            TensorNotFoundError: the version has no such layer or tensor.
        """
        if selection is None:
            return dict(table)
        kind, names = selection
        if kind == "layers":
            graph = self._catalog.graph_of(ref)
            unknown = [name for name in names if name not in graph.by_name]
            if unknown:
                raise TensorNotFoundError(f"{ref}: expected layers of its graph; found {unknown}")
            names = tuple(dict.fromkeys(t for name in names for t in graph.by_name[name].tensors))
        unknown = [name for name in names if name not in table]
        if unknown:
            raise TensorNotFoundError(f"{ref}: expected names of its {len(table)} tensors; found {unknown}")
        return {name: table[name] for name in names}


def count_load(counts: Counts, transports: Mapping[str, int], planned: bool, seconds: float) -> None:
    """Count a load.

    Args:
        counts: the client's.
        transports: transport -> bytes that came by it.
        planned: the places were known without a message.
        seconds: its duration.
    """
    counts.observe(LOAD, seconds)
    counts.add(LOOKUPS, 1.0, "hit" if planned else "miss")
    for transport, nbytes in transports.items():
        counts.add(LOADED_BYTES, nbytes, transport)


def selection_of(
    layers: Sequence[str] | None, tensors: Sequence[str] | None, into: Mapping[str, object] | None
) -> Selection:
    """Check which tensors a load names: by layers, by tensors, or by buffers.

    Raises:
        TensorNotFoundError: these are no names, or both layers and tensors are given.
        TensorMismatchError: `into` is no mapping.
    """
    for kind, names in (("layers", layers), ("tensors", tensors)):
        if isinstance(names, str):
            raise TensorNotFoundError(f"load: {kind}=: expected a sequence of names; found the string {names!r}")
        if not isinstance(names, Iterable | None):
            raise TensorNotFoundError(f"load: {kind}=: expected a sequence of names; found {names!r:.100}")
    if not isinstance(into, Mapping | None):
        raise TensorMismatchError(f"load: into=: expected a mapping of names to arrays; found {type(into).__name__}")
    if layers is not None and tensors is not None:
        raise TensorNotFoundError("load: expected layers= or tensors=; found both")
    kind, names = ("layers", layers) if layers is not None else ("tensors", tensors if tensors is not None else into)
    if names is None:
        return None
    found = tuple(names)
    odd = [name for name in found if not isinstance(name, str)]
    if odd:
        raise TensorNotFoundError(f"load: {kind}: expected names; found {odd[0]!r:.100}")
    return kind, found


def _block_of(location: Location, slots: Mapping[int, int]) -> Block | None:
    """Return where a segment's block is said to lie; None: in no shared memory, or where its slots start is not known.

    Args:
        location: of the segment.
        slots: those that are needed, with their bytes.
    """
    shard, place = location
    if place is None:
        return None
    offsets: tuple[Offset, ...]
    if place.offsets is not None:
        offsets = tuple(offset if offset >= 0 else GONE for offset in place.offsets)
    elif slots.keys() >= set(range(max(slots) + 1)):  # else the slots between them may be of any length
        offsets = tuple(layout([slots[slot] for slot in range(max(slots) + 1)])[0])
    else:
        return None
    return Block(Part(place.offset, place.length), offsets, place.generation, shard)


def _lacking(held: _Held, needed: Slots) -> dict[SegmentId, Sequence[int]]:
    """Return those segments of which not all slots that are needed lie in a block that is held."""
    return {s: slots for s, slots in needed.items() if s not in held or not held[s][0].covers(slots)}


def _rows(chosen: Mapping[str, TensorEntry], offsets: Mapping[SegmentId, _Offsets]) -> list[_Row]:
    return [(n, e.segment, offsets[e.segment][e.slot], e.shape, dtype_of(e.dtype)) for n, e in chosen.items()]


def _views(rows: Sequence[_Row], blocks: Mapping[SegmentId, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the arrays: views on the blocks, as read-only as these are."""
    return {
        name: np.ndarray(shape, dtype, blocks[segment], offset)  # pyright: ignore[reportArgumentType]
        for name, segment, offset, shape, dtype in rows
    }
