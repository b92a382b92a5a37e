"""Versions as files of other tools: `Repository.export` and `Repository.import_`.

Rules
- The file's facts carry what the format has no place for: the reference, architecture, quality and metadata. A file
  that came from elsewhere has none of these, and is saved without an architecture.
- Keras' own format is written and read by Keras, through the model that is built again from what was stored.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from ..store import interchange
from ..store.errors import CorruptDataError, GraphError
from ..store.graph import ModelGraph
from .save_request import Saved

if TYPE_CHECKING:
    from .repository import Model, Repository

_FACT = "tensorvine."


def export(repository: Repository, model: Model, path: str | os.PathLike[str]) -> None:
    """See `Repository.export`."""
    if interchange.format_of(path) == "keras":
        try:
            built = repository.load_model(model)
        except GraphError as exc:
            raise GraphError(f"export of {model} to {os.fspath(path)}: expected a Keras model; {exc}") from exc
        interchange.write_keras(path, built)
        return
    info = repository.info(model)
    graph = repository.graph(info.ref)
    facts = {
        f"{_FACT}ref": str(info.ref),
        f"{_FACT}graph": graph.to_json(),
        f"{_FACT}quality": json.dumps(info.quality),
        f"{_FACT}metadata": json.dumps(dict(info.metadata)),
    }
    layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
    interchange.write(path, repository.load(info.ref), layers=layers, facts=facts)


def import_(repository: Repository, path: str | os.PathLike[str], name: str, **as_save: Any) -> Saved:
    """See `Repository.import_`."""
    tensors, facts = interchange.read(path)
    try:
        if f"{_FACT}graph" in facts:
            as_save.setdefault("graph", ModelGraph.from_json(facts[f"{_FACT}graph"]))
        for key in ("quality", "metadata"):
            if f"{_FACT}{key}" in facts:
                as_save.setdefault(key, json.loads(facts[f"{_FACT}{key}"]))
    except (GraphError, ValueError) as exc:
        raise CorruptDataError(f"{os.fspath(path)}: expected facts that export wrote; {exc}") from exc
    return repository.save(name, tensors, **as_save)
