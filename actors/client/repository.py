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
"""An architecture: a graph, or a model that has one."""


class Repository(Deployment):
    """A client of a running repository.

    `Repository.start` starts a repository and `Repository.connect` connects to a running one. `close` or the end of a
    `with` block disconnects.

    Several threads may use one client. It carries out its saves one at a time, in the order of the calls. A client
    belongs to the process that created it: in a forked child process its methods raise `ClosedError`.

    Methods that take a `model` accept `"name@3"`, `"name"` for the latest live version, a `ModelRef`, or an object with
    a reference as `.ref`, such as `Saved`. Timeouts are in seconds.

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
        """Save a new version of a model, and return when it is committed.

        The version appears completely or not at all. If the call ends by an exception, such as `KeyboardInterrupt`,
        nothing is committed afterwards.

        Args:
            name: Name of the model: 1 to 200 characters of `A-Z a-z 0-9 . _ - /`, without a leading `/` or a `..` part.
                Its versions count up from 1.
            tensors: Mapping of tensor names to NumPy, TensorFlow, PyTorch or CuPy arrays of numbers or booleans. Masked
                arrays and arrays with labels, units or missing values are refused. Tensors that are the same memory are
                stored once.
            graph: Architecture of the model. None means the parent's if all its tensors are given, or else none.
            parent: Version from which the new version derives. None means the latest version of `name`, if it exists.
            inherit: The tensors to share with the parent instead of writing them. `"auto"` shares each tensor whose
                shape, dtype and bytes equal those of the parent's tensor of that name, or of any tensor of the parent
                if it lacks that name. A mapping of layers to the parent's layers shares the tensors of these layers,
                which need not be given; it requires `graph` and equal layer configs. None writes everything.
            quality: Number that ranks equal matches of prefix queries, higher first. NaN ranks below every number.
            metadata: Mapping of JSON values or NumPy scalars to store with the version.
            durability: `"memory"` commits when shards hold the version in memory, and writes it to the path soon after.
                `"disk"` commits when the version is on the path and synced. No client sees it earlier.
            timeout: Seconds for the whole save, including the wait for earlier saves of this client.

        Returns:
            The new version, and the bytes that it wrote and inherited.

        Raises:
            InvalidNameError: if the name is malformed.
            GraphError: if the graph is invalid, or a layer of `inherit` does not match the parent's layer.
            TensorMismatchError: if a tensor, the quality or the metadata cannot be stored, or there is no tensor.
            TensorNotFoundError: if a tensor of the graph is neither given nor inherited.
            OptionError: if another argument is invalid, or the metadata is larger than the repository's
                `metadata_bytes`.
            ModelNotFoundError: if the parent does not exist.
            CorruptDataError: if a tensor of `inherit` is in a damaged file.
            StoreFullError: if the tensors do not fit in the store.
            StorageError: if `durability` is `"disk"` and the repository has no path, or if the disk refuses this
                version or the versions waiting before it. The version does not exist.
            ShardUnavailableError, OperationTimeoutError: if a shard dies or does not answer in time. The version may or
                may not exist; `models` lists it if it does.
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
        """Start to save a new version, and return before it is committed.

        The call checks the arguments and copies the tensors; a background thread does the rest. `PendingSave.staged`
        waits until the tensors may be changed, `PendingSave.committed` waits until the version exists.

        Normally the tensors may be changed as soon as this method returns. They are copied later, in the background, if
        the buffer is still in use by the previous save or if they are larger than a quarter of the machine's memory.

        Takes the arguments of `save` and raises its errors, here or in the methods of the `PendingSave`.
        """
        options = SaveOptions(parent=parent, inherit=inherit, quality=quality, metadata=metadata, durability=durability)
        options["timeout"] = timeout
        return self._submit(name, tensors, graph, until="copied", **options)

    def save_model(
        self, name: str, model: Any, *, optimizer: Any = False, scheduler: Any = None, **as_save: Any
    ) -> Saved:
        """Save a Keras or PyTorch model: its architecture, its tensors and, if possible, how to build it again.

        Unless `parent` is given, the parent is the latest version of `name`. If `name` has no version yet, the parent
        is the version that `load_model` loaded this model from, if it is still live.

        Args:
            name: Name of the model, as in `save`.
            model: A built Keras model or a torch module. Wrappers (`DataParallel`, `DistributedDataParallel`,
                `torch.compile`) are removed. `load_model` can build the model again if it is a Keras model with a
                config, or a torch module that keeps its constructor's arguments in attributes of the same names.
                Otherwise `load_model` needs `into`, and the reason is logged.
            optimizer: For a Keras model, whether to save the state of its optimizer, as tensors named `optimizer/...`.
                For a torch module, its optimizer.
            scheduler: Learning-rate scheduler of the torch optimizer.
            as_save: Keyword arguments of `save`, except `graph`.

        Returns:
            The new version, and the bytes that it wrote and inherited.

        Raises:
            GraphError: if `model` is neither a Keras model nor a torch module, or `optimizer` or `scheduler` does not
                fit it.
            TensorMismatchError: if a part of the model's state cannot be stored. The message names it.
            TensorVineError: the errors of `save`.
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
        """Load the tensors of a version: all of them, those of some layers, or some by name.

        Args:
            model: The version.
            layers: Names of the layers whose tensors are loaded.
            tensors: Names of the tensors to load. It cannot be combined with `layers`.
            into: Mapping of tensor names to writable arrays to fill. If neither `layers` nor `tensors` is given, these
                tensors are loaded. The arrays may have any strides and byte order. All are checked before one is
                written.
            timeout: Seconds to wait.
            transport: How the bytes are read: `"shared"` (mapped memory of this node), `"socket"`, `"object_store"`,
                `"gloo"` or `"nccl"` (collective groups), or `"files"` (the repository's path, so only versions on
                disk). `"auto"` maps memory of this node, and uses the fastest transport for other nodes.

        Returns:
            A mapping of tensor names to arrays. With `into`, these are its arrays. Otherwise they are read-only, and
            without a copy if this node holds the bytes. They stay valid when the version is retired, when its shard
            dies and after `close`. Never write to them, for example through `torch.from_numpy`: the memory is shared.
            Copy them first.

        Raises:
            ModelNotFoundError: if the version does not exist or was retired.
            TensorNotFoundError: if the version has no such layer or tensor, or `into` lacks one to load.
            TensorMismatchError: if an array of `into` has another shape or dtype, cannot be written to, or overlaps
                another one. No array was written.
            ModelLostError: if the bytes were lost with a shard that died.
            OptionError: if the transport does not exist or the timeout is not a number.
            ShardUnavailableError: if the transport cannot be used from this process, or a shard does not restart in
                time.
            OperationTimeoutError: if a shard does not answer in time.
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
        """Load a Keras or PyTorch model: build it again, or fill the model `into`.

        The model is loaded completely, or an error is raised and `into` is unchanged. Random seeds, metrics and the
        states of stateful recurrent layers are not stored: they are those of the new model, or stay as they are in
        `into`.

        A torch module is built again on the CPU by its class, which must be importable, and is compared with the saved
        one. `into` is needed for a module that was changed after its construction, and to restore a torch optimizer.

        Args:
            model: The version.
            into: Model to fill. Tensors are matched by name, or by architecture if the names differ. Other state of
                layers (vocabularies, assets, extra state) is filled too. A torch module on the device "meta" gets
                memory on the CPU. None builds the model again; a Keras model is compiled as it was.
            optimizer: For a Keras model, whether to load the state of its optimizer, if it was saved. For a torch
                module, the optimizer of `into` to fill.
            scheduler: Learning-rate scheduler of the torch optimizer to fill.
            strict: Whether every tensor of `into` must have been stored.
            compile: Whether to compile a Keras model that is built again. False also omits its optimizer's state.
            custom_objects: Mapping of names to classes and functions that building the model needs, in addition to
                those that Keras has registered.

        Returns:
            The new model, or `into`.

        Raises:
            GraphError: if the model cannot be built again, if a layer refuses its stored state, or if an argument does
                not apply to a model of this framework.
            TensorNotFoundError: if a stored tensor has no counterpart in `into` or its optimizer, or the reverse.
            TensorMismatchError: if a tensor has another shape or dtype, or the optimizer is of another class.
            TensorVineError: the errors of `load`.
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
        """Return the architecture of a version. It has no layers if the version was saved without a graph."""
        header = self._header(model)
        return self._catalog.graph(header.ref, header.graph_key)

    def info(self, model: Model) -> ModelInfo:
        """Return the parent, quality, metadata, time and sizes of a version."""
        return ModelInfo.of(self._header(model))

    def owners(self, model: Model) -> dict[str, ModelRef]:
        """Return the owner of each tensor of a version: the newest version of its lineage that wrote the tensor."""
        ref, table = self._table(model)
        return {name: entry.owner or ref for name, entry in table.items()}

    def contributions(self, model: Model) -> dict[ModelRef, list[str]]:
        """Return the versions that wrote tensors of a version, each with the names of these tensors."""
        written: dict[ModelRef, list[str]] = {}
        for name, owner in self.owners(model).items():
            written.setdefault(owner, []).append(name)
        return written

    def lineage(self, model: Model) -> list[ModelRef]:
        """Return the version itself, its parent, and so on to the root. Retired ancestors are included."""
        return self._lineage.to_root(self._header(model).ref)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities with which versions were saved, also those of retired versions.

        The quality of a retired version is known as long as the process of its home shard runs or the path stores it.

        Args:
            refs: Versions, such as those of a lineage.

        Returns:
            A mapping of versions to qualities. Versions without a known quality are left out.
        """
        return self._lineage.qualities(refs)

    def descendants(self, model: Model) -> list[ModelRef]:
        """Return all live versions that derive from a version, directly or through other versions, sorted."""
        return self._lineage.descendants(self._header(model).ref)

    def common_ancestor(self, a: Model, b: Model) -> ModelRef | None:
        """Return the most recent common ancestor of two versions, or None if they have no common ancestor.

        A version counts as its own ancestor.
        """
        line = set(self.lineage(b))
        return next((ref for ref in self.lineage(a) if ref in line), None)

    # ---- questions about all models -------------------------------------------------------------------

    def models(self, prefix: str = "") -> list[ModelRef]:
        """Return the live versions whose name starts with `prefix`, sorted."""
        if not isinstance(prefix, str):
            raise OptionError(f"models: prefix: expected text; found {prefix!r:.100}")
        return sorted(ref for part in self._session.broadcast(ShardCalls.models(prefix)) for ref in part)

    def find(self, pattern: Sequence[Mapping[str, object]] | Architecture, *, exact: bool = False) -> list[ModelRef]:
        """Find the live versions with a given architecture, or with a path of layers that matches a pattern.

        Args:
            pattern: A `ModelGraph`, a Keras model or a torch module, for versions with the same architecture, whatever
                their names. Or a list of predicates, one per layer along a path, such as
                `[{"class": "Conv2D", "filters": [32, 64]}, {}]`: each maps config keys to a value or a list of allowed
                values, and `{}` matches any layer.
            exact: Whether the pattern must cover a complete path from an input to an output.

        Returns:
            The versions, sorted.

        Raises:
            GraphError: if the pattern is malformed.
        """
        if isinstance(pattern, Sequence):
            request = ShardCalls.find(list(check_pattern(pattern)), exact)
        else:
            request = ShardCalls.alike(PrefixQuery.of(frameworks.graph_of(pattern, "find")))
        return sorted(ref for part in self._session.broadcast(request) for ref in part)

    def longest_prefix(self, graph: Architecture) -> PrefixMatch | None:
        """Find the live version that shares the most layers with an architecture, counted from the inputs.

        If several versions share equally many layers, the one with the highest quality is returned, and of several with
        the same quality the newest.

        Args:
            graph: A `ModelGraph`, a Keras model or a torch module.

        Returns:
            The match, which pins the version until it is released. None if no version shares an input layer.

        Raises:
            GraphError: if `graph` has no architecture.
        """
        return self.longest_prefixes([graph])[0]

    def longest_prefixes(self, graphs: Sequence[Architecture]) -> list[PrefixMatch | None]:
        """Find the longest prefix for each of several architectures, with one message per shard.

        Args:
            graphs: Architectures, as in `longest_prefix`.

        Returns:
            One result of `longest_prefix` per architecture, in the same order.
        """
        asked = [frameworks.graph_of(graph, "longest_prefix") for graph in graphs]
        return self._prefixes.longest(asked) if asked else []

    def stats(self) -> RepositoryStats:
        """Return the statistics of the repository, in total and per shard."""
        return RepositoryStats.of(self._session.broadcast(ShardCalls.stats()))

    # ---- changes --------------------------------------------------------------------------------------

    def retire(self, model: Model) -> None:
        """Retire a version: remove it from the path and from all answers except lineages.

        Its tensors are freed when no live version and no pin refers to them.

        Raises:
            ModelNotFoundError: if the version is not live.
        """
        name, version = split_ref(model)
        self._session.at_home(name, ShardCalls.retire(name, version))

    def verify(self, model: Model | None = None, timeout: float = 600.0) -> list[Problem]:
        """Check a version or all versions: every checksum in memory and on disk, and the owner of every tensor.

        Args:
            model: The version. None means all live versions.
            timeout: Seconds for each version.

        Returns:
            The problems found, including files that could not be read when the repository started. Empty if all is
            correct.
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
        """List the files on the path that could not be read when the repository started and still cannot be read.

        Each file affects only its own version. Data to which the file may refer is not deleted, and the version's
        number is not used again. The files are read again from time to time, so a repaired file is restored
        automatically.
        """
        return self._verifier.unreadable()

    def export(self, model: Model, path: str | os.PathLike[str]) -> None:
        """Write the tensors of a version to a file that other tools can read.

        The file also holds the version's architecture, quality and metadata. Metadata values that are text are
        additionally written under their own keys. A safetensors file has `"format": "pt"` unless the metadata names
        another format.

        Args:
            model: The version.
            path: File name or URI of `pyarrow.fs`, such as `s3://bucket/m.safetensors`. It ends with `.safetensors`,
                `.arrow` or, for a Keras model, `.weights.h5`. An existing file is replaced.

        Raises:
            StorageError: if the file cannot be written, or its suffix is unknown.
            TensorMismatchError: if the format cannot hold the dtype of a tensor.
            GraphError: if the suffix is `.weights.h5` and the version is not a Keras model.
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
        """Save the tensors of a file as a new version.

        Args:
            path: File that `export` or another tool wrote: `.safetensors`, `.arrow` or `.weights.h5`, as in `export`.
            name: Name of the model.
            as_save: Keyword arguments of `save`. `graph`, `quality` and `metadata` default to those in the file. The
                metadata of a file of another tool (`__metadata__` of safetensors, schema metadata of Arrow) becomes the
                version's metadata.

        Returns:
            The new version, and the bytes that it wrote and inherited.

        Raises:
            StorageError: if the file cannot be read.
            CorruptDataError: if the file is damaged.
            TensorVineError: the errors of `save`.
        """
        tensors, stored = files.read(path)
        return self.save(name, tensors, **stored | as_save)

    def wait_newer(self, name: str, after: int = 0, timeout: float = 30.0) -> ModelRef | None:
        """Wait for a version of a model that is newer than `after`. The shard pushes it, so nothing is polled.

        Args:
            name: Name of the model.
            after: Number of a version.
            timeout: Seconds to wait.

        Returns:
            The newest version, or None if no newer version was committed within `timeout`.
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
            raise StorageError(f"{where}: expected a repository with path=; {self.name!r} was started without it")
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
