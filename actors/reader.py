"""Loading: from a model's name to read-only arrays that lie where the shard has them.

Rules
- One message finds a model that was never met: manifest and places come together. One that was loaded before needs
  none: where its tensors lie is kept, and holds as long as the boards of the shards show the same epochs.
- No memory is kept: an array locks its part in the shard (`memory`) from before its place is known to hold until
  nobody uses it any more. So arrays stay intact, whatever becomes of the model.
- On another node, blocks come through the engine's object store, which keeps them for other readers there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..store.arena import Part
from ..store.arrays import as_numpy, dtype_name, dtype_of
from ..store.errors import ModelLostError, TensorMismatchError, TensorNotFoundError
from ..store.manifest import TensorEntry, slots_of
from ..store.refs import ModelRef, split_ref
from ..store.segment import Block, SegmentId
from .catalog import Catalog
from .holdings import Counters
from .messages import Fetched, Places
from .session import Session, time_left

PLANS = 256
"""Loads whose places are kept."""

Selection = tuple[str, tuple[str, ...]] | None
"""("layers" or "tensors", their names); None: all tensors."""
Key = tuple[str, int | None, Selection]


@dataclass(slots=True)
class _Plan:
    """Where the tensors of a load lie, and the counters at which that was so."""

    rows: list[tuple[str, SegmentId, int, tuple[int, ...], np.dtype]]
    """(name, segment, offset in its block, shape, dtype)."""
    blocks: dict[SegmentId, Block]
    counters: dict[int, Counters] = field(default_factory=dict[int, Counters])
    """Shard -> its counters."""


class Reader:
    """Loads tensors for one client."""

    def __init__(self, session: Session, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog
        self._plans: OrderedDict[Key, _Plan] = OrderedDict()
        self._mapped: weakref.WeakValueDictionary[tuple[SegmentId, int], np.ndarray] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def load(
        self,
        model: ModelRef | str,
        layers: Sequence[str] | None,
        tensors: Sequence[str] | None,
        into: Mapping[str, object] | None,
        timeout: float,
    ) -> dict[str, np.ndarray]:
        """Load a model's tensors; see `Repository.load`."""
        name, version = split_ref(model)
        key: Key = (name, version, _selection(layers, tensors, into))
        arrays = self._planned(key)
        if arrays is None:
            arrays = self._fetched(key, time.monotonic() + timeout)
        return arrays if into is None else _copy_into(arrays, into, str(model))

    # ---- without a message ------------------------------------------------------------------------------

    def _planned(self, key: Key) -> dict[str, np.ndarray] | None:
        """Give the arrays of a load that was planned before, if its plan still holds."""
        with self._lock:
            plan = self._plans.get(key)
        if plan is None or not self._holds(plan, 0):
            return None
        arrays = _views(plan, {segment: self._lock_in(segment, block) for segment, block in plan.blocks.items()})
        return arrays if self._holds(plan, 0) else None

    def _holds(self, plan: _Plan, counter: int) -> bool:
        """Tell whether the boards still show the plan's epochs (counter 0) or freeings (counter 1)."""
        for shard, then in plan.counters.items():
            now = self._session.connection(shard).counters()
            if now is None or now[counter] != then[counter]:
                return False
        return True

    def _lock_in(self, segment: SegmentId, block: Block) -> np.ndarray:
        """Give a block's bytes, locked in place where they lie in the shard's memory."""
        if isinstance(block.handle, bytes):
            return np.frombuffer(block.handle, np.uint8)
        key = (segment, block.generation)
        mapped = self._mapped.get(key)
        if mapped is None:
            view = self._session.connection(segment[0]).view
            if view is None:
                raise ModelLostError(f"segment {segment}: expected shard {segment[0]} on this node; it has moved")
            mapped = self._mapped[key] = view.read(block.handle)
        return mapped

    def _keep(self, key: Key, plan: _Plan) -> None:
        if all(not isinstance(block.handle, (bytes, Part)) for block in plan.blocks.values()) and plan.blocks:
            return  # blocks that came through the object store are not this client's to keep
        if any(self._session.connection(shard).view is None for shard in plan.counters):
            return
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            if len(self._plans) > PLANS:
                self._plans.popitem(last=False)

    # ---- with messages ----------------------------------------------------------------------------------

    def _fetched(self, key: Key, deadline: float) -> dict[str, np.ndarray]:
        """Ask where the tensors lie, lock the places, and ask again while a shard freed anything meanwhile.

        What is locked stays: a second answer that names the same places was given after they were locked.
        """
        what = f"load of {key[0] if key[1] is None else f'{key[0]}@{key[1]}'}"
        held: dict[SegmentId, tuple[Block, np.ndarray]] = {}
        while True:
            plan = self._ask(key, held, deadline, what)
            fresh = {segment: block for segment, block in plan.blocks.items() if segment not in held}
            moved = {s: b for s, b in plan.blocks.items() if s in held and held[s][0].generation != b.generation}
            new = {**fresh, **moved}
            self._bring(new, held, deadline, what)
            if not new or self._holds(plan, 1) or self._carried(new):
                self._keep(key, plan)
                return _views(plan, {segment: held[segment][1] for segment in plan.blocks})

    def _carried(self, blocks: Mapping[SegmentId, Block]) -> bool:
        """Tell whether all blocks came as copies, which nothing can take away."""
        return not any(isinstance(block.handle, Part) for block in blocks.values())

    def _bring(
        self,
        blocks: Mapping[SegmentId, Block],
        held: dict[SegmentId, tuple[Block, np.ndarray]],
        deadline: float,
        what: str,
    ) -> None:
        here = {s: b for s, b in blocks.items() if isinstance(b.handle, (bytes, Part))}
        far = {s: b for s, b in blocks.items() if s not in here}
        for segment, block in here.items():
            held[segment] = (block, self._lock_in(segment, block))
        if far:
            handles = [block.handle for block in far.values()]
            arrays = self._session.engine.get(handles, time_left(deadline, what), what)
            for (segment, block), array in zip(far.items(), arrays, strict=True):
                held[segment] = (block, array)

    def _ask(self, key: Key, held: Mapping[SegmentId, tuple[Block, np.ndarray]], deadline: float, what: str) -> _Plan:
        name, version, selection = key
        home = self._session.home(name)
        have = {segment: block.generation for segment, (block, _) in held.items()}
        known = self._catalog.known(name, version)
        wanted: dict[SegmentId, tuple[int, list[int]]] | None = None
        if known is not None:
            table = self._catalog.table(known, None)
            chosen = self._select(known, table, selection)
            at_home = slots_of(e for e in chosen.values() if e.segment[0] == home)
            wanted = {segment: (have.get(segment, -1), slots) for segment, slots in at_home.items()}
        elif selection is not None:
            wanted = {}
        fetched = self._fetch(home, name, version, known, wanted, deadline, what)
        ref = fetched.header.ref
        chosen = self._select(ref, self._catalog.table(ref, fetched.body), selection)
        asked = wanted.keys() if wanted else set[SegmentId]()
        needed = slots_of(chosen.values())
        missing: dict[int, dict[SegmentId, tuple[int, list[int]]]] = {}
        for segment in needed.keys() - fetched.blocks.keys() - asked:
            missing.setdefault(segment[0], {})[segment] = (have.get(segment, -1), needed[segment])
        blocks = {**fetched.blocks, **{s: block for s, (block, _) in held.items() if s not in fetched.blocks}}
        counters = {home: fetched.counters}
        for shard, (more, at) in self._blocks(missing, ref, deadline, what).items():
            blocks.update(more)
            counters.setdefault(shard, at)
        rows = [
            (tensor, e.segment, blocks[e.segment].offsets[e.slot], e.shape, dtype_of(e.dtype))
            for tensor, e in chosen.items()
        ]
        return _Plan(rows, {segment: blocks[segment] for segment in needed}, counters)

    def _blocks(
        self, missing: Mapping[int, Places], ref: ModelRef, deadline: float, what: str
    ) -> dict[int, tuple[dict[SegmentId, Block], Counters]]:
        questions = {shard: ("blocks", part, self._is_local(shard)) for shard, part in missing.items()}
        try:
            answers = self._session.ask(questions, time_left(deadline, what)) if questions else []
        except ModelLostError as exc:
            self._session.call(self._session.home(ref.name), "header", self._session.client, *_parts(ref), again=True)
            raise ModelLostError(f"{ref} is lost in part: {exc}") from exc
        return dict(zip(missing, answers, strict=True))

    def _fetch(
        self,
        home: int,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: Places | None,
        deadline: float,
        what: str,
    ) -> Fetched:
        """Ask for manifest and blocks; again without a guess when `known` is no longer the latest version."""
        client, local = self._session.client, self._is_local(home)
        left = time_left(deadline, what)
        try:
            return self._session.call(
                home, "fetch", client, name, version, known, wanted, local, timeout=left, again=True
            )
        except ModelLostError:
            if known is None or version is not None:
                raise
            return self._session.call(home, "fetch", client, name, version, None, {}, local, timeout=left, again=True)

    def _is_local(self, shard: int) -> bool:
        return self._session.connection(shard).view is not None

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


def _views(plan: _Plan, blocks: Mapping[SegmentId, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the arrays: views on the blocks, as read-only as these are."""
    return {
        name: np.ndarray(shape, dtype, blocks[segment], offset)  # pyright: ignore[reportArgumentType]
        for name, segment, offset, shape, dtype in plan.rows
    }


def _parts(ref: ModelRef) -> tuple[str, int]:
    return ref.name, ref.version


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
