"""Versions as files of other tools: `Repository.export` and `Repository.import_`.

Rules
- The file's facts carry what the format has no place for: the reference, architecture, quality and metadata. A file
  that came from elsewhere has none of these, and is saved without an architecture.
- Keras' own format is written and read by Keras, through the model that is built again from what was stored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...store.archive import interchange
from ...store.bounds import jsontext
from ...store.errors import CorruptDataError, GraphError
from ...store.graphs.graph import ModelGraph
from ...store.versions.manifest import ModelInfo

_FACT = "tensorvine."


def write(path: str | os.PathLike[str], info: ModelInfo, graph: ModelGraph, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a version's tensors, and its facts beside them."""
    facts = {
        f"{_FACT}ref": str(info.ref),
        f"{_FACT}graph": graph.to_json(),
        f"{_FACT}quality": json.dumps(info.quality),
        f"{_FACT}metadata": json.dumps(dict(info.metadata)),
    }
    layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
    interchange.write(path, tensors, layers=layers, facts=facts)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read tensors, and those of the arguments of `Repository.save` that the file's facts say.

    Raises:
        StorageError: the file cannot be read.
        CorruptDataError: it is damaged.
    """
    tensors, facts = interchange.read(path)
    as_save: dict[str, Any] = {}
    try:
        if f"{_FACT}graph" in facts:
            as_save["graph"] = ModelGraph.from_json(facts[f"{_FACT}graph"])
        for key in ("quality", "metadata"):
            if f"{_FACT}{key}" in facts:
                as_save[key] = jsontext.parsed(facts[f"{_FACT}{key}"], key)
    except (CorruptDataError, GraphError) as exc:
        raise CorruptDataError(f"{os.fspath(path)}: expected facts that export wrote; {exc}") from exc
    return tensors, as_save
