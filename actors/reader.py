"""Loading: from a model's name to read-only arrays, which lie where the shard has them wherever that can be mapped.

Rules
- One message finds a model that was never met: manifest and places come together. One that was loaded before needs
  none: where its tensors lie is kept, and holds as long as the boards of the shards show the same epochs.
- No memory is kept: an array locks its part in the shard (`memory`) from before its place is known to hold until
  nobody uses it any more. So arrays stay intact, whatever becomes of the model.
- What is not mapped is carried, by the way (`carrier`) that is predicted to be the fastest, or that the caller names.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..planner.topology import Topology
from ..store.arrays import as_numpy, dtype_name, dtype_of
from ..store.errors import ModelLostError, MovedError, TensorMismatchError, TensorNotFoundError
from ..store.manifest import TensorEntry, slots_of
from ..store.refs import ModelRef, split_ref
from ..store.segment import Block, SegmentId
from .carrier import Carrier, Wish
from .catalog import Catalog
from .holdings import Counters
from .messages import Fetched, Places
from .session import Session, time_left
from .ways import AUTO, EPOCH, FREED, SHARED, SharedMemoryWay, Way, far_ways

PLANS = 256
"""Loads whose places are kept."""

Selection = tuple[str, tuple[str, ...]] | None
"""("layers" or "tensors", their names); None: all tensors."""
Key = tuple[str, int | None, Selection]
_Row = tuple[str, SegmentId, int, tuple[int, ...], np.dtype]
"""(name, segment, offset in its block, shape, dtype)."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model's tensors, and how they came."""

    arrays: dict[str, np.ndarray]
    """Tensor -> read-only array."""
    ref: ModelRef
    """The version."""
    ways: dict[str, int]
    """Way -> bytes of the tensors that came by it; those that this client has already count for none."""
    digests_checked: bool
    """All that travelled was held against its content hashes."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the tensors of a load lie in mapped memory, and the counters at which that was so."""

    ref: ModelRef
    rows: list[_Row]
    nbytes: int
    """Of the tensors."""
    blocks: dict[SegmentId, Block]
    counters: dict[int, Counters]
    """Shard -> its counters."""
    topology: Topology
    """By which the shards were asked."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What shards answered."""

    home: int
    ref: ModelRef
    chosen: dict[str, TensorEntry]
    """The table, as far as it was asked for."""
    blocks: dict[SegmentId, Block]
    """Those of it that lie in mapped memory."""
    counters: dict[int, Counters]
    """Shard whose memory is mapped -> the counters at which this is so."""
    topology: Topology
    """By which the shards were asked."""


class Reader:
    """Loads tensors for one client.

    Args:
        session: the client's.
        catalog: what it knows of models.
        far: ways to shards whose memory is not mapped, the preferred one first; None: all that there are.
    """

    def __init__(self, session: Session, catalog: Catalog, far: Sequence[Way] | None = None) -> None:
        self._session = session
        self._catalog = catalog
        self._shared = SharedMemoryWay(session)
        self._carrier = Carrier(
            far if far is not None else far_ways(session), lambda segment: session.topology.where(segment)
        )
        self._plans: OrderedDict[Key, _Plan] = OrderedDict()
        self._told: tuple[Fetched, Topology] | None = None
        """What one shard told unasked, and by which topology it was asked something else then."""
        self._lock = threading.Lock()

    def load(
        self,
        model: ModelRef | str,
        layers: Sequence[str] | None,
        tensors: Sequence[str] | None,
        into: Mapping[str, object] | None,
        timeout: float,
        transport: str = AUTO,
    ) -> dict[str, np.ndarray]:
        """Load a model's tensors; see `Repository.load`."""
        arrays = self._loaded(model, _selection(layers, tensors, into), timeout, transport, False).arrays
        return arrays if into is None else _copy_into(arrays, into, str(model))

    def fetch(
        self,
        model: ModelRef | str,
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
            transport: a way's name, or `"auto"`.
            verify: hold what travels against the content hashes that its shard has.

        Raises:
            ValueError: there is no such way.
            CorruptDataError: what travelled is not what the shard has.
            TensorVineError: see `Repository.load`.
        """
        return self._loaded(model, _selection(layers, tensors, None), timeout, transport, verify)

    def expect(self, fetched: Fetched, topology: Topology) -> None:
        """Take what a version's home told unasked for the answer to the next load of it, if it holds still.

        Args:
            fetched: with the table, and with blocks that lie in that shard's memory.
            topology: by which the shard was asked.
        """
        self._told = (fetched, topology)

    def mapped(
        self, shard: int, entries: Mapping[str, TensorEntry], blocks: Mapping[SegmentId, Block], counters: Counters
    ) -> dict[str, np.ndarray] | None:
        """Give tensors whose places a shard has just told; None when it has freed anything since.

        Args:
            shard: which; its memory is mapped.
            entries: name -> which; all of that shard.
            blocks: segment -> where it is.
            counters: at which this is so.
        """
        held = {segment: self._shared.lock(shard, segment, blocks[segment]) for segment in slots_of(entries.values())}
        if held and not self._shared.holds({shard: counters}, FREED):
            return None
        return _views(_rows(entries, {segment: block.offsets for segment, block in blocks.items()}), held)

    @property
    def far_ways(self) -> tuple[str, ...]:
        """Names of the ways by which what is not mapped may come, the preferred one first."""
        return tuple(self._carrier.automatic)

    def close(self) -> None:
        """Let go of what the ways keep open."""
        self._carrier.close()

    def _loaded(
        self, model: ModelRef | str, selection: Selection, timeout: float, transport: str, verify: bool
    ) -> Loaded:
        if transport not in (AUTO, SHARED, *self._carrier.names):
            raise ValueError(f"transport: expected one of {[AUTO, SHARED, *self._carrier.names]}; found {transport!r}")
        name, version = split_ref(model)
        key: Key = (name, version, selection)
        plan = self._planned(key) if transport in (AUTO, SHARED) else None
        if plan is not None:
            return plan
        wish = Wish(f"load of {model}", transport, verify, time.monotonic() + timeout)
        while True:
            home = self._session.home(name)
            try:
                return self._fetched(key, wish)
            except MovedError as exc:
                self._session.moved(name, home, exc, wish.deadline)
            except _NewerError:
                time_left(wish.deadline, wish.what)

    # ---- without a message ------------------------------------------------------------------------------

    def _planned(self, key: Key) -> Loaded | None:
        """Give the arrays of a load that was planned before, if its plan still holds."""
        with self._lock:
            plan = self._plans.get(key)
        try:
            if plan is None or not self._shared.holds(plan.counters, EPOCH):
                return None
            where = plan.topology.where
            blocks = {
                segment: self._shared.lock(where(segment), segment, block) for segment, block in plan.blocks.items()
            }
            arrays = _views(plan.rows, blocks)
            if not self._shared.holds(plan.counters, EPOCH):
                return None
        except MovedError:  # a shard of the plan has drained
            return None
        return Loaded(arrays, plan.ref, {SHARED: plan.nbytes}, True)

    def _keep(self, key: Key, plan: _Plan) -> None:
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            if len(self._plans) > PLANS:
                self._plans.popitem(last=False)

    # ---- with messages ----------------------------------------------------------------------------------

    def _fetched(self, key: Key, wish: Wish) -> Loaded:
        """Ask where the tensors lie, lock the places, and ask again while a shard freed anything meanwhile.

        What is locked stays: a second answer that names the same places was given after they were locked.
        """
        held: dict[SegmentId, tuple[Block, np.ndarray]] = {}
        while True:
            found = self._ask(key, wish, held)
            new = {
                segment: (block, self._shared.lock(found.topology.where(segment), segment, block))
                for segment, block in found.blocks.items()
                if segment not in held or held[segment][0].generation != block.generation
            }
            held.update(new)
            if not new or self._shared.holds(found.counters, FREED):
                break
        far = {name: entry for name, entry in found.chosen.items() if entry.segment not in found.blocks}
        with self._in_part(key, found.ref, wish):
            carried, ways = self._carrier.carried(far, wish)
        near = sum(entry.nbytes for name, entry in found.chosen.items() if name not in far)
        offsets: dict[SegmentId, Mapping[int, int] | Sequence[int]] = {s: b.offsets for s, b in found.blocks.items()}
        offsets.update((segment, part.offsets) for segment, part in carried.items())
        rows = _rows(found.chosen, offsets)
        if not far and found.home in found.counters:
            self._keep(key, _Plan(found.ref, rows, near, found.blocks, found.counters, found.topology))
        blocks = {segment: held[segment][1] for segment in found.blocks}
        blocks.update((segment, part.block) for segment, part in carried.items())
        if len(far) < len(found.chosen):
            ways[SHARED] = near
        return Loaded(_views(rows, blocks), found.ref, ways, wish.verify or not far)

    def _ask(self, key: Key, wish: Wish, held: Mapping[SegmentId, tuple[Block, np.ndarray]]) -> _Found:
        name, version, selection = key
        topology, home = self._session.topology, self._session.home(name)
        mapped = self._is_mapped(home, wish)
        have = {segment: block.generation for segment, (block, _) in held.items()}
        known = self._catalog.known(name, version)
        wanted: dict[SegmentId, tuple[int, list[int]]] | None = None if mapped and selection is None else {}
        if known is not None and mapped:
            chosen = self._select(known, self._catalog.table(known, None), selection)
            at_home = slots_of(e for e in chosen.values() if topology.where(e.segment) == home)
            wanted = {segment: (have.get(segment, -1), slots) for segment, slots in at_home.items()}
        told = self._heard(ModelRef(name, version)) if version is not None and mapped else None
        fetched = told or self._fetch(home, name, version, known, wanted, wish)
        ref = fetched.header.ref
        self._catalog.meet(ref, fetched.header.graph_key)
        chosen = self._select(ref, self._catalog.table(ref, fetched.body), selection)
        asked = wanted.keys() if wanted and told is None else set[SegmentId]()
        shards = {entry.segment: topology.where(entry.segment) for entry in chosen.values()}
        near = {shard for shard in set(shards.values()) if self._is_mapped(shard, wish)}
        needed = slots_of(e for e in chosen.values() if shards[e.segment] in near)
        missing: dict[int, dict[SegmentId, tuple[int, list[int]]]] = {}
        for segment in needed.keys() - fetched.blocks.keys() - asked:
            missing.setdefault(shards[segment], {})[segment] = (have.get(segment, -1), needed[segment])
        blocks = {**{segment: block for segment, (block, _) in held.items()}, **fetched.blocks}
        counters = {home: fetched.counters} if mapped else {}
        with self._in_part(key, ref, wish):
            questions = {shard: ("blocks", part) for shard, part in missing.items()}
            answers = self._session.ask(questions, time_left(wish.deadline, wish.what)) if questions else []
        for shard, (more, at) in zip(missing, answers, strict=True):
            blocks.update(more)
            counters.setdefault(shard, at)
        return _Found(home, ref, chosen, {segment: blocks[segment] for segment in needed}, counters, topology)

    def _fetch(
        self, home: int, name: str, version: int | None, known: ModelRef | None, wanted: Places | None, wish: Wish
    ) -> Fetched:
        """Ask for manifest and blocks; again without a guess when `known` is no longer the latest version."""
        question = ("fetch", self._session.client, name, version)
        left = time_left(wish.deadline, wish.what)
        try:
            return self._session.call(home, *question, known, wanted, timeout=left, again=True)
        except ModelLostError:
            if known is None or version is not None:
                raise
            return self._session.call(home, *question, None, {}, timeout=left, again=True)

    def _heard(self, ref: ModelRef) -> Fetched | None:
        """Give, once, what a version's home told of it unasked, if nothing has changed there since."""
        told, self._told = self._told, None
        if told is None or told[0].header.ref != ref or told[1] is not self._session.topology or told[1].former:
            return None
        counters = {self._session.home(ref.name): told[0].counters}
        return told[0] if self._shared.holds(counters, EPOCH) else None

    @contextlib.contextmanager
    def _in_part(self, key: Key, ref: ModelRef, wish: Wish) -> Generator[None]:
        """Tell whether a part is lost, or was only let go because the version is gone or is the latest no more."""
        try:
            yield
        except ModelLostError as exc:
            name, version, _ = key
            question = ("header", self._session.client, name, version)
            left = time_left(wish.deadline, wish.what)
            if self._session.at_home(name, *question, timeout=left, again=True).ref != ref:
                raise _NewerError from exc
            raise ModelLostError(f"{ref} is lost in part: {exc}") from exc

    def _is_mapped(self, shard: int, wish: Wish) -> bool:
        """Tell whether a shard's blocks are read in place."""
        return wish.transport in (AUTO, SHARED) and self._shared.brings(shard, wish.deadline)

    def _select(self, ref: ModelRef, table: Mapping[str, TensorEntry], selection: Selection) -> dict[str, TensorEntry]:
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
            raise TensorNotFoundError(f"{ref}: expected tensors among its {len(table)}; found no {unknown}")
        return {name: table[name] for name in names}


class _NewerError(Exception):
    """The version that was the latest when the load began is so no more."""


def _selection(
    layers: Sequence[str] | None, tensors: Sequence[str] | None, into: Mapping[str, object] | None
) -> Selection:
    for kind, names in (("layers", layers), ("tensors", tensors)):
        if isinstance(names, str):
            raise TensorNotFoundError(f"load: {kind}=: expected a sequence of names; found the string {names!r}")
    if layers is not None and tensors is not None:
        raise TensorNotFoundError("load: expected layers= or tensors=; found both")
    if layers is not None:
        return ("layers", tuple(layers))
    if tensors is not None:
        return ("tensors", tuple(tensors))
    return ("tensors", tuple(into)) if into is not None else None


def _rows(
    chosen: Mapping[str, TensorEntry], offsets: Mapping[SegmentId, Mapping[int, int] | Sequence[int]]
) -> list[_Row]:
    return [(n, e.segment, offsets[e.segment][e.slot], e.shape, dtype_of(e.dtype)) for n, e in chosen.items()]


def _views(rows: Sequence[_Row], blocks: Mapping[SegmentId, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the arrays: views on the blocks, as read-only as these are."""
    return {
        name: np.ndarray(shape, dtype, blocks[segment], offset)  # pyright: ignore[reportArgumentType]
        for name, segment, offset, shape, dtype in rows
    }


def _copy_into(arrays: Mapping[str, np.ndarray], into: Mapping[str, object], model: str) -> dict[str, np.ndarray]:
    """Copy all tensors into the caller's buffers, after all were checked."""
    targets: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name not in into:
            raise TensorNotFoundError(f"load of {model}: expected a buffer for tensor {name!r} in into=; found none")
        target = as_numpy(into[name], f"load of {model}: into[{name!r}]")
        if target.shape != array.shape or target.dtype != array.dtype:
            raise TensorMismatchError(
                f"load of {model}: into[{name!r}]: expected {dtype_name(array.dtype)} {array.shape}; "
                f"found {dtype_name(target.dtype)} {target.shape}"
            )
        if not target.flags.writeable:
            raise TensorMismatchError(f"load of {model}: into[{name!r}]: expected a writable array; it is read-only")
        targets[name] = target
    for name, array in arrays.items():
        np.copyto(targets[name], array)
    return targets
