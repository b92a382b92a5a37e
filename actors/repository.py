"""The repository as users see it.

Rules
- A `Repository` is one client. It may be used by several threads; saves of one client are carried out one at a time,
  in the order they were asked for.
- Every wait has a timeout, in seconds, and every error is of the one tree in `store.errors`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ..store.arrays import as_numpy
from ..store.codec import Codec
from ..store.errors import (
    GraphError,
    OperationTimeoutError,
    StorageError,
    TensorMismatchError,
    TensorVineError,
)
from ..store.graph import ModelGraph
from ..store.index import PrefixQuery
from ..store.manifest import Header, ModelInfo, TensorEntry
from ..store.pattern import check_pattern
from ..store.refs import ModelRef, check_name, split_ref
from ..store.retention import Retention
from ..store.shard import Match, ShardStats
from . import files, frameworks
from .catalog import Catalog
from .engine import Engine
from .launch import DiskOptions, Launched, default_engine, launch
from .match import PrefixMatch
from .pending import PendingSave
from .reader import Reader
from .saver import Inherit, Saved, Saver, SaveRequest, metadata_text
from .session import CONTROL_TIMEOUT_S, Session
from .staging import Staged, Staging
from .verifier import Problem, Verifier

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 600.0
"""How long `close` waits for the disk."""
Model = ModelRef | str
"""A version: a reference, `"name@3"`, or `"name"` for the latest version."""


@dataclass(frozen=True, slots=True)
class RepositoryStats:
    """What a repository holds, in all and per shard."""

    models: int
    """Live versions."""
    tensors: int
    """Stored tensors, each once however many versions share it."""
    bytes_memory: int
    """Bytes of those tensors that are in memory."""
    bytes_disk: int
    """Bytes of the files that hold tensors."""
    shards: tuple[ShardStats, ...]


class Repository:
    """A client of a running repository. Made by `start` or `connect`, ended by `close` or a `with` block.

    >>> import numpy as np
    >>> with Repository.start("docs") as repo:                                    # doctest: +SKIP
    ...     saved = repo.save("m", {"w": np.zeros(3, np.float32)})
    ...     repo.load("m")["w"].sum(), str(saved.ref)
    (np.float32(0.0), 'm@1')
    """

    def __init__(self, engine: Engine, name: str, launched: Launched | None = None) -> None:
        self.name = name
        self._launched = launched
        self._session = Session(engine, name)
        self._catalog = Catalog(self._session)
        self._reader = Reader(self._session, self._catalog)
        self._saver = Saver(self._session, self._catalog)
        self._staging = Staging()
        self._verifier = Verifier(self._session)
        self._disk = self._session.path is not None
        self._saves: queue.SimpleQueue[tuple[PendingSave, SaveRequest, Staged | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    # ---- life -------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        name: str = "default",
        *,
        shards: int | None = None,
        path: str | os.PathLike[str] | None = None,
        codec: Codec | None = None,
        replicas: int = 1,
        store_bytes: int | None = None,
        preallocate_bytes: int | None = None,
        keep: Retention | None = None,
        lag_bytes: int | None = None,
    ) -> Repository:
        """Start a repository on the running Ray, or on one embedded in this process where there is none.

        Joins the repository when one of that name already runs; `close` then only disconnects.

        Args:
            name: names the repository's actors: `NAME/shard-0`, `NAME/planner` in the namespace `tensorvine`.
            shards: how many; None: one per node.
            path: directory, or URI of `pyarrow.fs` (`s3:`, `gs:`, `hdfs:`), where the history is kept; every node must
                reach it. What is there is brought back. None: nothing outlives the shards.
            codec: how tensors are stored there, such as `Shuffle() | Zstd()`; None: as they are. With a lossy one, such
                as `Quantize(8) | Zstd()`, a version answers exactly while it is in memory, and within the codec's
                error once it was read back.
            replicas: nodes that must hold a version; more than 1 is not available yet.
            store_bytes: capacity of each shard in bytes; None: as much as its node's object store has, shared among
                the shards of the node. Memory is taken from the system as it is used.
            preallocate_bytes: memory that each shard takes from the system at the start; None: 256 MiB, or its
                capacity where that is less. 0: none (DStore-OnDemand).
            keep: which versions of a name stay in memory once they are on disk, such as `KeepLast(3) | KeepBest(1)`;
                None: all, until room is needed. Others answer from disk.
            lag_bytes: bytes that may wait in each shard to be written before savers wait; None: half of `store_bytes`.

        Raises:
            NotImplementedError: `replicas` asks for what is not built yet.
            ValueError: `shards` is not positive, it or `path` differs from the running repository's, or an option that
                only means something with `path` is given without.
            StorageError: `path` cannot be used, or another repository runs on it.
            CorruptDataError: `path` holds a repository of a newer format.
            CodecUnavailableError: `codec` needs a package that is not installed.
        """
        check_name(name)
        if replicas != 1:
            raise NotImplementedError(
                f"Repository.start: replicas: expected 1, the only choice yet; found {replicas!r}"
            )
        engine, launched = launch(
            name, shards, store_bytes, preallocate_bytes, _disk_options(path, codec, keep, lag_bytes)
        )
        try:
            return cls(engine, name, launched)
        except BaseException:
            launched.stop()
            raise

    @classmethod
    def connect(cls, name: str = "default") -> Repository:
        """Connect to a running repository, from any process of the cluster.

        Raises:
            RepositoryNotFoundError: no Ray runs, or no repository of that name.
        """
        return cls(default_engine(), check_name(name))

    def close(self) -> None:
        """Finish pending saves and disconnect; stops what `start` started. A second call is no error.

        Who started a repository with a path waits here until all of it is on disk; what could not be written is logged.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._saves.put(None)
        if self._thread is not None:
            self._thread.join(timeout=CONTROL_TIMEOUT_S)
        self._saver.close()
        self._staging.close()
        if self._launched is not None and self._launched.names and self._disk:
            try:
                self.flush(FLUSH_TIMEOUT_S)
            except TensorVineError as exc:
                log.error("repository %r is closed before all of it is on disk: %s", self.name, exc)
        self._session.close()
        if self._launched is not None:
            self._launched.stop()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.name!r}, {len(self._session.shards)} shards)"

    # ---- saving -----------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        tensors: Mapping[str, Any],
        *,
        graph: ModelGraph | None = None,
        parent: Model | None = None,
        inherit: Inherit = "auto",
        quality: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        durability: Literal["memory", "disk"] = "memory",
        timeout: float = 60.0,
    ) -> Saved:
        """Save a new version of `name`, and return when it is committed.

        Args:
            name: the model's name; its versions count up from 1.
            tensors: name -> NumPy, TensorFlow, PyTorch or CuPy array of any shape and dtype.
            graph: the architecture; None: the parent's, where its tensors are all given, else none.
            parent: the version this one derives from; None: the latest version of `name`, if there is one.
            inherit: "auto": tensors whose bytes equal the parent's tensor of the same name are shared, not written.
                {layer: parent's layer}: those layers' tensors are the parent's and need not be given.
                None: everything is written.
            quality: orders equal answers of prefix queries, higher first.
            metadata: a mapping of JSON values to keep with the version.
            durability: "memory": committed when shards own the bytes; on disk soon after, where the repository has a
                path. "disk": committed when it is on the path and synced; nobody sees it before.
            timeout: seconds for all of it.

        Raises:
            InvalidNameError, GraphError, TensorMismatchError, TensorNotFoundError: an argument is wrong.
            ModelNotFoundError: there is no such parent.
            StoreFullError: the tensors are larger than the store.
            StorageError: the disk does not take it, or takes nothing of what waits: the version does not exist.
            ShardUnavailableError, OperationTimeoutError: the version may or may not exist; nothing of it leaks.
        """
        return self._submit(
            name,
            tensors,
            graph,
            recipe=None,
            parent=parent,
            inherit=inherit,
            quality=quality,
            metadata=metadata,
            durability=durability,
            timeout=timeout,
        ).committed()

    def save_async(
        self,
        name: str,
        tensors: Mapping[str, Any],
        *,
        graph: ModelGraph | None = None,
        parent: Model | None = None,
        inherit: Inherit = "auto",
        quality: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        durability: Literal["memory", "disk"] = "memory",
        timeout: float = 60.0,
    ) -> PendingSave:
        """Begin a save and return: arguments are checked and the tensors copied here, all else happens behind.

        The caller may change its tensors when `pending.staged()` returns: at once, after one memory copy, but for a
        save that finds the one before not yet in the shard's memory, or is larger than a quarter of this machine's.
        The version exists when `pending.committed()` does. Arguments and errors as in `save`.
        """
        return self._submit(
            name,
            tensors,
            graph,
            recipe=None,
            parent=parent,
            inherit=inherit,
            quality=quality,
            metadata=metadata,
            durability=durability,
            timeout=timeout,
            copy=True,
        )

    def save_model(self, name: str, model: Any, *, optimizer: bool = False, **as_save: Any) -> Saved:
        """Save a Keras or PyTorch model: its architecture, its tensors and, for Keras, all it takes to rebuild it.

        Args:
            name: as in `save`.
            model: a built Keras model, or a torch module.
            optimizer: save the Keras optimizer's state too, as tensors named `optimizer/...`.
            as_save: the keyword arguments of `save`, except `graph`.
        """
        adapter = frameworks.adapter_of(model)
        tensors = adapter.tensors_of(model)
        if optimizer:
            tensors.update(frameworks.optimizer_tensors_of(model))
        return self._submit(
            name, tensors, adapter.graph_of(model), recipe=frameworks.recipe_of(model), **as_save
        ).committed()

    # ---- loading ----------------------------------------------------------------------------------------

    def load(
        self,
        model: Model,
        *,
        layers: Sequence[str] | None = None,
        tensors: Sequence[str] | None = None,
        into: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
    ) -> dict[str, np.ndarray]:
        """Load tensors: all, those of some layers, or some by name.

        Args:
            model: the version.
            layers: names of layers of its graph.
            tensors: names of tensors.
            into: tensor name -> writable array to fill; selects its own tensors when neither `layers` nor `tensors`
                is given.
            timeout: seconds.

        Returns:
            Tensor name -> array. Read-only, and without a copy where this node holds the bytes; the arrays stay
            intact when the model is retired. With `into`, the caller's arrays.

        Raises:
            ModelNotFoundError, TensorNotFoundError: no such model, layer or tensor.
            TensorMismatchError: a buffer has another shape or dtype; none was written.
            ModelLostError: the bytes went with a shard that died.
        """
        return self._reader.load(model, layers, tensors, into, timeout)

    def load_model(self, model: Model, *, into: Any = None) -> Any:
        """Load a Keras or PyTorch model.

        Args:
            model: the version.
            into: a model to assign the tensors to, by name, or by architecture where the names differ. None: a Keras
                model is built again from what was stored, compiled as it was; a torch module cannot be built without
                its code.

        Raises:
            GraphError: `into` is None and no Keras model was saved.
        """
        header = self._header(model)
        tensors, graph = self.load(header.ref), self._catalog.graph(header.ref, header.graph_key)
        if into is None:
            _, recipe = self._catalog.architecture(header.ref, header.graph_key)
            if recipe is None:
                raise GraphError(
                    f"load_model of {header.ref}: expected a version that save_model stored from Keras; give into= "
                    "to fill a model that you built"
                )
            return frameworks.rebuild(recipe, tensors, graph)
        frameworks.fill(into, tensors, graph)
        return into

    # ---- questions about one model ----------------------------------------------------------------------

    def graph(self, model: Model) -> ModelGraph:
        """Give a version's architecture; without layers when it was saved without a graph."""
        header = self._header(model)
        return self._catalog.graph(header.ref, header.graph_key)

    def info(self, model: Model) -> ModelInfo:
        """Give what is known of a version."""
        return ModelInfo.of(self._header(model))

    def owners(self, model: Model) -> dict[str, ModelRef]:
        """Give the owner map: tensor -> the most recent ancestor, or the version itself, that wrote it."""
        ref, table = self._table(model)
        return {name: entry.owner or ref for name, entry in table.items()}

    def contributions(self, model: Model) -> dict[ModelRef, list[str]]:
        """Give, for each version that wrote tensors of this one, their names."""
        written: dict[ModelRef, list[str]] = {}
        for name, owner in self.owners(model).items():
            written.setdefault(owner, []).append(name)
        return written

    def lineage(self, model: Model) -> list[ModelRef]:
        """Give the version itself, its parent, and so on to the root; retired ancestors are named too."""
        chain = [self._header(model).ref]
        while True:
            last = chain[-1]
            more: list[ModelRef] = self._session.call(self._session.home(last.name), "chain", last, again=True)
            if len(more) <= 1:
                return chain
            chain += more[1:]

    def descendants(self, model: Model) -> list[ModelRef]:
        """Give all live versions that derive from this one, through however many generations, sorted."""
        seen: dict[ModelRef, bool] = {}
        frontier = [self._header(model).ref]
        while frontier:
            found = [pair for part in self._session.broadcast("offspring", frontier) for pair in part]
            frontier = [ref for ref, _ in found if ref not in seen]
            seen.update(found)
            if len(self._session.shards) == 1:
                break
        return sorted(ref for ref, live in seen.items() if live)

    def common_ancestor(self, a: Model, b: Model) -> ModelRef | None:
        """Give the most recent version that both derive from, or that is one of them; None if there is none."""
        line = set(self.lineage(b))
        return next((ref for ref in self.lineage(a) if ref in line), None)

    # ---- questions about all models ---------------------------------------------------------------------

    def models(self, prefix: str = "") -> list[ModelRef]:
        """List live versions whose name starts with `prefix`, sorted."""
        return sorted(ref for part in self._session.broadcast("models", prefix) for ref in part)

    def find(self, pattern: Sequence[Mapping[str, Any]], *, exact: bool = False) -> list[ModelRef]:
        """List versions whose graph has a path that fits a pattern, sorted.

        Args:
            pattern: one predicate per layer along a path: config keys -> a value or a list of allowed values;
                `{}` matches any layer.
            exact: the pattern must cover a whole path from an input to an output.

        Raises:
            GraphError: the pattern is malformed.
        """
        pattern = list(check_pattern(pattern))
        return sorted(ref for part in self._session.broadcast("find", pattern, exact) for ref in part)

    def longest_prefix(self, graph: ModelGraph) -> PrefixMatch | None:
        """Find the model that shares the longest prefix with `graph`; ties go to the higher quality, then the newer.

        Returns:
            The match, pinned until it is released; None when no model shares even an input.
        """
        return self.longest_prefixes([graph])[0]

    def longest_prefixes(self, graphs: Sequence[ModelGraph]) -> list[PrefixMatch | None]:
        """Answer many prefix queries with one message per shard."""
        for graph in graphs:
            if not isinstance(graph, ModelGraph):
                raise GraphError(f"longest_prefix: expected a ModelGraph; found {type(graph).__name__}")
        if not graphs:
            return []
        self._session.keep_alive()
        for shard in self._session.shards:
            self._session.connection(shard)  # so that each watches this process, which it will hold pins for
        queries = [PrefixQuery.of(graph) for graph in graphs]
        answers: list[tuple[list[Match | None], dict[bytes, str]]] = self._session.broadcast(
            "match", self._session.client, queries
        )
        texts = {key: text for _, part in answers for key, text in part.items()}
        results: list[PrefixMatch | None] = []
        losers: list[str] = []
        for position, graph in enumerate(graphs):
            found = [match for matches, _ in answers if (match := matches[position]) is not None]
            best = max(found, key=lambda match: match.rank, default=None)
            losers += [match.lease for match in found if match is not best]
            results.append(self._match(graph, best, texts) if best is not None else None)
        self._session.unpin(losers)
        return results

    def stats(self) -> RepositoryStats:
        """Sum up what the repository holds."""
        shards: list[ShardStats] = self._session.broadcast("stats")
        return RepositoryStats(
            sum(s.models for s in shards),
            sum(s.tensors for s in shards),
            sum(s.bytes_memory for s in shards),
            sum(s.bytes_disk for s in shards),
            tuple(shards),
        )

    # ---- changes ----------------------------------------------------------------------------------------

    def retire(self, model: Model) -> None:
        """Make a version cease to exist. A tensor of it goes when no live version and no pin refers to it.

        Raises:
            ModelNotFoundError: there is no such live version.
        """
        name, version = split_ref(model)
        self._session.call(self._session.home(name), "retire", name, version)

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until all that is committed now is on disk, too.

        Raises:
            StorageError: the repository has no path, or the disk does not take it.
            OperationTimeoutError: it took longer than `timeout` seconds.
        """
        self._session.broadcast("flush", timeout, timeout=timeout + CONTROL_TIMEOUT_S)

    def verify(self, model: Model | None = None, timeout: float = 600.0) -> list[Problem]:
        """Check a version, or all: every checksum, in memory and on disk, and every owner.

        Args:
            model: the version; None: all live ones.
            timeout: seconds for each.

        Returns:
            What is wrong, by name; empty when nothing is.
        """
        refs = self.models() if model is None else [self._header(model).ref]
        return [problem for ref in refs for problem in self._verifier.check(ref, timeout)]

    def export(self, model: Model, path: str | os.PathLike[str]) -> None:
        """Write a version's tensors to a file that other tools read.

        Args:
            model: the version.
            path: `.safetensors`, `.arrow`, or, of a Keras model, `.weights.h5`; it is replaced where it exists.

        Raises:
            StorageError: the file cannot be written, or its suffix is none of these.
            TensorMismatchError: the format cannot hold a tensor's dtype.
            GraphError: `.weights.h5` of a version that was not saved from Keras.
        """
        files.export(self, model, path)

    def import_(self, path: str | os.PathLike[str], name: str, **as_save: Any) -> Saved:
        """Save the tensors of a file that `export`, or another tool, wrote.

        Args:
            path: `.safetensors`, `.arrow` or `.weights.h5`.
            name: the model's name.
            as_save: the keyword arguments of `save`. `graph`, `quality` and `metadata` are the file's, where it has
                them and they are not given.

        Raises:
            StorageError: the file cannot be read.
            CorruptDataError: it is damaged.
        """
        return files.import_(self, path, name, **as_save)

    def wait_newer(self, name: str, after: int = 0, timeout: float = 30.0) -> ModelRef | None:
        """Wait for a version of `name` above `after`; pushed by the shard, not polled.

        Returns:
            The newest version, or None when none came within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        home = self._session.home(check_name(name))
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return self._session.call(home, "wait_newer", name, after, left, timeout=left + 1.0, again=True)
            except OperationTimeoutError:
                return None

    # ---- within -----------------------------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        tensors: Mapping[str, Any],
        graph: ModelGraph | None,
        *,
        recipe: str | None,
        parent: Model | None = None,
        inherit: Inherit = "auto",
        quality: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        durability: str = "memory",
        timeout: float = 60.0,
        copy: bool = False,
    ) -> PendingSave:
        where = f"save of {check_name(name)!r}"
        if graph is not None and not isinstance(graph, ModelGraph):
            raise GraphError(f"{where}: graph: expected a ModelGraph; found {type(graph).__name__}")
        if not (inherit is None or inherit == "auto" or isinstance(inherit, Mapping)):
            raise GraphError(f"{where}: inherit: expected 'auto', a mapping of layers or None; found {inherit!r}")
        if isinstance(inherit, Mapping) and graph is None and inherit:
            raise GraphError(f"{where}: inherit: expected graph= beside a mapping of layers; found none")
        if durability not in ("memory", "disk"):
            raise ValueError(f"{where}: durability: expected 'memory' or 'disk'; found {durability!r}")
        if durability == "disk" and not self._disk:
            raise StorageError(f"{where}: durability 'disk': expected a repository with path=; {self.name!r} has none")
        request = SaveRequest(
            name,
            _arrays(tensors, where),
            graph,
            split_ref(parent) if parent is not None else None,
            inherit,
            float(quality) if quality is not None else None,
            metadata_text(name, metadata),
            recipe,
            timeout,
            durability == "disk",
        )
        pending = PendingSave(name)
        staged = self._staging.take(request.arrays, where) if copy and not self._closed else None
        if staged is not None:
            request = replace(request, arrays=staged.arrays)
            pending.mark_staged()
        with self._lock:
            if self._closed:
                raise OperationTimeoutError(f"{where}: expected an open repository; {self.name!r} was closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_out, name="tensorvine-save", daemon=True)
                self._thread.start()
            self._saves.put((pending, request, staged))
        return pending

    def _carry_out(self) -> None:
        while (work := self._saves.get()) is not None:
            pending, request, staged = work
            released = staged.release if staged is not None else pending.mark_staged
            pending.run(lambda request=request, released=released: self._saver.save(request, released))
            if staged is not None:
                staged.release()
            del work, pending, request, staged, released  # the tensors must not live until the next save

    def _match(self, graph: ModelGraph, best: Match, texts: Mapping[bytes, str]) -> PrefixMatch:
        key, text = best.graph_key, texts[best.graph_key]
        return PrefixMatch(
            self._session,
            graph,
            best.ref,
            best.quality,
            best.lease,
            lambda: self._catalog.graph_from(key, text),
        )

    def _header(self, model: Model) -> Header:
        name, version = split_ref(model)
        return self._session.call(self._session.home(name), "header", self._session.client, name, version, again=True)

    def _table(self, model: Model) -> tuple[ModelRef, Mapping[str, TensorEntry]]:
        header = self._header(model)
        return header.ref, self._catalog.table(header.ref, None)


def _disk_options(
    path: str | os.PathLike[str] | None, codec: Codec | None, keep: Retention | None, lag_bytes: int | None
) -> DiskOptions | None:
    where = "Repository.start"
    if path is None:
        for option, given in (("codec", codec), ("keep", keep), ("lag_bytes", lag_bytes)):
            if given is not None:
                raise ValueError(f"{where}: {option}: expected path= beside it; found {given!r} alone")
        return None
    if codec is not None:
        if not isinstance(codec, Codec):
            raise ValueError(f"{where}: codec: expected one such as Shuffle() | Zstd(); found {codec!r}")
        codec.encode(np.zeros(4096, np.int8))  # what it needs must be installed
    if keep is not None and not isinstance(keep, Retention):
        raise ValueError(f"{where}: keep: expected a policy such as KeepLast(3); found {keep!r}")
    if lag_bytes is not None and lag_bytes < 0:
        raise ValueError(f"{where}: lag_bytes: expected at least 0; found {lag_bytes}")
    text = os.fspath(path)
    uri = text if "://" in text or text.startswith("file:") else os.path.abspath(os.path.expanduser(text))
    return DiskOptions(uri, codec.spec if codec is not None else None, keep, lag_bytes)


def _arrays(tensors: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    if not isinstance(tensors, Mapping):
        raise TensorMismatchError(
            f"{where}: tensors: expected a mapping of names to arrays; found {type(tensors).__name__}"
        )
    arrays: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or not name or not _is_text(name):
            raise TensorMismatchError(f"{where}: tensors: expected non-empty Unicode strings as names; found {name!r}")
        arrays[name] = as_numpy(value, f"{where}: tensor {name!r}")
    return arrays


def _is_text(name: str) -> bool:
    """Tell whether a name can be written as UTF-8: half a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
