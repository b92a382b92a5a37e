"""One candidate of an architecture search: what it inherits, and what is saved of it.

Rules
- The ancestor is pinned from the query to the release: somebody else may retire it meanwhile, and both the load and
  the save that inherits from it still work.
- An ancestor whose tensors went with a shard that died is none: it costs the transfer, and not the candidate.
- A layer is taken over when its tensors fit the ancestor's in number, shape and dtype, and so do all layers before it.
- Frozen layers are the ancestor's. A save compares all the same: whatever of a layer is not the ancestor's, bit for
  bit, is written.
- A model of which all could be frozen could not learn: its outputs' layers are taken over, and learn.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from ...store.arrays import dtype_name
from ...store.errors import ModelLostError
from ...store.graphs.graph import ModelGraph
from ...store.refs import ModelRef, check_name
from ..client.frameworks import recipe_of
from ..client.match import PrefixMatch
from ..client.repository import Repository
from ..client.save.request import Saved, same_bytes
from .parts import ModelParts

log = logging.getLogger(__name__)


class Candidate:
    """A candidate of an architecture search. The candidate inherits layers from a stored model (EvoStore, section 4.3).

    The constructor finds the ancestor: the stored version that shares the longest prefix of layers with `model`. The
    constructor pins the ancestor and loads the matching layers into `model`. `release`, or the end of a `with` block,
    removes the pin.

    Args:
        repository: Repository that contains the ancestor and stores the candidate. None disables inheriting and saving.
        name: Name of the candidate's model in the repository.
        model: A torch module, or a built Keras model. Compile a Keras model after this call.
        freeze: Whether to exclude inherited layers from training by setting `trainable` (Keras) or `requires_grad`
            (PyTorch) to False. If all tensors are inherited, the output layers are not frozen.

    Raises:
        InvalidNameError: if the name is malformed.
        GraphError: if `model` is neither a Keras model nor a torch module, or if the architecture cannot be stored.
        ShardUnavailableError, OperationTimeoutError: if a shard does not answer in time while the constructor searches
            for the ancestor or loads layers of the ancestor.

    >>> with Candidate(repo, "nas/7", model) as candidate:                        # doctest: +SKIP
    ...     model.compile("adam", "mse")
    ...     model.fit(x, y)
    ...     saved = candidate.save(quality=0.93)
    """

    def __init__(self, repository: Repository | None, name: str, model: object, *, freeze: bool = True) -> None:
        self.name = check_name(name)
        self.model = model
        self.ancestor: ModelRef | None = None
        """The version from which it inherits, or None if no stored layer with tensors fits."""
        self.layers: dict[str, str] = {}
        """Inherited layers: names in this model -> names in the ancestor."""
        self.seconds = 0.0
        """Seconds spent in the repository so far, for query, load, save and release."""
        self._repository = repository
        self._parts: ModelParts | None = None
        self._match: PrefixMatch | None = None
        self._taken: dict[str, np.ndarray] = {}
        """Tensor of this model -> the ancestor's bytes, which are compared with when it is saved."""
        self._thaw: Callable[[], None] | None = None
        self._released = False
        if repository is None:
            return
        try:
            with self._timed():
                parts = self._parts = ModelParts(model)
                self._inherit(repository, parts)
                frozen = self._to_freeze(parts.graph) if freeze and self.layers else set[str]()
                if frozen:
                    self._thaw = parts.freeze(frozen)
                if self.layers:
                    whole = [
                        layer for layer in parts.graph.layers if layer.tensors and frozen.issuperset(layer.tensors)
                    ]
                    taken, of = len(self.layers), len(parts.graph.layers)
                    log.info("%s: %d of %d layers from %s, %d frozen", name, taken, of, self.ancestor, len(whole))
                parts.forget()
        except BaseException:
            self.release()
            raise

    def save(self, quality: float, metadata: Mapping[str, object] | None = None, timeout: float = 60.0) -> Saved | None:
        """Save the model as a new version. The parent of the version is the ancestor, if any.

        Inherited layers whose tensors are bit-for-bit unchanged are shared with the ancestor. All other tensors are
        written.

        Args:
            quality: Quality of the model, a finite number. Higher is better.
            metadata: Mapping of keys to JSON values or NumPy scalars, stored with the version.
            timeout: Seconds to wait for the save.

        Returns:
            The new version, and the numbers of bytes written and inherited. None if the candidate has no repository.

        Raises:
            ValueError: if `quality` is not finite, or if the candidate was released.
            TensorVineError: the errors of `Repository.save`.
        """
        if not math.isfinite(quality):
            raise ValueError(f"save of {self.name!r}: quality: expected a finite number; found {quality!r}")
        if self._released:
            raise ValueError(f"save of {self.name!r}: expected a candidate that pins its ancestor; it was released")
        if self._repository is None or self._parts is None:
            return None
        with self._timed():
            tensors = self._parts.tensors()
            graph = self._parts.graph_with(tensors)
            return self._repository._submit(
                self.name,
                tensors,
                graph,
                recipe=recipe_of(self.model),
                parent=self.ancestor,
                inherit=self._unchanged(graph, tensors) or None,
                quality=float(quality),
                metadata=metadata,
                timeout=timeout,
                until="committed",
            ).committed()

    def release(self) -> None:
        """Unpin the ancestor. After this call, the candidate cannot be saved. A second call does nothing.

        Frozen layers stay excluded from training. However, the statistics of frozen torch modules, such as those of
        BatchNorm, can change again, because the modules are no longer kept in evaluation mode.
        """
        self._released = True
        self._taken = {}
        thaw, self._thaw = self._thaw, None
        if thaw is not None:
            thaw()
        match, self._match = self._match, None
        if match is not None:
            with self._timed():
                match.release(wait=False)

    def __enter__(self) -> Candidate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Candidate({self.name!r}, ancestor={self.ancestor}, {len(self.layers)} layers taken over)"

    # ---- within -----------------------------------------------------------------------------------------

    def _inherit(self, repository: Repository, parts: ModelParts) -> None:
        """Query, load and assign."""
        self._match = match = self._query(repository, parts)
        if match is None:
            return
        try:
            stored = repository.load(match.ref, layers=list(dict.fromkeys(match.layers.values())))
        except ModelLostError as exc:
            log.warning("%s inherits nothing: %s", self.name, exc)
            stored = {}
        layers, tensors = _fitting(match, parts.graph, stored, parts.first) if stored else ({}, {})
        if not tensors:
            self._match = None
            match.release(wait=False)
            return
        self._taken = {mine: stored[theirs] for mine, theirs in tensors.items()}
        parts.assign(self._taken)
        self.ancestor, self.layers = match.ref, layers

    def _query(self, repository: Repository, parts: ModelParts) -> PrefixMatch | None:
        """Look for the ancestor; while the catalog looks, get ready what comes after it."""
        return repository._prefixes.longest([parts.graph], meanwhile=parts.prepare)[0]

    def _to_freeze(self, graph: ModelGraph) -> set[str]:
        """Return the tensors that must not change: all that were taken over, but for a model that could not learn."""
        if self._taken.keys() < set(graph.tensors):
            return set(self._taken)
        followed: set[str] = set()
        outputs: set[str] = set()
        for layer in reversed(graph.layers):
            if layer.name not in followed:
                outputs.update(layer.tensors)
            if layer.tensors or layer.name in followed:
                followed.update(layer.inputs)
        return set(self._taken) - outputs

    def _unchanged(self, graph: ModelGraph, now: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Return the layers that were taken over and whose tensors are the ancestor's still, bit for bit."""
        same = {
            name
            for name, array in self._taken.items()
            if name in now and _kind(now[name]) == _kind(array) and same_bytes(now[name], array)
        }
        return {mine: its for mine, its in self.layers.items() if same.issuperset(graph.by_name[mine].tensors)}

    @contextmanager
    def _timed(self) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


def _fitting(
    match: PrefixMatch, graph: ModelGraph, stored: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the matching layers whose tensors fit the ancestor's, and these tensors: own name -> the ancestor's.

    Layers that follow one which does not fit are left out, too. So is a layer that shares a tensor with another one,
    where the ancestor's two layers do not share it.
    """
    ancestor = match._ancestor()
    fits: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, source in match.layers.items():
        layer = graph.by_name[name]
        pairs = dict(zip(layer.tensors, ancestor.by_name[source].tensors, strict=False))
        alike = len(layer.tensors) == len(ancestor.by_name[source].tensors) and all(
            _kind(own[mine]) == _kind(stored[theirs]) and taken.get(mine, theirs) == theirs
            for mine, theirs in pairs.items()
        )
        if alike and fits.keys() >= set(layer.inputs):
            fits[name] = source
            taken |= pairs
    return fits, taken


def _kind(array: np.ndarray) -> tuple[tuple[int, ...], str]:
    return array.shape, dtype_name(array.dtype)
