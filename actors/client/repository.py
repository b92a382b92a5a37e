"""The repository as users see it: the models in it. How it is started and ends is `deployment`.

Rules
- A `Repository` is one client. It may be used by several threads, whose saves are carried out side by side, those of
  each in its order. A save whose call ends by an exception commits nothing afterwards.
- Every wait has a timeout, in seconds, and every error is of the one tree in `store.errors`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack
from weakref import WeakKeyDictionary

import numpy as np

from ...store import html
from ...store.archive import interchange
from ...store.errors import (
    GraphError,
    InvalidNameError,
    ModelLostError,
    ModelNotFoundError,
    MovedError,
    OperationTimeoutError,
    OptionError,
    StorageError,
    TensorVineError,
)
from ...store.graphs.graph import ModelGraph
from ...store.graphs.index import PrefixQuery
from ...store.graphs.pattern import check_pattern
from ...store.refs import Model, ModelRef, check_alias, check_followed, check_name, split_ref, text_of
from ...store.shard import ShardStats
from ...store.versions.manifest import Header, ModelInfo, TensorEntry
from ...store.waiting import Deadline, seconds_of
from ..engine.engine import Engine
from ..planner.calls import PlannerCalls
from ..planner.streams import TrainingStatus
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import UnreadFile
from ..shard.calls import ShardCalls
from . import files, frameworks
from .catalog import Catalog
from .deployment import Closes, Deployment
from .diff import Diff, Differ
from .launch import Launched
from .lineage import Lineage
from .match import Prefixes, PrefixMatch
from .patching import Have, Patching
from .progress import bar, each
from .reader import Reader, selection_of
from .save.pending import PendingSave
from .save.request import Inherit, Saved, SaveOptions, requested
from .save.saves import Saves, Until
from .session import CONTROL_TIMEOUT_S
from .stats import RepositoryStats
from .traffic import Traffic
from .verifier import Problem, Verifier

if TYPE_CHECKING:
    import keras
    from torch import nn


log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""How much longer than it waits for a version a shard may take to answer."""
HTML_S = 2.0
"""How long the shards may take to answer for a notebook's cell."""

Architecture: TypeAlias = "ModelGraph | keras.Model | nn.Module"
"""An architecture: a graph, or a model that has one."""


class Repository(Deployment):
    """A client of a running repository.

    `Repository.start` starts a repository, and `Repository.connect` connects to a running repository. `close`, or the
    end of a `with` block, disconnects the client, and stops the repository if this client started the repository.

    Several threads can share one client. Their saves run in parallel; the saves of one thread are performed in the
    order of the calls. Only the process that created a client can use the client: in a forked child process, the
    methods raise `ClosedError`.

    Methods that expect a version accept `"name@3"`, `"name"` for the latest live version, a `ModelRef`, or an object
    whose attribute `ref` is a `ModelRef`, such as `Saved`. Timeouts are in seconds.

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
        self._patching = Patching(self._session, self._catalog, self._reader)
        self._saves = Saves(self._session, self._catalog, self._reader, greets=launched is None)
        self._lineage = Lineage(self._session)
        self._prefixes = Prefixes(self._session, self._catalog, self._reader)
        self._verifier = Verifier(self._session, self._lineage)
        self._differ = Differ(self._session, self._catalog, self._reader)
        self._loaded: WeakKeyDictionary[object, ModelRef] = WeakKeyDictionary()
        """Model that `load_model` returned or filled -> its version."""

    def _repr_html_(self) -> str:
        if self._session.opened.closed:
            return html.facts(repr(self), ())
        found = [one for one in self.stats_by_shard(HTML_S).values() if isinstance(one, ShardStats)]
        silent = len(self._session.shards) - len(found)
        told = f"<p>{silent} shards do not answer</p>" if silent else ""
        try:
            stats = RepositoryStats.of(self.catalog_stats(HTML_S), found)
        except TensorVineError:
            return html.facts(repr(self), ()) + "<p>the catalog does not answer</p>" + told
        return html.facts(repr(self), ()) + stats._repr_html_() + told

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
        """Save a new version of a model, and return when the version is committed.

        A committed version is complete and visible to all clients. If the call is interrupted, for example by
        `KeyboardInterrupt`, the version is either committed before the call ends or never committed.

        Args:
            name: Name of the model: 1 to 200 characters of `A-Z a-z 0-9 . _ - /`, without a leading `/` or a `..` part.
                The versions of a name are numbered from 1.
            tensors: Mapping of tensor names to NumPy, TensorFlow, PyTorch or CuPy arrays of numbers or booleans. Masked
                arrays and arrays with labels, units or missing values are rejected. Tied tensors (same memory, shape,
                strides and dtype) are stored once, except that tensors below 4 KiB may be stored separately.
            graph: Architecture of the model. None means the parent's architecture if `tensors` contains all tensors of
                that architecture, and otherwise no architecture.
            parent: Version from which the new version derives. None means the latest version of `name`, if one exists.
            inherit: Which tensors the new version shares with its parent instead of storing copies. `"auto"` shares
                each tensor that has the same shape, dtype and bytes as the parent's tensor of the same name. If the
                parent has no tensor of this name, an equal tensor with another name is shared. A mapping of layer names
                to the parent's layer names shares all tensors of these layers. It requires `graph`, and equal configs
                in each pair of layers. `tensors` can omit the shared tensors; values given for them are not stored, but
                their shapes and dtypes are checked. None shares no tensors.
            quality: A number. Among versions that match equally well, `longest_prefix` returns the version with the
                highest quality. None and NaN rank lowest.
            metadata: Mapping of keys to JSON values or NumPy scalars, stored with the version.
            durability: `"memory"` commits the version when the shards hold the version in memory. If the repository has
                a path, the version is then written to disk in the background. `"disk"` commits the version when the
                version is on disk and synced. No client sees the version before the commit.
            timeout: Seconds for the whole save, including the wait for earlier saves of this thread.

        Returns:
            The new version, and the numbers of bytes written and inherited.

        Raises:
            InvalidNameError: if `name` or `parent` is malformed.
            GraphError: if the graph is invalid, or a layer in `inherit` does not match the given layer of the parent.
            TensorMismatchError: if a tensor, the quality or the metadata cannot be stored, or if no tensor is given or
                inherited.
            TensorNotFoundError: if a tensor of the graph is neither given nor inherited.
            OptionError: if `durability` or `timeout` is invalid, or the metadata is larger than the repository's
                `metadata_bytes`.
            ModelNotFoundError: if the parent does not exist.
            CorruptDataError: if a tensor of a layer in `inherit` is in a damaged file of the shard that commits. If the
                file is another shard's, the save succeeds, and a load raises this.
            StoreFullError: if a shard has too little memory for the tensors.
            StorageError: if `durability` is `"disk"` and the repository has no path, or if the new version, or an
                earlier version in the write queue, cannot be written to disk. The new version is not committed.
            ShardUnavailableError, OperationTimeoutError: if a shard dies or does not answer in time. The version may
                have been committed: call `models` to check.
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
        """Start saving a new version, and return before the version is committed.

        The call checks the arguments, and a background thread completes the save. `staged` of the returned
        `PendingSave` waits until the tensors are copied, so that the caller can change them. `committed` waits for the
        commit.

        Normally, the tensors are copied before this method returns. They are copied later, in the background, if the
        client's copy buffer still holds the tensors of the previous save, or if the tensors are larger than a quarter
        of the machine's memory.

        This method has the arguments of `save`. The errors of `save` are raised by this method or by the methods of the
        returned `PendingSave`.
        """
        options = SaveOptions(parent=parent, inherit=inherit, quality=quality, metadata=metadata, durability=durability)
        options["timeout"] = timeout
        return self._submit(name, tensors, graph, until="copied", **options)

    def save_model(
        self,
        name: str,
        model: Any,
        *,
        optimizer: Any = False,
        scheduler: Any = None,
        factory: str | None = None,
        arguments: Mapping[str, object] | None = None,
        **as_save: Any,
    ) -> Saved:
        """Save a Keras or PyTorch model: the architecture, the tensors and, if possible, a recipe to rebuild the model.

        Unless `parent` is given, the parent is the latest version of `name`. If `name` has no version yet, the parent
        is the version from which `load_model` loaded this model, if that version still exists.

        Args:
            name: Name of the model, as in `save`.
            model: A built Keras model or a torch module. A wrapped module (`DataParallel`, `DistributedDataParallel`,
                `torch.compile`) is saved without its wrapper. `load_model` can rebuild a Keras model that has a config,
                and a torch module with a `factory`, a Hugging Face `config` or Lightning's `hparams`, or that consists
                of modules of torch.nn. For other models, `load_model` needs `into`, and this method logs the reason.
            optimizer: For a Keras model, whether to save the state of its optimizer, as tensors named `optimizer/...`.
                For a torch module, the optimizer whose state is saved. False saves no optimizer state.
            scheduler: Learning-rate scheduler whose state is saved, for a torch optimizer. None saves no scheduler.
            factory: Name of the function or class that builds this torch module, as "package.module:function". It is
                stored, and not imported here. `load_model` calls it only with permission.
            arguments: Keyword arguments of `factory`: None, bools, numbers, strings, bytes, and lists, tuples, sets and
                dicts of these.
            as_save: Further keyword arguments of `save`, except `graph`.

        Returns:
            The new version, and the numbers of bytes written and inherited.

        Raises:
            GraphError: if `model` is neither a Keras model nor a torch module, `optimizer`, `scheduler` or `factory`
                does not fit the model, or an argument of the factory cannot be stored.
            TensorMismatchError: if a part of the model's state cannot be stored. The message names the part.
            TensorVineError: the errors of `save`.
        """
        tensors, graph, recipe = frameworks.parts_of(model, factory, arguments)
        tensors.update(frameworks.training_tensors_of(model, optimizer, scheduler))
        if "parent" not in as_save and (origin := self._loaded.get(model)) is not None:
            as_save["parent"] = self._parent_of(name, origin)
        return self._submit(name, tensors, graph, until="committed", recipe=recipe, **as_save).committed()

    def load(
        self,
        model: Model,
        *,
        layers: Sequence[str] | None = None,
        tensors: Sequence[str] | None = None,
        into: Mapping[str, object] | None = None,
        have: Have | None = None,
        timeout: float = 60.0,
        transport: str = "auto",
    ) -> dict[str, np.ndarray]:
        """Load all tensors of a version, or selected tensors.

        With `have`, the arrays in `into` hold another version, its *base*, and are brought up to date. Tensors from
        other nodes are moved only if they changed: as a patch (the difference from the base), or whole if this is
        predicted to be sooner. The content hash of each result is checked. If a patch cannot be used, for example
        because an array does not hold the base, the whole tensor is moved. `traffic` counts these tensors by cause.
        If the load fails, the arrays are unchanged. The loaded version stays pinned until the client's next load with
        `have`, so that it can serve as a base even if it is retired.

        Args:
            model: The version.
            layers: Names of the layers whose tensors are loaded.
            tensors: Names of the tensors to load. A call with both `layers` and `tensors` raises `TensorNotFoundError`.
            into: Mapping of tensor names to writable arrays, to which the tensors are copied. Without `layers` and
                `tensors`, the tensors named in this mapping are loaded. The arrays can have any strides and byte order.
                All arrays are checked before the first array is written to.
            have: The version, with its number, whose tensors the arrays in `into` hold, or a mapping of tensor names to
                content hashes (xxh3-128, hexadecimal). An empty mapping means that the arrays hold nothing.
            timeout: Seconds for the whole load.
            transport: Transport of the bytes: `"shared"` (mapped memory of this node), `"socket"`, `"object_store"`,
                `"gloo"` or `"nccl"` (collective groups), or `"files"` (the repository's path, only for versions on
                disk). `"auto"` maps tensors on this node, and reads other tensors by the transport that is predicted to
                be fastest.

        Returns:
            A mapping of tensor names to NumPy arrays. With `into`, these arrays share the memory of the given arrays.
            Without `into`, the arrays are read-only. If this node holds the bytes, the arrays are not copied, and share
            memory with other processes. The arrays stay valid after the version is retired, a shard dies or the client
            is closed. `torch.from_numpy` does not copy: to get a writable tensor, pass a copy of the array.

        Raises:
            ModelNotFoundError: if the version does not exist or was retired.
            TensorNotFoundError: if the version lacks a requested layer or tensor, or `into` lacks a requested tensor.
            TensorMismatchError: if an array of `into` differs in shape or dtype from the stored tensor, cannot be
                written to, or overlaps another array of `into`. No array was written to.
            ModelLostError: if bytes of the version were lost when a shard died.
            OptionError: if the transport is unknown, the timeout is not a number, or `have` is given without `into`,
                has no version number, or is not a mapping of names to hashes.
            ShardUnavailableError: if the transport cannot be used from this process, or a shard does not restart in
                time.
            OperationTimeoutError: if a shard does not answer in time.
        """
        if have is not None:
            selection = selection_of(layers, tensors, into)
            return self._patching.load(model, selection, into, have, timeout, transport)
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
        factory: Callable[..., Any] | str | None = None,
        trusted_packages: Collection[str] = (),
    ) -> Any:
        """Load a Keras or PyTorch model: build a new model, or load the stored state into the model `into`.

        The model is loaded completely, or an error is raised and `into` is unchanged. Random seeds, metrics and the
        states of stateful recurrent layers are not stored: a new model has initial values, and `into` keeps its values.

        A new torch module is built on the CPU, if `save_model` stored how (see there). A function or class that the
        version names is imported and called only if it was registered (`store.torch.register_factory`) or its package
        is in `trusted_packages`. `into` is needed for a module that was changed after its construction, and to restore
        a torch optimizer.

        Args:
            model: The version.
            into: Model to load into. Tensors are matched by name, or by architecture if the names differ. Other state
                of layers (vocabularies, assets, extra state) is also loaded. For a torch module on the device "meta",
                memory is allocated on the CPU. None builds a new model. A new Keras model is compiled if the saved
                model was compiled.
            optimizer: For a Keras model, whether to load the state of its optimizer, if the state was saved. For a
                torch module, the optimizer of `into` whose state is loaded. With True or False, the optimizer state of
                a torch module is not loaded.
            scheduler: Learning-rate scheduler whose state is loaded, for a torch optimizer.
            strict: Whether the version must contain every tensor of `into`.
            compile: Whether to compile a new Keras model. False also omits the state of its optimizer.
            custom_objects: Mapping of names to the classes and functions that are needed to build a Keras model.
                Objects that are registered with Keras can be left out.
            factory: Function or class that builds the torch module, or its name "package.module:function". It is called
                with the stored arguments, instead of the function or class that the version names. For a version with a
                Hugging Face config, pass the class of the model.
            trusted_packages: Packages, such as `["transformers"]`, whose functions and classes a version may name. They
                are called with stored arguments: list only packages without functions that run code from files or the
                network, or versions from people you trust.

        Returns:
            The new model, or `into`.

        Raises:
            GraphError: if the model cannot be built or names a function or class without permission, if a layer cannot
                restore its stored state, or if an argument does not apply to a model of this framework.
            TensorNotFoundError: if `into` or its optimizer lacks a stored tensor, or has a tensor that is not stored.
                With `strict=False`, `into` can have tensors that are not stored.
            TensorMismatchError: if a tensor differs in shape or dtype from the stored tensor, or the classes of the
                torch optimizer and of the saved optimizer differ.
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
            options = frameworks.LoadOptions(
                optimizer, scheduler, strict, compile, custom_objects, factory, trusted_packages
            )
            loaded = frameworks.load(recipe, into, tensors, graph, options)
        except GraphError as exc:
            raise GraphError(f"load_model of {header.ref}: {exc}") from exc
        self._loaded[loaded] = header.ref
        return loaded

    def graph(self, model: Model) -> ModelGraph:
        """Return the architecture of a version. The graph has no layers if no architecture was saved."""
        header = self._header(model)
        return self._catalog.graph(header.ref, header.graph_key)

    def info(self, model: Model) -> ModelInfo:
        """Return the parent, quality, metadata, time of the save, sizes and codec of a version."""
        return ModelInfo.of(self._header(model))

    def owners(self, model: Model) -> dict[str, ModelRef]:
        """Return the owner of each tensor of a version: the version or ancestor whose save wrote the tensor."""
        ref, table = self._table(model)
        return {name: entry.owner or ref for name, entry in table.items()}

    def contributions(self, model: Model) -> dict[ModelRef, list[str]]:
        """Group the tensors of a version by their owners.

        Returns:
            A mapping of owners to names of tensors. An owner is the version or ancestor whose save wrote the tensors.
        """
        written: dict[ModelRef, list[str]] = {}
        for name, owner in self.owners(model).items():
            written.setdefault(owner, []).append(name)
        return written

    def lineage(self, model: Model) -> list[ModelRef]:
        """Return a version and all its ancestors, ordered from the version to the root, including retired ancestors."""
        return self._lineage.to_root(self._header(model).ref)

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the saved qualities of versions, including retired versions.

        The quality of a retired version is known while a live version derives from it.

        Args:
            refs: Versions, such as those of a lineage.

        Returns:
            A mapping of versions to qualities. Versions without a known quality are left out.
        """
        return self._lineage.qualities(refs)

    def descendants(self, model: Model) -> list[ModelRef]:
        """Return all live versions that derive, directly or indirectly, from a version. The result is sorted."""
        return self._lineage.descendants(self._header(model).ref)

    def common_ancestor(self, a: Model, b: Model) -> ModelRef | None:
        """Return the most recent common ancestor of two versions, or None if they have no common ancestor.

        A version counts as its own ancestor.
        """
        line = set(self.lineage(b))
        return next((ref for ref in self.lineage(a) if ref in line), None)

    def diff(self, a: Model, b: Model, *, histogram: int | None = None, timeout: float = 60.0) -> Diff:
        """Compare the tensors of two versions, of the same model or of different models.

        Tensors with the same name are compared, bit by bit, by the shards that store the tensors of `b`. The tensors
        are not sent to the caller. Both versions are pinned during the comparison.

        Args:
            a: The first version.
            b: The second version.
            histogram: Number of bins, up to 10,000, of a histogram of the differences in each tensor. None: no
                histogram.
            timeout: Seconds for the whole comparison.

        Returns:
            The tensors that are equal, changed, new and gone. For each changed tensor, the share of elements that
            differ, the L2 norm of the difference `b` minus `a` and, if requested, the histogram.

        Raises:
            ModelNotFoundError: if a version does not exist or was retired.
            OptionError: if `histogram` is not a number of bins.
            ModelLostError: if bytes of a version were lost when a shard died.
            ShardUnavailableError, OperationTimeoutError: if a shard dies, cannot read a tensor of another shard, or
                does not answer in time.

        >>> with Repository.start("docs") as repo:                                    # doctest: +SKIP
        ...     first = repo.save("m", {"w": np.zeros(4)})
        ...     second = repo.save("m", {"w": np.array([0.0, 3.0, 0.0, 4.0])})
        ...     repo.diff(first, second).changed
        {'w': TensorDiff(share=0.5, norm=5.0, counts=(), edges=())}
        """
        return self._differ.diff(self._header(a).ref, self._header(b).ref, histogram, timeout)

    def models(self, prefix: str = "") -> list[ModelRef]:
        """Return the live versions whose name starts with `prefix`, sorted by name and version."""
        if not isinstance(prefix, str):
            raise OptionError(f"models: prefix: expected text; found {prefix!r:.100}")
        return self._session.ask(CatalogCalls.models(prefix))

    def infos(
        self, prefix: str = "", after: datetime | None = None, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[ModelInfo]:
        """Return the infos of all live versions, with one message.

        Args:
            prefix: Beginning of the names.
            after: Only versions created after this time. None means all.
            timeout: Seconds to wait.

        Returns:
            The infos without metadata (`ModelInfo.metadata` is empty), sorted by name and version.
        """
        after_ns = int(after.timestamp() * 1e9) - 1000 if after is not None else 0  # times are rounded to 1 us
        found = self._session.ask(CatalogCalls.headers(prefix, after_ns), seconds_of(timeout))
        infos = (ModelInfo.of_row(row) for row in found)
        return sorted((info for info in infos if after is None or info.created > after), key=lambda info: info.ref)

    def find(self, pattern: Sequence[Mapping[str, object]] | Architecture, *, exact: bool = False) -> list[ModelRef]:
        """Find the live versions with a given architecture, or with a path of layers that matches a pattern.

        Args:
            pattern: An architecture or a list of predicates. An architecture (a `ModelGraph`, a Keras model or a torch
                module) finds the versions with the same architecture; the names of layers can differ. A list, such as
                `[{"class": "Conv2D", "filters": [32, 64]}, {}]`, has one predicate for each layer of a path. Each
                predicate maps config keys to a value or to a list of allowed values; `{}` matches any layer.
            exact: Whether the list must cover a complete path from an input to an output.

        Returns:
            The versions, sorted.

        Raises:
            GraphError: if the pattern is malformed.
        """
        if isinstance(pattern, Sequence):
            request = CatalogCalls.find(list(check_pattern(pattern)), exact)
        else:
            request = CatalogCalls.alike(PrefixQuery.of(frameworks.graph_of(pattern, "find")))
        return self._session.ask(request)

    def longest_prefix(self, graph: Architecture) -> PrefixMatch | None:
        """Find the live version that shares the most layers with an architecture, counted from the inputs.

        If several versions share the same number of layers, the version with the highest quality is returned. If these
        qualities are equal, the newest version is returned.

        Args:
            graph: A `ModelGraph`, a Keras model or a torch module.

        Returns:
            The match, which pins the version until `PrefixMatch.release`. None if no version shares an input layer.

        Raises:
            GraphError: if `graph` is of another type, or the architecture of the model cannot be determined.
        """
        return self.longest_prefixes([graph])[0]

    def longest_prefixes(self, graphs: Sequence[Architecture]) -> list[PrefixMatch | None]:
        """Call `longest_prefix` for several architectures, with one message.

        Args:
            graphs: Architectures, as in `longest_prefix`.

        Returns:
            The results of `longest_prefix`, in the order of the architectures.
        """
        asked = [frameworks.graph_of(graph, "longest_prefix") for graph in graphs]
        return self._prefixes.longest(asked) if asked else []

    def stats(self) -> RepositoryStats:
        """Return the statistics of the repository, in total, of its catalog, and per shard."""
        catalog = self._session.ask(CatalogCalls.stats())
        return RepositoryStats.of(catalog, self._session.call_all(ShardCalls.stats()))

    def trainings(self, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, TrainingStatus]:
        """Return the training runs that publish versions, by the name of the model: losses, loss curve and plan.

        A training run is left out if it has not reported for ten minutes.

        Args:
            timeout: Seconds to wait for the planner.
        """
        return self._session.planner.call(PlannerCalls.streams(), seconds_of(timeout))

    def traffic(self) -> Traffic:
        """Return the bytes that this client's loads moved since it connected. Saves do not count."""
        return self._reader.meter.traffic

    def retire(self, model: Model) -> None:
        """Retire a version, in memory and on disk. A retired version can no longer be found.

        Clients that have already pinned the version can still load it, and other clients that have loaded the version
        may load it until the memory of its tensors is used again. The lineages of its descendants still contain the
        version. The version's tensors are freed when no live version and no pin refers to these tensors.

        Raises:
            ModelNotFoundError: if the version is not live.
            OptionError: if an alias names the version. Move or remove the alias first.
        """
        name, which = split_ref(model)
        numbered = self._session.number()
        try:
            self._reader.forget(self._session.ask(CatalogCalls.retire(numbered.request, name, which)))
        finally:
            self._session.requests.end(numbered)

    def alias(self, name: str, alias: str, model: Model | None) -> ModelRef | None:
        """Give a version another name, or move this name to another version: `name@alias`, such as `"digits@prod"`.

        `name@alias` can be used wherever a version is expected. A consumer of `name@alias` uses the version that the
        alias names, and changes to another version when the alias moves: forward or back. All clients see the move at
        once. If the repository has a path, the alias is on the path when this method returns. A version that an alias
        names cannot be retired.

        Args:
            name: Name of the model.
            alias: The alias: 1 to 64 characters of `A-Z a-z 0-9 . _ -`, the first one a letter.
            model: The version of `name` that the alias names from now on. None removes the alias.

        Returns:
            The version that the alias names. If the alias was removed: the version that it named, or None if there was
            no such alias.

        Raises:
            InvalidNameError: if the alias is malformed, or `model` is a version of another name.
            ModelNotFoundError: if the version is not live.
            StorageError: if the alias cannot be written to the path.
            StoreFullError: if the catalog has no memory for another alias.

        >>> repo.save("digits", {"w": np.zeros(2)}).ref
        ModelRef('digits@1')
        >>> repo.alias("digits", "prod", "digits@1")
        ModelRef('digits@1')
        >>> repo.load("digits@prod")["w"], repo.aliases("digits")
        (array([0., 0.]), {'digits@prod': ModelRef('digits@1')})
        """
        check_alias(alias)
        of, which = split_ref(model) if model is not None else (check_name(name), None)
        if of != name:
            raise InvalidNameError(f"alias {name}@{alias}: expected a version of {name!r}; found {text_of(of, which)}")
        numbered = self._session.number()
        try:
            return self._session.ask(CatalogCalls.alias(numbered.request, name, alias, which, model is None))
        finally:
            self._session.requests.end(numbered)

    def aliases(self, prefix: str = "") -> dict[str, ModelRef]:
        """Return the aliases of all models whose names begin with `prefix`: `name@alias`, mapped to the version."""
        found = self._session.ask(CatalogCalls.aliases(prefix))
        return {text_of(name, alias): ModelRef(name, v) for name, named in found.items() for alias, v in named.items()}

    def verify(self, model: Model | None = None, timeout: float = 600.0) -> list[Problem]:
        """Check one or all versions for damage.

        The check covers the checksums in memory and on disk, and whether each tensor's owner is in the lineage.

        Args:
            model: The version. None means all live versions.
            timeout: Seconds to wait for each check. Each version has two checks: the manifest and the tensors.

        Returns:
            The problems found, including files that could not be read when the repository started. An empty list
            means that no problem was found.
        """
        if model is None:
            found = self._verifier.unread()
        else:
            name, which = split_ref(model)
            found = self._verifier.unread(ModelRef(name, which)) if isinstance(which, int) else []
            if found:
                return found
        refs = self.models() if model is None else [self._header(model).ref]
        shown = each(refs, f"verify of {self.name}", "versions", len(refs))
        return found + [problem for ref in shown for problem in self._verifier.check(ref, timeout)]

    def unreadable(self) -> list[UnreadFile]:
        """List the files on disk that could not be read when the repository started and still cannot be read.

        The version that an unreadable file describes cannot be loaded. Other versions are not affected. The repository
        keeps all data that the file may refer to, and does not use the version's number again. The catalog regularly
        tries to read the file again. If the file is repaired, the version is restored automatically.
        """
        return self._verifier.unreadable()

    def export(self, model: Model, path: str | os.PathLike[str]) -> None:
        """Write the tensors of a version to a file that other tools can read.

        A safetensors or Arrow file also contains the version's architecture, quality and metadata. Each metadata value
        that is text is also written as an entry under its own key. A safetensors file has the entry `"format": "pt"`
        unless the metadata contains text under the key `"format"`.

        Args:
            model: The version.
            path: File name, or URI that `pyarrow.fs` supports, such as `s3://bucket/m.safetensors`. The suffix must be
                `.safetensors`, `.arrow`, `.feather` or, for a Keras model, `.weights.h5`. An existing file is replaced.

        Raises:
            StorageError: if the file cannot be written, or its suffix is unknown.
            TensorMismatchError: if the format does not support the dtype of a tensor.
            GraphError: if the suffix is `.weights.h5` and `load_model` cannot rebuild the version as a Keras model.
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
        with bar(f"export of {info.ref}", "bytes", 2 * info.bytes_total) as advance:
            tensors = self.load(info.ref)
            advance(info.bytes_total)
            files.write(path, info, self.graph(info.ref), tensors)

    def import_(self, path: str | os.PathLike[str], name: str, **as_save: Any) -> Saved:
        """Save the tensors of a file as a new version.

        Args:
            path: File name or URI of a file written by `export` or another tool. See `export` for the formats.
            name: Name of the model.
            as_save: Further keyword arguments of `save`. `graph`, `quality` and `metadata` default to the values in the
                file. If another tool wrote the file, the file's own metadata (`__metadata__` of safetensors, schema
                metadata of Arrow) becomes the version's metadata.

        Returns:
            The new version, and the numbers of bytes written and inherited.

        Raises:
            StorageError: if the file cannot be read.
            CorruptDataError: if the file is damaged.
            TensorVineError: the errors of `save`.
        """
        nbytes = [0]
        with bar(f"import of {name}", "bytes", measure=lambda: (nbytes[0], 2 * nbytes[0] or None)):
            tensors, stored = files.read(path)
            nbytes[0] = sum(array.nbytes for array in tensors.values())
            return self.save(name, tensors, **stored | as_save)

    def wait_newer(self, name: str, after: int = 0, timeout: float = 30.0) -> ModelRef | None:
        """Wait, without polling, until a model has a live version with a version number above `after`.

        Args:
            name: Name of the model, or `name@alias`: wait until the alias names another version than number `after`.
            after: Version number. 0 accepts any version.
            timeout: Seconds to wait.

        Returns:
            The newest version, or the version of the alias. None if there was no such version within `timeout`.
        """
        deadline = Deadline.after(seconds_of(timeout))
        check_followed(name)
        while True:
            left = deadline.left()
            try:
                near = self._session.near(name, Deadline.after(left + ANSWER_S))
                located = self._session.call(near, ShardCalls.wait_newer(name, after, left), left + ANSWER_S)
            except MovedError:  # the shard has left just now
                continue
            except OperationTimeoutError:
                return None
            if located is None:
                return None
            self._reader.expect(located)
            return located.header.ref

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
        return self._session.ask(CatalogCalls.header(self._session.client, *split_ref(model)))

    def _parent_of(self, name: str, origin: ModelRef) -> ModelRef | None:
        """Return the parent of a loaded model's first save as `name`, or None if `name` has versions."""
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
