"""Loading: from a model's name to read-only arrays, which lie where the shard has them wherever that can be mapped.

Rules
- One message finds a model that was never met: manifest and places come together. One that was loaded before needs
  none: where its tensors lie is kept, and which version that is holds as long as its home's version page shows the same
  epoch.
- No place is believed: a block counts when it is locked and its header says that it is the one (`memory`). What is not
  there any more is asked for again. An answer may be of another version than the one that was expected, and lack
  blocks: what was not answered is asked for.
- No memory is kept: an array locks its block in the shard until nobody uses it any more. So arrays stay intact,
  whatever becomes of the model.
- What is not mapped is carried, by the transport (`fetcher`) that is predicted to be the fastest, or that the caller
  names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache

from ...planner.topology import Topology
from ...store import traces
from ...store.arrays import dtype_of
from ...store.counting import Counts
from ...store.errors import ModelLostError, MovedError, OptionError, TensorMismatchError, TensorNotFoundError
from ...store.metrics import LOAD, LOADED_BYTES, LOOKUPS
from ...store.refs import Model, ModelRef, split_ref
from ...store.segments.segment import Block, Offset, SegmentId
from ...store.versions.manifest import TensorEntry, slots_of
from ...store.waiting import NEVER, Deadline
from ..rpc.messages import Fetched
from ..shard.calls import ShardCalls
from ..transport.frames import Slots
from .catalog import Catalog
from .fetch import buffers
from .fetch.fetcher import Fetcher, Wish
from .fetch.transports import AUTO, SHARED, SharedMemoryTransport, Transport, far_transports
from .session import Session
from .traffic import Meter

PLANS = 256
"""Loads whose places are kept."""

Selection = tuple[str, tuple[str, ...]] | None
"""("layers" or "tensors", their names); None: all tensors."""
Key = tuple[str, int | None, Selection]
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
    """Where the tensors of a load lie in mapped memory, and until when this is the version to load."""

    ref: ModelRef
    created_ns: int
    rows: list[_Row]
    nbytes: int
    """Of the tensors."""
    blocks: dict[SegmentId, Block]
    home: int
    epoch: int
    """Of the home."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What shards answered."""

    ref: ModelRef
    created_ns: int
    chosen: dict[str, TensorEntry]
    """The table, as far as it was asked for."""
    near: set[SegmentId]
    """Segments of it that lie in mapped memory."""
    complete: bool
    """All of these are held."""
    home: int
    epoch: int | None
    """Of the home; None: its memory is not mapped."""


_Offsets = Mapping[int, int] | Sequence[Offset]
"""Slot -> where it starts."""
_Held = dict[SegmentId, tuple[Block, np.ndarray]]
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
        self._fetcher = Fetcher(
            far if far is not None else far_transports(session),
            lambda segment: session.topology.where(segment),
            session.counts,
            self.meter,
        )
        self._plans: LRUCache[Key, _Plan] = LRUCache(PLANS)
        self._told: tuple[Fetched, Topology] | None = None
        """What one shard told unasked, and by which topology it was asked something else then."""
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

    def expect(self, fetched: Fetched, topology: Topology) -> None:
        """Take what a version's home told unasked for the answer to the next load of it, if it holds still.

        Args:
            fetched: with the table, and with blocks that lie in that shard's memory.
            topology: by which the shard was asked.
        """
        self._told = (fetched, topology)

    def mapped(
        self, entries: Mapping[str, TensorEntry], blocks: Mapping[SegmentId, Block]
    ) -> dict[str, np.ndarray] | None:
        """Return tensors whose places a shard has just told; None when some are there no more.

        Args:
            entries: name -> which.
            blocks: segment -> where it is.
        """
        held: _Held = {}
        needed = slots_of(entries.values())
        self._lock_all(held, {segment: blocks[segment] for segment in needed if segment in blocks}, NEVER)
        if _lacking(held, needed):
            return None
        offsets = {segment: block.offsets for segment, (block, _) in held.items()}
        return _views(_rows(entries, offsets), {segment: array for segment, (_, array) in held.items()})

    def check_transport(self, transport: str) -> None:
        """Make sure that there is a transport of this name.

        Raises:
            OptionError: no transport has this name.
        """
        if transport not in (AUTO, SHARED, *self._fetcher.names):
            raise OptionError(f"transport: expected one of {[AUTO, SHARED, *self._fetcher.names]}; found {transport!r}")

    def is_near(self, segment: SegmentId, transport: str, deadline: Deadline) -> bool:
        """Return whether a load by this transport maps a segment."""
        shard = self._session.topology.where(segment)
        return transport in (AUTO, SHARED) and self._shared.brings(shard, deadline)

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
        name, version = split_ref(model)
        key: Key = (name, version, selection)
        plan = self._planned(key) if transport in (AUTO, SHARED) else None
        if plan is not None:
            self.meter.asked(plan.transports[SHARED], plan.transports[SHARED])
            return plan, True
        self._session.keep_alive()
        wish = Wish(f"load of {model}", transport, verify, Deadline.after(timeout))
        while True:
            home = self._session.home(name)
            try:
                return self._fetched(key, wish), False
            except MovedError as exc:
                self._session.moved(name, home, exc, wish.deadline)
            except _NewerError:
                wish.deadline.left_for(wish.what)

    # ---- without a message ----------------------------------------------------------------------------

    def _planned(self, key: Key) -> Loaded | None:
        """Return the arrays of a load that was planned before, if its plan still holds."""
        with self._lock:
            plan = self._plans.get(key)
        if plan is None or not self._shared.shows(plan.home, plan.epoch):
            return None
        blocks: dict[SegmentId, np.ndarray] = {}
        try:
            for segment, block in plan.blocks.items():
                locked = self._shared.lock(segment, block)
                if locked is None:
                    return None
                blocks[segment] = locked
        except MovedError:  # a shard of the plan has drained
            return None
        return Loaded(_views(plan.rows, blocks), plan.ref, {SHARED: plan.nbytes}, True, plan.created_ns)

    def _keep(self, key: Key, plan: _Plan) -> None:
        with self._lock:
            self._plans[key] = plan

    # ---- with messages --------------------------------------------------------------------------------

    def _fetched(self, key: Key, wish: Wish) -> Loaded:
        """Ask where the tensors lie and lock the places, until all are locked that lie in mapped memory.

        What is locked stays so, for later rounds too: it cannot change any more.
        """
        held: _Held = {}
        found = self._ask(key, wish, held)
        while not found.complete:
            wish.deadline.left_for(wish.what)
            found = self._ask(key, wish, held)
        far = {name: entry for name, entry in found.chosen.items() if entry.segment not in found.near}
        with self._in_part(key, found.ref, wish):
            carried, transports = self._fetcher.carried(far, wish)
        near = sum(entry.nbytes for name, entry in found.chosen.items() if name not in far)
        offsets: dict[SegmentId, _Offsets] = {segment: held[segment][0].offsets for segment in found.near}
        offsets.update((segment, part.offsets) for segment, part in carried.items())
        rows = _rows(found.chosen, offsets)
        if not far and found.epoch is not None:
            places = {segment: held[segment][0] for segment in found.near}
            self._keep(key, _Plan(found.ref, found.created_ns, rows, near, places, found.home, found.epoch))
        blocks = {segment: held[segment][1] for segment in found.near}
        blocks.update((segment, part.block) for segment, part in carried.items())
        if len(far) < len(found.chosen):
            transports[SHARED] = near
        self.meter.asked(sum(entry.nbytes for entry in found.chosen.values()), near)
        return Loaded(_views(rows, blocks), found.ref, transports, wish.verify or not far, found.created_ns)

    def _ask(self, key: Key, wish: Wish, held: _Held) -> _Found:
        """Ask for the manifest, and for the blocks that are not `held`; lock those that are told."""
        name, version, selection = key
        topology, home = self._session.topology, self._session.home(name)
        mapped = self._is_mapped(home, wish)
        known = self._catalog.known(name, version)
        wanted: Slots = {}
        if known is not None and mapped:
            chosen = self.select(known, self._catalog.table(known, None), selection)
            wanted = slots_of(e for e in chosen.values() if topology.where(e.segment) == home)
            wanted = _lacking(held, wanted)
        told = self._heard(ModelRef(name, version)) if version is not None and mapped else None
        fetched = told or self._fetch(home, name, version, known, wanted, mapped and selection is None, wish)
        ref = fetched.header.ref
        self._catalog.meet(ref, fetched.header.graph_key)
        chosen = self.select(ref, self._catalog.table(ref, fetched.body), selection)
        self._lock_all(held, fetched.blocks, wish.deadline)
        shards = {entry.segment: topology.where(entry.segment) for entry in chosen.values()}
        mapped_shards = {shard for shard in set(shards.values()) if self._is_mapped(shard, wish)}
        needed = slots_of(chosen.values())
        lacking = _lacking(held, needed)
        missing: dict[int, dict[SegmentId, Sequence[int]]] = {}
        for segment, slots in lacking.items():
            if shards[segment] in mapped_shards:
                missing.setdefault(shards[segment], {})[segment] = slots
        with self._in_part(key, ref, wish):
            requests = {shard: ShardCalls.blocks(part) for shard, part in missing.items()}
            answers = self._session.call_each(requests, wish.deadline.left_for(wish.what)) if requests else []
        for blocks in answers:
            self._lock_all(held, blocks, wish.deadline)
        near = {segment for segment in needed if segment not in lacking or shards[segment] in mapped_shards}
        complete = not any(_lacking(held, part) for part in missing.values())
        created_ns = fetched.header.created_ns
        return _Found(ref, created_ns, chosen, near, complete, home, fetched.epoch if mapped else None)

    def _lock_all(self, held: _Held, blocks: Mapping[SegmentId, Block], deadline: Deadline) -> None:
        """Lock blocks, and add to what is `held` those that are what they were said to be."""
        for segment, block in blocks.items():
            array = self._shared.lock(segment, block, deadline)
            if array is not None:
                held[segment] = (block, array)

    def _fetch(
        self,
        home: int,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: Slots,
        whole: bool,
        wish: Wish,
    ) -> Fetched:
        """Ask for manifest and blocks; again without a guess when `known` is no longer the latest version."""
        client, left = self._session.client, wish.deadline.left_for(wish.what)
        try:
            return self._session.call(home, ShardCalls.fetch(client, name, version, known, wanted, whole), left)
        except ModelLostError:
            if known is None or version is not None:
                raise
            return self._session.call(home, ShardCalls.fetch(client, name, version, None, {}, whole), left)

    def _heard(self, ref: ModelRef) -> Fetched | None:
        """Return, once, the unrequested answer of a version's home, if nothing has changed there since."""
        told, self._told = self._told, None
        if told is None or told[0].header.ref != ref or told[1] is not self._session.topology or told[1].former:
            return None
        return told[0] if self._shared.shows(self._session.home(ref.name), told[0].epoch) else None

    @contextlib.contextmanager
    def _in_part(self, key: Key, ref: ModelRef, wish: Wish) -> Generator[None]:
        """Tell whether a part is lost, or was only let go because the version is gone or is the latest no more."""
        try:
            yield
        except ModelLostError as exc:
            name, version, _ = key
            request = ShardCalls.header(self._session.client, name, version)
            if self._session.at_home(name, request, wish.deadline.left_for(wish.what)).ref != ref:
                raise _NewerError from exc
            raise ModelLostError(f"{ref} is lost in part: {exc}") from exc

    def _is_mapped(self, shard: int, wish: Wish) -> bool:
        """Tell whether a shard's blocks are read in place."""
        return wish.transport in (AUTO, SHARED) and self._shared.brings(shard, wish.deadline)

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


class _NewerError(Exception):
    """The version that was the latest when the load began is so no more."""


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
