"""What is known of a version's origin: who it derives from, what each of them wrote of it, and what derives from it.

Rules
- A report is plain data that was asked for once; how it looks is decided elsewhere (`tree`, `picture`).
- A retired version is named as long as a descendant lives. Its time went with it; its quality stays, for
  as long as the process of its home lives or the path has it.
- Who wrote which tensor is the owner map's word (EvoStore, section 4.1), so a grandparent may have written more of a
  version than its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from ...store import html
from ...store.errors import ModelNotFoundError
from ...store.facts import Json
from ...store.graphs.graph import ModelGraph
from ...store.refs import Model, ModelRef
from ...store.versions.manifest import ModelInfo
from .. import words

MOST_DESCENDANTS = 60
"""How many a report follows; others are counted only."""
HTML_WIDTH = 60
"""Characters for the names of layers in a notebook."""
SHORTEST_GAP = 3
"""As many ancestors in a row that wrote nothing of a version are told as one."""


class Answers(Protocol):
    """What a report asks a repository; `actors.Repository` answers it."""

    def info(self, model: Model) -> ModelInfo:
        """Return what is known of a version."""
        ...

    def graph(self, model: Model) -> ModelGraph:
        """Return a version's architecture."""
        ...

    def owners(self, model: Model) -> dict[str, ModelRef]:
        """Return who wrote each tensor."""
        ...

    def lineage(self, model: Model) -> list[ModelRef]:
        """Return a version and its ancestors, root last."""
        ...

    def descendants(self, model: Model) -> list[ModelRef]:
        """Return all live versions that derive from a version."""
        ...

    def qualities(self, refs: Iterable[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities of versions, retired ones too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """A version in a `Lineage` report: the reported version itself, one of its ancestors, or one of its descendants."""

    ref: ModelRef
    """Reference of this version."""
    parent: ModelRef | None
    """Parent of this version. None if this version has no parent."""
    live: bool
    """Whether this version is live. For a retired version, `created`, `bytes_owned` and `bytes_total` are None."""
    quality: float | None
    """Quality of this version.

    None if this version was saved without a quality, or if this version is retired and its quality was lost (see
    `Repository.qualities`).
    """
    created: datetime | None
    """Time of the save, in UTC. None if this version is retired."""
    bytes_owned: int | None
    """Bytes of the tensors that were written by the save of this version. None if this version is retired."""
    bytes_total: int | None
    """Bytes of all tensors of this version. None if this version is retired."""
    layers: tuple[str, ...] = ()
    """Names of layers, in order from input to output. If a tensor belongs to no layer, the tensor's name is listed.

    For an ancestor: the layers of the reported version that contain tensors written by the ancestor. For the reported
    version: its layers that contain tensors written by its own save. For a live descendant: the layers of the
    descendant that contain tensors written by the reported version. Empty for a retired descendant.
    """
    tensors: int = 0
    """For an ancestor: the number of tensors of the reported version that were written by the ancestor.

    For the reported version: the number of tensors written by its own save. For a live descendant: the number of
    tensors of the descendant that were written by the reported version. 0 for a retired descendant.
    """


@dataclass(frozen=True, slots=True)
class Gap:
    """Ancestors in a row that wrote nothing of the version."""

    refs: tuple[ModelRef, ...]
    """Older first."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A report on the ancestors and descendants of one version, called the reported version.

    >>> a, b = ModelRef("a", 1), ModelRef("b", 1)
    >>> unknown = dict(created=None, bytes_owned=None, bytes_total=None)
    >>> root = Relative(ref=a, parent=None, live=False, quality=None, layers=("stem",), tensors=2, **unknown)
    >>> child = Relative(ref=b, parent=a, live=True, quality=0.9, layers=("head",), tensors=1, **unknown)
    >>> lineage = Lineage(b, (root, child), (), {"stem": a, "head": b}, 3)
    >>> lineage.steps() == [root, child], lineage.children(b)
    (True, [])
    """

    ref: ModelRef
    """Reference of the reported version."""
    ancestors: tuple[Relative, ...]
    """All ancestors of the reported version, starting with the root, followed by the reported version itself."""
    descendants: tuple[Relative, ...]
    """The nearest live descendants (at most 60), and the retired versions between them and the reported version.

    Parents precede their children.
    """
    writers: Mapping[str, ModelRef] = field(default_factory=dict[str, ModelRef])
    """Mapping of the reported version's layer names to the version that wrote the most tensors of the layer.

    The layers are in order from input to output. Layers without tensors are left out. If a tensor belongs to no layer,
    the name of the tensor is a key.
    """
    tensors: int = 0
    """Number of tensors of the reported version."""
    unfollowed: int = 0
    """Number of live descendants that are not in `descendants`."""

    def _repr_html_(self) -> str:
        columns = ("", "version", "parent", "quality", "tensors", "layers")
        rows: list[tuple[object, ...]] = []
        for role, relatives in (("ancestor", self.ancestors), ("descendant", self.descendants)):
            for one in relatives:
                kind = "itself" if one.ref == self.ref else role if one.live else f"{role}, retired"
                layers = words.listed(one.layers, HTML_WIDTH)
                rows.append((kind, one.ref, one.parent, words.quality(one.quality), one.tensors, layers))
        return html.table(f"Lineage of {self.ref}, {self.tensors:,} tensors", columns, rows)

    @property
    def model(self) -> Relative:
        """The reported version: the last entry of `ancestors`."""
        return self.ancestors[-1]

    @property
    def contributors(self) -> list[Relative]:
        """The versions in `ancestors` that wrote tensors of the reported version, in the order of `ancestors`."""
        return [relative for relative in self.ancestors if relative.tensors]

    def steps(self) -> list[Relative | Gap]:
        """Return a shortened form of `ancestors`, from the root to the reported version.

        Three or more consecutive ancestors that wrote no tensors of the reported version are combined into one `Gap`.
        The root is never part of a `Gap`.
        """
        steps: list[Relative | Gap] = []
        idle: list[Relative] = []
        for relative in self.ancestors:
            if relative.tensors or relative.ref == self.ref or not steps:
                steps += _shortened(idle)
                idle = []
                steps.append(relative)
            else:
                idle.append(relative)
        return steps

    def children(self, ref: ModelRef) -> list[Relative]:
        """Return the versions in `descendants` whose parent is `ref`."""
        return [relative for relative in self.descendants if relative.parent == ref]

    def as_dict(self) -> dict[str, Json]:
        """Return the report as a dictionary that can be written as JSON."""
        return {
            "model": str(self.ref),
            "tensors": self.tensors,
            "ancestors": [_relative_dict(relative) for relative in self.ancestors],
            "descendants": [_relative_dict(relative) for relative in self.descendants],
            "unfollowed": self.unfollowed,
            "layers": {layer: str(ref) for layer, ref in self.writers.items()},
        }


def lineage_of(repository: Answers, model: Model) -> Lineage:
    """Return a report on the ancestors and descendants of a version (EvoStore, section 4.1).

    Args:
        repository: A connected `Repository`.
        model: A live version, as a `ModelRef`, `"name@3"`, or `"name"` for the latest live version.

    Returns:
        A report with all ancestors, the nearest live descendants (at most 60), and the retired versions between the
        reported version and these descendants.

    Raises:
        ModelNotFoundError: if the version does not exist or is retired.
    """
    chain = repository.lineage(model)
    ref = chain[0]
    owners, layer_of = repository.owners(ref), _layers_by_tensor(repository.graph(ref))
    wrote = _by_writer(owners, layer_of)
    parents = dict(zip(chain, [*chain[1:], None], strict=True))
    ancestors = [_relative(repository, one, parents[one], *wrote.get(one, ((), 0))) for one in reversed(chain)]
    descendants, unfollowed = _descendants(repository, ref)
    known = repository.qualities(one.ref for one in (*ancestors, *descendants) if not one.live)
    return Lineage(
        ref,
        tuple(_remembered(relative, known) for relative in ancestors),
        tuple(_remembered(relative, known) for relative in descendants),
        _writers(owners, layer_of),
        len(owners),
        unfollowed,
    )


def _descendants(repository: Answers, ref: ModelRef) -> tuple[list[Relative], int]:
    """Follow the nearest live descendants up to `ref`, through whoever retired on the way."""
    lines: list[list[ModelRef]] = []
    for descendant in repository.descendants(ref):
        try:
            line = repository.lineage(descendant)
        except ModelNotFoundError:  # retired just now
            continue
        lines.append(line[: line.index(ref)])
    lines.sort(key=len)
    parents: dict[ModelRef, ModelRef] = {}
    for line in lines[:MOST_DESCENDANTS]:
        above = ref
        for one in reversed(line):
            parents.setdefault(one, above)
            above = one
    found: list[Relative] = []
    for one, parent in parents.items():
        try:
            layers, tensors = _by_writer(repository.owners(one), _layers_by_tensor(repository.graph(one))).get(
                ref, ((), 0)
            )
        except ModelNotFoundError:
            layers, tensors = (), 0
        found.append(_relative(repository, one, parent, layers, tensors))
    return found, max(len(lines) - MOST_DESCENDANTS, 0)


def _relative(
    repository: Answers, ref: ModelRef, parent: ModelRef | None, layers: tuple[str, ...], tensors: int
) -> Relative:
    try:
        info = repository.info(ref)
    except ModelNotFoundError:
        return Relative(
            ref=ref,
            parent=parent,
            live=False,
            quality=None,
            created=None,
            bytes_owned=None,
            bytes_total=None,
            layers=layers,
            tensors=tensors,
        )
    return Relative(
        ref=ref,
        parent=parent,
        live=True,
        quality=info.quality,
        created=info.created,
        bytes_owned=info.bytes_owned,
        bytes_total=info.bytes_total,
        layers=layers,
        tensors=tensors,
    )


def _remembered(relative: Relative, known: Mapping[ModelRef, float]) -> Relative:
    return relative if relative.live else replace(relative, quality=known.get(relative.ref))


def _layers_by_tensor(graph: ModelGraph) -> dict[str, str]:
    return {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}


def _in_order(owners: Iterable[str], layer_of: Mapping[str, str]) -> list[str]:
    """Return tensors in the order of the graph; those of no layer come last."""
    places = {tensor: place for place, tensor in enumerate(layer_of)}
    return sorted(owners, key=lambda tensor: (places.get(tensor, len(places)), tensor))


def _by_writer(
    owners: Mapping[str, ModelRef], layer_of: Mapping[str, str]
) -> dict[ModelRef, tuple[tuple[str, ...], int]]:
    """Give, for each writer, the layers that it wrote in and how many tensors; a tensor of no layer is its own."""
    layers: dict[ModelRef, dict[str, None]] = {}
    counts: dict[ModelRef, int] = {}
    for tensor in _in_order(owners, layer_of):
        writer = owners[tensor]
        layers.setdefault(writer, {})[layer_of.get(tensor, tensor)] = None
        counts[writer] = counts.get(writer, 0) + 1
    return {writer: (tuple(layers[writer]), counts[writer]) for writer in counts}


def _writers(owners: Mapping[str, ModelRef], layer_of: Mapping[str, str]) -> dict[str, ModelRef]:
    counts: dict[str, dict[ModelRef, int]] = {}
    for tensor in _in_order(owners, layer_of):
        by = counts.setdefault(layer_of.get(tensor, tensor), {})
        by[owners[tensor]] = by.get(owners[tensor], 0) + 1
    return {layer: max(by, key=lambda ref: by[ref]) for layer, by in counts.items()}


def _shortened(idle: Sequence[Relative]) -> list[Relative | Gap]:
    if len(idle) < SHORTEST_GAP:
        return list(idle)
    return [Gap(tuple(relative.ref for relative in idle))]


def _relative_dict(relative: Relative) -> dict[str, Json]:
    return {
        "ref": str(relative.ref),
        "parent": str(relative.parent) if relative.parent else None,
        "live": relative.live,
        "quality": relative.quality,
        "created": relative.created.isoformat() if relative.created else None,
        "bytes_owned": relative.bytes_owned,
        "bytes_total": relative.bytes_total,
        "layers": list(relative.layers),
        "tensors": relative.tensors,
    }
