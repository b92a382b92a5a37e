"""The repository as users see it: the models in it. How it is started and ends is `deployment`.

Rules
- A `Repository` is one client. It may be used by several threads; saves of one client are carried out one at a time,
  in the order they were asked for. A save whose call ends by an exception commits nothing afterwards.
- Every wait has a timeout, in seconds, and every error is of the one tree in `store.errors`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack
from weakref import WeakKeyDictionary

import numpy as np

from ...store.archive import interchange
from ...store.errors import (
    GraphError,
    ModelLostError,
    ModelNotFoundError,
    MovedError,
    OperationTimeoutError,
    OptionError,
    StorageError,
)
from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.graphs.pattern import check_pattern
from ...store.refs import Model, ModelRef, check_name, split_ref
from ...store.shard import UnreadFile
from ...store.versions.manifest import Header, ModelInfo, TensorEntry
from ...store.waiting import Deadline, seconds_of
from ..engine.engine import Engine
from ..shard.calls import ShardCalls
from . import files, frameworks
from .catalog import Catalog
from .deployment import Closes, Deployment
from .launch import Launched
from .lineage import Lineage
from .match import Prefixes, PrefixMatch
from .reader import Reader
from .save.pending import PendingSave
from .save.request import Inherit, Saved, SaveOptions, requested
from .save.saves import Saves, Until
from .stats import RepositoryStats
from .verifier import Problem, Verifier

if TYPE_CHECKING:
    import keras
    from torch import nn


log = logging.getLogger(__name__)

Architecture: TypeAlias = "ModelGraph | keras.Model | nn.Module"
"""What has an architecture."""


class Repository(Deployment):
    """A client of a running repository. Made by `start` or `connect`, ended by `close` or a `with` block.

    >>> import numpy as np
    >>> with Repository.start("docs") as repo:                                    # doctest: +SKIP
    ...     saved = repo.save("m", {"w": np.zeros(3, np.float32)})
    ...     repo.load("m")["w"].sum(), str(saved.ref)
    (np.float32(0.0), 'm@1')
    """

    def __init__(self, engine: Engine, name: str, launched: Launched | None = None) -> None:
        super().__init__(engine, name, launched)
        self._catalog = Catalog(self._session)
        self._reader = Reader(self._session, self._catalog)
        self._saves = Saves(self._session, self._catalog, self._reader, greets=launched is None)
        self._lineage = Lineage(self._session)
        self._prefixes = Prefixes(self._session, self._catalog, self._reader)
        self._verifier = Verifier(self._session, self._lineage)
        self._loaded: WeakKeyDictionary[object, ModelRef] = WeakKeyDictionary()
        """Model that `load_model` returned or filled -> its version."""

    # ---- saving ---------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        tensors: Mapping[str, object],
        *,
        graph: ModelGraph | None = None,
        parent: Model | None = None,
        inherit: Inherit = "auto",
        quality: float | None = None,
        metadata: Mapping[str, object] | None = None,
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
            metadata: a mapping of JSON values, or scalars of NumPy, to keep with the version.
            durability: "memory": committed when shards own the bytes; on disk soon after, where the repository has a
                path. "disk": committed when it is on the path and synced; nobody sees it before.
            timeout: seconds for all of it, the wait for this client's earlier saves included.

        Raises:
            InvalidNameError, GraphError, TensorMismatchError, TensorNotFoundError: an argument is wrong.
            ModelNotFoundError: there is no such parent.
            StoreFullError: the tensors are larger than the store.
            StorageError: the disk does not take it, or takes nothing of what waits: the version does not exist.
            ShardUnavailableError, OperationTimeoutError: the version may or may not exist; nothing of it leaks.
        """
        options = SaveOptions(parent=parent, inherit=inherit, quality=quality, metadata=metadata, durability=durability)
        options["timeout"] = timeout
        return self._submit(name, tensors, graph, until="committed", **options).committed()

    def save_async(
        self,
        name: str,
        tensors: Mapping[str, object],
        *,
        graph: ModelGraph | None = None,
        parent: Model | None = None,
        inherit: Inherit = "auto",
        quality: float | None = None,
        metadata: Mapping[str, object] | None = None,
        durability: Literal["memory", "disk"] = "memory",
        timeout: float = 60.0,
    ) -> PendingSave:
        """Begin a save and return: arguments are checked and the tensors copied here, all else happens behind.

        The caller may change its tensors when `pending.staged()` returns: at once, after one memory copy, but for a
        save that finds the one before not yet in the shard's memory, or is larger than a quarter of this machine's.
        The version exists when `pending.committed()` does. Arguments and errors as in `save`.
        """
        options = SaveOptions(parent=parent, inherit=inherit, quality=quality, metadata=metadata, durability=durability)
        options["timeout"] = timeout
        return self._submit(name, tensors, graph, until="copied", **options)

    def save_model(
        self, name: str, model: Any, *, optimizer: Any = False, scheduler: Any = None, **as_save: Any
    ) -> Saved:
        """Save a Keras or PyTorch model: its architecture, its tensors and, where it tells, what builds it again.

        The parent is, unless `parent` names another, the latest version of `name`; where `name` has none, the version
        that `load_model` took this model from, if that still lives.

        Args:
            name: as in `save`.
            model: a built Keras model, or a torch module, wrapped for several devices or compiled, or neither. Where
                a Keras model has no config, or a torch module does not tell what its constructor was given (attributes
                of the parameters' names do), `load_model` needs `into`.
            optimizer: True: the state of a Keras model's optimizer is saved, too, as tensors named `optimizer/...`. Of
                a torch module, its optimizer.
            scheduler: a torch optimizer's learning-rate schedule.
            as_save: the keyword arguments of `save`, except `graph`.

        Raises:
            GraphError: the optimizer is none that goes with the model.
            TensorMismatchError: part of the model's state cannot be stored; the message names it.
        """
        tensors, graph, recipe = frameworks.parts_of(model)
        tensors.update(frameworks.training_tensors_of(model, optimizer, scheduler))
        if "parent" not in as_save and (origin := self._loaded.get(model)) is not None:
            as_save["parent"] = self._parent_of(name, origin)
        return self._submit(name, tensors, graph, until="committed", recipe=recipe, **as_save).committed()

    # ---- loading --------------------------------------------------------------------------------------

    def load(
        self,
        model: Model,
        *,
        layers: Sequence[str] | None = None,
        tensors: Sequence[str] | None = None,
        into: Mapping[str, object] | None = None,
        timeout: float = 60.0,
        transport: str = "auto",
    ) -> dict[str, np.ndarray]:
        """Load tensors: all, those of some layers, or some by name.

        Args:
            model: the version.
            layers: names of layers of its graph.
            tensors: names of tensors.
            into: tensor name -> writable array to fill; selects its own tensors when neither `layers` nor `tensors`
                is given.
            timeout: seconds.
            transport: which transport brings the bytes: `"shared"` (memory of this node), `"socket"`, `"object_store"`,
                `"gloo"` or `"nccl"` (collective groups), `"files"` (the repository's path: what is on disk), or
                `"auto"`: shared where that can be, else the fastest.

        Returns:
            Tensor name -> array. Read-only, and without a copy where this node holds the bytes; the arrays stay
            intact when the model is retired. With `into`, the caller's arrays.

        Raises:
            ModelNotFoundError, TensorNotFoundError: no such model, layer or tensor.
            TensorMismatchError: a buffer has another shape or dtype; none was written.
            ModelLostError: the bytes went with a shard that died.
            OptionError: there is no such transport, or the timeout is none.
            ShardUnavailableError: the transport cannot be used from here.
        """
        return self._reader.load(model, layers, tensors, into, timeout, transport)

    def load_model(
        self,
        model: Model,
        *,
        into: Any = None,
        optimizer: Any = True,
        scheduler: Any = None,
        strict: bool = True,
        compile: bool = True,  # noqa: A002  Keras' own name for it
        custom_objects: Mapping[str, object] | None = None,
    ) -> Any:
        """Load a Keras or PyTorch model: all that was stored of it, or an error and `into` as it was.

        Args:
            model: the version.
            into: a model to give the tensors to, by name, or by architecture where the names differ, and what its
                layers keep beside them (vocabularies, own assets, extra state). A torch module on the device "meta"
                gets memory on the CPU. None: it is built again, a Keras model compiled as it was.
            optimizer, scheduler: a torch optimizer over the parameters of `into`, and its schedule: they get the state
                that was saved. Of a Keras model, `optimizer` says whether its optimizer gets what was saved, if any.
            strict: `into` may have no tensor that the version does not have.
            compile: compile a Keras model that is built again. False: do not, and leave its optimizer's state out.
            custom_objects: classes and functions by name, for a model that is built again.

        Raises:
            GraphError: `into` is None and what was saved cannot be built again, a layer does not take what was
                stored of it, or an argument means nothing for such a model.
            TensorNotFoundError: a tensor has no place in `into` or its optimizer, or one of these was not saved.
            TensorMismatchError: a tensor has another shape or dtype, or the optimizer is of another class.
        """
        header = self._header(model)
        graph, recipe = self._catalog.graph(header.ref, header.graph_key), None
        if into is None:
            _, recipe = self._catalog.architecture(header.ref, header.graph_key)
        of_training = optimizer is not False or scheduler is not None
        wanted = None if of_training or not graph.layers else [layer.name for layer in graph.layers]
        tensors = self.load(header.ref, layers=wanted)
        try:
            options = frameworks.LoadOptions(optimizer, scheduler, strict, compile, custom_objects)
            loaded = frameworks.load(recipe, into, tensors, graph, options)
        except GraphError as exc:
            raise GraphError(f"load_model of {header.ref}: {exc}") from exc
        self._loaded[loaded] = header.ref
        return loaded

    # ---- questions about one model --------------------------------------------------------------------

    def graph(self, model: Model) -> ModelGraph:
        """Return a version's architecture; without layers when it was saved without a graph."""
        header = self._header(model)
        return self._catalog.graph(header.ref, header.graph_key)

    def info(self, model: Model) -> ModelInfo:
        """Return what is known of a version."""
        return ModelInfo.of(self._header(model))

    def owners(self, model: Model) -> dict[str, ModelRef]:
        """Return the owner map: tensor -> the most recent ancestor, or the version itself, that wrote it."""
        ref, table = self._table(model)
        return {name: entry.owner or ref for name, entry in table.items()}

    def contributions(self, model: Model) -> dict[ModelRef, list[str]]:
        """Give, for each version that wrote tensors of this one, their names."""
        written: dict[ModelRef, list[str]] = {}
        for name, owner in self.owners(model).items():
            written.setdefault(owner, []).append(name)
        return written

    def lineage(self, model: Model) -> list[ModelRef]:
        """Return the version itself, its parent, and so on to the root; retired ancestors are named too."""
        return self._lineage.to_root(self._header(model).ref)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities that versions were saved with, those of retired ones too.

        A quality of a retired version is known for as long as the process of its home lives, or the path has it.

        Args:
            refs: versions, such as those of a lineage.

        Returns:
            Version -> quality; without those that had none or are not known.
        """
        return self._lineage.qualities(refs)

    def descendants(self, model: Model) -> list[ModelRef]:
        """Return all live versions that derive from this one, through however many generations, sorted."""
        return self._lineage.descendants(self._header(model).ref)

    def common_ancestor(self, a: Model, b: Model) -> ModelRef | None:
        """Return the most recent version that both derive from, or that is one of them; None if there is none."""
        line = set(self.lineage(b))
        return next((ref for ref in self.lineage(a) if ref in line), None)

    # ---- questions about all models -------------------------------------------------------------------

    def models(self, prefix: str = "") -> list[ModelRef]:
        """List live versions whose name starts with `prefix`, sorted."""
        if not isinstance(prefix, str):
            raise OptionError(f"models: prefix: expected text; found {prefix!r:.100}")
        return sorted(ref for part in self._session.broadcast(ShardCalls.models(prefix)) for ref in part)

    def find(self, pattern: Sequence[Mapping[str, object]] | Architecture, *, exact: bool = False) -> list[ModelRef]:
        """List versions whose graph has a path that fits a pattern, or that have exactly this architecture; sorted.

        Args:
            pattern: one predicate per layer along a path: config keys -> a value or a list of allowed values;
                `{}` matches any layer. Or a `ModelGraph`, a Keras model or a torch module, whose architecture the
                versions have in all but names.
            exact: the pattern must cover a whole path from an input to an output.

        Raises:
            GraphError: the pattern is malformed.
        """
        if isinstance(pattern, Sequence):
            request = ShardCalls.find(list(check_pattern(pattern)), exact)
        else:
            request = ShardCalls.alike(PrefixQuery.of(frameworks.graph_of(pattern, "find")))
        return sorted(ref for part in self._session.broadcast(request) for ref in part)

    def longest_prefix(self, graph: Architecture) -> PrefixMatch | None:
        """Find the version that shares the longest prefix with `graph`; ties go to the higher quality, then the newer.

        Args:
            graph: a `ModelGraph`, a Keras model or a torch module.

        Returns:
            The match, pinned until it is released; None when no version shares even an input.

        Raises:
            GraphError: it is none of these.
        """
        return self.longest_prefixes([graph])[0]

    def longest_prefixes(self, graphs: Sequence[Architecture]) -> list[PrefixMatch | None]:
        """Answer many prefix queries with one message per shard."""
        asked = [frameworks.graph_of(graph, "longest_prefix") for graph in graphs]
        return self._prefixes.longest(asked) if asked else []

    def stats(self) -> RepositoryStats:
        """Sum up what the repository holds."""
        return RepositoryStats.of(self._session.broadcast(ShardCalls.stats()))

    # ---- changes --------------------------------------------------------------------------------------

    def retire(self, model: Model) -> None:
        """Make a version cease to exist. A tensor of it goes when no live version and no pin refers to it.

        Raises:
            ModelNotFoundError: there is no such live version.
        """
        name, version = split_ref(model)
        self._session.at_home(name, ShardCalls.retire(name, version))

    def verify(self, model: Model | None = None, timeout: float = 600.0) -> list[Problem]:
        """Check a version, or all: every checksum, in memory and on disk, and every owner.

        Args:
            model: the version; None: all live ones.
            timeout: seconds for each.

        Returns:
            What is wrong, by name, files that could not be read at the start included; empty when nothing is.
        """
        if model is None:
            found = self._verifier.unread()
        else:
            name, version = split_ref(model)
            found = self._verifier.unread(ModelRef(name, version)) if version is not None else []
            if found:
                return found
        refs = self.models() if model is None else [self._header(model).ref]
        return found + [problem for ref in refs for problem in self._verifier.check(ref, timeout)]

    def unreadable(self) -> list[UnreadFile]:
        """List the files on the path that could not be read when the repository started, and cannot be now.

        Each costs the version whose manifest stands there, and no other. Nothing that it may name is deleted, and its
        number is not used again. It is read again from time to time: a file that is put right is back by itself.
        """
        return self._verifier.unreadable()

    def export(self, model: Model, path: str | os.PathLike[str]) -> None:
        """Write a version's tensors to a file that other tools read.

        Args:
            model: the version.
            path: `.safetensors`, `.arrow`, or, of a Keras model, `.weights.h5`; it is replaced where it exists. A path
                of this machine, or a URI of `pyarrow.fs`, such as `s3://bucket/m.safetensors`.

        Raises:
            StorageError: the file cannot be written, or its suffix is none of these.
            TensorMismatchError: the format cannot hold a tensor's dtype.
            GraphError: `.weights.h5` of a version that was not saved from Keras.
        """
        if interchange.format_of(path) == "keras":
            try:
                built = self.load_model(model)
            except GraphError as exc:
                raise GraphError(
                    f"export of {model} to {interchange.shown(path)}: expected a Keras model; {exc}"
                ) from exc
            interchange.write_keras(path, built)
            return
        info = self.info(model)
        files.write(path, info, self.graph(info.ref), self.load(info.ref))

    def import_(self, path: str | os.PathLike[str], name: str, **as_save: Any) -> Saved:
        """Save the tensors of a file that `export`, or another tool, wrote.

        Args:
            path: `.safetensors`, `.arrow` or `.weights.h5`, as in `export`.
            name: the model's name.
            as_save: the keyword arguments of `save`. `graph`, `quality` and `metadata` are the file's, where it has
                them and they are not given. What the file says about itself is metadata; `export` writes it again.

        Raises:
            StorageError: the file cannot be read.
            CorruptDataError: it is damaged.
        """
        tensors, stored = files.read(path)
        return self.save(name, tensors, **stored | as_save)

    def wait_newer(self, name: str, after: int = 0, timeout: float = 30.0) -> ModelRef | None:
        """Wait for a version of `name` above `after`; pushed by the shard, not polled.

        Returns:
            The newest version, or None when none came within `timeout` seconds.
        """
        seconds = seconds_of(timeout)
        deadline, grace = Deadline.after(seconds), Deadline.after(seconds + 1.0)
        check_name(name)
        while True:
            left = deadline.left()
            home = self._session.home(name)
            try:
                return self._session.call(home, ShardCalls.wait_newer(name, after, left), left + 1.0)
            except MovedError as exc:
                self._session.moved(name, home, exc, grace)
            except OperationTimeoutError:
                return None

    # ---- within ---------------------------------------------------------------------------------------

    def _closes(self, deadline: Deadline) -> Closes:
        flush, *rest = super()._closes(deadline)
        return lambda: self._saves.close(deadline), flush, self._reader.close, *rest

    def _submit(
        self,
        name: str,
        tensors: Mapping[str, object],
        graph: ModelGraph | None,
        *,
        until: Until,
        **options: Unpack[SaveOptions],
    ) -> PendingSave:
        """Check a save and queue it; for `until` see `Saves.submit`."""
        request = requested(name, tensors, graph, **options)
        if request.durable and not self.has_path:
            where = f"save of {name!r}: durability 'disk'"
            raise StorageError(f"{where}: expected a repository with path=; {self.name!r} has none")
        return self._saves.submit(request, until)

    def _header(self, model: Model) -> Header:
        name, version = split_ref(model)
        return self._session.at_home(name, ShardCalls.header(self._session.client, name, version))

    def _parent_of(self, name: str, origin: ModelRef) -> ModelRef | None:
        """Return the parent of a loaded model's first save as `name`; None where `name` has versions."""
        if self._lives(name) or not self._lives(origin):
            return None
        log.info("save of %r: the parent is %s, from which the model was loaded", name, origin)
        return origin

    def _lives(self, model: Model) -> bool:
        try:
            self._header(model)
        except (ModelNotFoundError, ModelLostError):
            return False
        return True

    def _table(self, model: Model) -> tuple[ModelRef, Mapping[str, TensorEntry]]:
        header = self._header(model)
        return header.ref, self._catalog.table(header.ref, None)
