"""Facts about one version: layers, owners of its tensors, relatives that share tensors, and consumers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ...actors.client.repository import Repository
from ...store.errors import ModelNotFoundError
from ...store.refs import ModelRef
from .lineage import Forest

MOST_METADATA = 20_000
"""Characters of the metadata that a page shows."""
SHOWN = 40
"""Ancestors and descendants that are listed, each."""


def version(
    repository: Repository,
    forest: Forest,
    ref: ModelRef,
    consumers: Sequence[Mapping[str, object]],
    trainings: Sequence[Mapping[str, object]],
    brief: bool,
) -> dict[str, object]:
    """Return the facts about a version.

    Args:
        repository: answers.
        forest: all live versions.
        ref: the version.
        consumers: those of `Now.snapshot`.
        trainings: those of `Now.snapshot`.
        brief: leave out metadata longer than `MOST_METADATA` characters.

    Raises:
        ModelNotFoundError: if the version does not exist or is retired.
    """
    info, graph = repository.info(ref), repository.graph(ref)
    owners, line = repository.owners(ref), repository.lineage(ref)[1:]
    wrote = Counter(owners.values())
    below = list(_descendants(forest, ref))
    of_layers = {tensor for layer in graph.layers for tensor in layer.tensors}
    text = json.dumps(dict(info.metadata), indent=1)
    return {
        "ref": str(ref),
        "latest": _is_latest(repository, ref),
        "parent": str(info.parent) if info.parent else None,
        "quality": info.quality,
        "created": info.created.isoformat(),
        "bytes_owned": info.bytes_owned,
        "bytes_total": info.bytes_total,
        "codec": info.codec,
        "metadata": info.metadata if len(text) <= MOST_METADATA or not brief else None,
        "metadata_text": text[:MOST_METADATA],
        "metadata_chars": len(text),
        "layers": [
            {
                "name": layer.name,
                "config": layer.config,
                "inputs": layer.inputs,
                "tensors": {name: owners[name] for name in layer.tensors if name in owners},
            }
            for layer in graph.layers
        ],
        "other_tensors": {name: owner for name, owner in owners.items() if name not in of_layers},
        "owners": {str(owner): count for owner, count in wrote.most_common()},
        "ancestors": [_relative(forest, one, wrote[one]) for one in line[:SHOWN]],
        "more_ancestors": max(len(line) - SHOWN, 0),
        "descendants": [_relative(forest, one, _shared(repository, one, ref)) for one in below],
        "more_descendants": forest.families.get(ref, 0) - len(below),
        "consumers": [consumer for consumer in consumers if consumer.get("ref") == str(ref)],
        "training": next((one for one in trainings if one["model"] == ref.name), None),
    }


def _descendants(forest: Forest, ref: ModelRef) -> Iterator[ModelRef]:
    """Yield the nearest descendants, at most `SHOWN`."""
    found = list(forest.below(ref)[:SHOWN])
    for one in found:  # grows while it is read
        found.extend(forest.below(one)[: SHOWN - len(found)])
        yield one


def _shared(repository: Repository, descendant: ModelRef, ref: ModelRef) -> int | None:
    """Return the number of a descendant's tensors that a version wrote, or None if the descendant was just retired."""
    try:
        return sum(owner == ref for owner in repository.owners(descendant).values())
    except ModelNotFoundError:
        return None


def _relative(forest: Forest, ref: ModelRef, tensors: int | None) -> dict[str, object]:
    info = forest.infos.get(ref)
    return {
        "ref": str(ref),
        "live": info is not None,
        "quality": info.quality if info else None,
        "created": info.created.isoformat() if info else None,
        "bytes_owned": info.bytes_owned if info else None,
        "tensors": tensors,
    }


def _is_latest(repository: Repository, ref: ModelRef) -> bool:
    try:
        return repository.info(ref.name).ref == ref
    except ModelNotFoundError:
        return False
