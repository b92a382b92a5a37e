"""Loading: from a model's name to read-only arrays that lie where the shard put them.

Rules
- One message finds a model that was never met: manifest and blocks come together. A model that was loaded a moment
  ago needs none: its arrays are kept, and hold as long as the boards of the shards show the same epochs.
- What is kept is let go after `IDLE_S`, or as soon as the housekeeping sees that an epoch passed: a client that
  once loaded a model does not keep its memory taken after it is retired.
- Arrays that were handed out stay intact, whatever becomes of the model: Ray frees a block when its last reader goes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..store.arrays import as_numpy, dtype_name, from_bytes
from ..store.errors import ModelLostError, TensorMismatchError, TensorNotFoundError
from ..store.manifest import TensorEntry
from ..store.refs import ModelRef, split_ref
from ..store.segment import SegmentId
from ..store.shard import Block
from .catalog import Catalog
from .session import Session, time_left
from .shard import Fetched

IDLE_S = 5.0

Selection = tuple[str, tuple[str, ...]] | None
"""("layers" or "tensors", their names); None: all tensors."""


@dataclass(slots=True)
class _Kept:
    """Arrays of an earlier load, and the epochs at which that was the answer."""

    arrays: dict[str, np.ndarray]
    epochs: dict[int, int]
    used: float


@dataclass(slots=True)
class _Mapped:
    """A block of a segment, mapped into this process."""

    generation: int
    offsets: tuple[int, ...]
    bytes: np.ndarray
    used: float


class Reader:
    """Loads tensors for one client."""

    def __init__(self, session: Session, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog
        self._kept: dict[tuple[str, int | None, Selection], _Kept] = {}
        self._mapped: dict[SegmentId, _Mapped] = {}
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
        selection = _selection(layers, tensors, into)
        key = (name, version, selection)
        arrays = self._still_valid(key)
        if arrays is None:
            arrays = self._fetch(key, time.monotonic() + timeout)
        if into is None:
            return dict(arrays)
        return _copy_into(arrays, into, str(model))

    def drop(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._kept.clear()
            self._mapped.clear()

    # ---- what is kept -----------------------------------------------------------------------------------

    def _still_valid(self, key: tuple[str, int | None, Selection]) -> dict[str, np.ndarray] | None:
        kept = self._kept.get(key)
        if kept is None or not self._current(kept.epochs):
            return None
        kept.used = time.monotonic()
        return kept.arrays

    def _current(self, epochs: Mapping[int, int]) -> bool:
        return all(self._session.connection(shard).epoch() == epoch for shard, epoch in epochs.items())

    def _keep(
        self, key: tuple[str, int | None, Selection], arrays: dict[str, np.ndarray], epochs: dict[int, int]
    ) -> None:
        visible = all(self._session.connection(shard).view is not None for shard in epochs)
        if visible:
            with self._lock:
                self._kept[key] = _Kept(arrays, epochs, time.monotonic())
            self._session.keep_alive(self._let_go)

    def _let_go(self) -> None:
        """Drop what was idle or overtaken; the session calls this about once a second."""
        oldest = time.monotonic() - IDLE_S
        with self._lock:
            for key in [k for k, kept in self._kept.items() if kept.used < oldest or not self._current(kept.epochs)]:
                del self._kept[key]
            for segment in [s for s, mapped in self._mapped.items() if mapped.used < oldest]:
                del self._mapped[segment]

    # ---- fetching ---------------------------------------------------------------------------------------

    def _fetch(self, key: tuple[str, int | None, Selection], deadline: float) -> dict[str, np.ndarray]:
        name, version, selection = key
        what = f"load of {name if version is None else f'{name}@{version}'}"
        home = self._session.home(name)
        self._session.connection(home)
        known = self._catalog.known(name, version)
        with self._lock:
            held = dict(self._mapped)
        wanted: dict[SegmentId, int] | None = None
        if known is not None:
            table = self._catalog.table(known, None)
            wanted = _wanted(self._select(known, table, selection).values(), held)
        elif selection is not None:
            wanted = {}
        fetched = self._ask(home, name, version, known, wanted, deadline, what)
        ref = fetched.header.ref
        table = self._catalog.table(ref, fetched.body)
        chosen = self._select(ref, table, selection)
        blocks, epochs = dict(fetched.blocks), {home: fetched.epoch}
        missing: dict[int, dict[SegmentId, int]] = {}
        for segment, generation in _wanted(chosen.values(), held).items():
            if segment[0] != home or (segment not in blocks and not (wanted and segment in wanted)):
                missing.setdefault(segment[0], {})[segment] = generation
        try:
            answers = self._session.ask(
                {shard: ("blocks", part) for shard, part in missing.items()}, time_left(deadline, what)
            )
        except ModelLostError as exc:
            raise ModelLostError(f"{ref} is lost in part: {exc}") from exc
        for shard, (more, epoch) in zip(missing, answers, strict=True):
            blocks.update(more)
            epochs[shard] = min(epoch, epochs.get(shard, epoch))
        mapped = self._map(blocks, {entry.segment for entry in chosen.values()}, held, deadline, what)
        arrays = {tensor: _view(mapped[entry.segment], entry) for tensor, entry in chosen.items()}
        self._keep(key, arrays, epochs)
        return arrays

    def _ask(
        self,
        home: int,
        name: str,
        version: int | None,
        known: ModelRef | None,
        wanted: dict[SegmentId, int] | None,
        deadline: float,
        what: str,
    ) -> Fetched:
        """Ask for manifest and blocks; again without guesses when `known` is no longer the latest version."""
        client = self._session.client
        here = {s: g for s, g in wanted.items() if s[0] == home} if wanted is not None else None
        try:
            return self._session.call(
                home,
                "fetch",
                client,
                name,
                version,
                known,
                here,
                timeout=time_left(deadline, what),
                again=True,
            )
        except ModelLostError:
            if known is None or version is not None:
                raise
            return self._session.call(
                home, "fetch", client, name, version, None, {}, timeout=time_left(deadline, what), again=True
            )

    def _select(self, ref: ModelRef, table: Mapping[str, TensorEntry], selection: Selection) -> dict[str, TensorEntry]:
        if selection is None:
            return dict(table)
        kind, names = selection
        if kind == "layers":
            header = self._session.call(
                self._session.home(ref.name),
                "header",
                self._session.client,
                ref.name,
                ref.version,
                again=True,
            )
            graph = self._catalog.graph(ref, header.graph_key)
            unknown = [name for name in names if name not in graph.by_name]
            if unknown:
                raise TensorNotFoundError(f"{ref}: expected layers of its graph; found {unknown}")
            names = tuple(dict.fromkeys(t for name in names for t in graph.by_name[name].tensors))
        unknown = [name for name in names if name not in table]
        if unknown:
            raise TensorNotFoundError(f"{ref}: expected tensors among its {len(table)}; found no {unknown}")
        return {name: table[name] for name in names}

    def _map(
        self,
        blocks: Mapping[SegmentId, Block],
        needed: set[SegmentId],
        held: Mapping[SegmentId, _Mapped],
        deadline: float,
        what: str,
    ) -> dict[SegmentId, _Mapped]:
        """Map new blocks into this process, and give those needed, some of which were `held` before."""
        now = time.monotonic()
        far = {segment: block for segment, block in blocks.items() if not isinstance(block.handle, bytes)}
        handles = [block.handle for block in far.values()]
        views = self._session.engine.get(handles, time_left(deadline, what), what) if handles else []
        fresh = {
            segment: _Mapped(block.generation, block.offsets, view, now)
            for (segment, block), view in zip(far.items(), views, strict=True)
        }
        for segment, block in blocks.items():
            if isinstance(block.handle, bytes):
                view = np.frombuffer(block.handle, np.uint8)
                fresh[segment] = _Mapped(block.generation, block.offsets, view, now)
        with self._lock:
            result = {segment: held[segment] for segment in needed - fresh.keys()}
            self._mapped |= fresh
            for mapped in result.values():
                mapped.used = now
        if fresh:
            self._session.keep_alive(self._let_go)
        return {**result, **{segment: fresh[segment] for segment in needed & fresh.keys()}}


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


def _wanted(entries: Iterable[TensorEntry], held: Mapping[SegmentId, _Mapped]) -> dict[SegmentId, int]:
    """Give the segments of these rows, and the generation in which each is held, or -1."""
    return {e.segment: held[e.segment].generation if e.segment in held else -1 for e in entries}


def _view(mapped: _Mapped, entry: TensorEntry) -> np.ndarray:
    start = mapped.offsets[entry.slot]
    return from_bytes(mapped.bytes[start : start + entry.nbytes], entry.dtype, entry.shape)


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
