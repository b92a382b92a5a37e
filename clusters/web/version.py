"""One version: facts, layers, owners of its tensors, what it shares with which version, and who serves it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from ...actors.client.repository import Repository
from ...store.errors import ModelNotFoundError
from ...store.refs import ModelRef
from ..lineage.lineage import lineage_of

MOST_METADATA = 20_000
"""Characters of the metadata that a page shows."""
SHOWN = 60
"""Ancestors and descendants that are listed."""


def version(
    repository: Repository,
    ref: ModelRef,
    consumers: Sequence[Mapping[str, object]],
    trainings: Sequence[Mapping[str, object]],
    brief: bool,
) -> dict[str, object]:
    """Return what is known of a version.

    Args:
        repository: answers.
        ref: the version.
        consumers: those of `Now.snapshot`.
        trainings: those of `Now.snapshot`.
        brief: leave out metadata longer than `MOST_METADATA` characters.

    Raises:
        ModelNotFoundError: if the version does not exist or is retired.
    """
    info, graph = repository.info(ref), repository.graph(ref)
    owners, report = repository.owners(ref), lineage_of(repository, ref)
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
        "owners": dict(Counter(str(owner) for owner in owners.values()).most_common()),
        "ancestors": [_relative(one) for one in report.ancestors[:-1][-SHOWN:]],
        "descendants": [_relative(one) for one in report.descendants],
        "more_descendants": report.unfollowed,
        "consumers": [consumer for consumer in consumers if consumer.get("ref") == str(ref)],
        "training": next((one for one in trainings if one["model"] == ref.name), None),
    }


def _relative(one: object) -> dict[str, object]:
    names = ("ref", "live", "quality", "created", "bytes_owned", "tensors")
    return {name: getattr(one, name) for name in names}


def _is_latest(repository: Repository, ref: ModelRef) -> bool:
    try:
        return repository.info(ref.name).ref == ref
    except ModelNotFoundError:
        return False
