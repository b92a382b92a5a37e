"""Versions as files of other tools: `Repository.export` and `Repository.import_`.

Rules
- The file's facts carry what the format has no place for: the reference, architecture, quality and metadata. A file
  that came from elsewhere has none of these, and is saved without an architecture.
- What a file from elsewhere says about itself is the version's metadata. What of a version's metadata is text stands in
  a file by its own name too: there other tools look for it, and what they change counts.
- A safetensors file says `"format": "pt"`, where the metadata does not say another one: transformers refuses others.
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
from ...store.errors import CorruptDataError, GraphError, TensorMismatchError
from ...store.graphs.graph import ModelGraph
from ...store.versions.manifest import ModelInfo
from .save.request import Said, quality_of

_REF, _GRAPH, _QUALITY, _METADATA = _OURS = (
    "tensorvine.ref",
    "tensorvine.graph",
    "tensorvine.quality",
    "tensorvine.metadata",
)

_FORMAT = {"format": "pt"}
_PANDAS = "pandas"
"""What pandas says in an Arrow file is about the columns of that file, and wrong of those that are written. A version's
metadata of that name stands in our own alone: pandas reads no file that says something else there."""


def write(path: str | os.PathLike[str], info: ModelInfo, graph: ModelGraph, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a version's tensors, and its facts beside them."""
    facts, texts = dict[str, str](), _texts_of(info.metadata)
    if interchange.format_of(path) == "safetensors":
        facts |= _FORMAT
    else:
        texts.pop(_PANDAS, None)
    facts |= texts
    facts |= {
        _REF: str(info.ref),
        _GRAPH: graph.to_json(),
        _QUALITY: json.dumps(info.quality),
        _METADATA: json.dumps(dict(info.metadata)),
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
        if _GRAPH in facts:
            as_save["graph"] = ModelGraph.from_json(facts[_GRAPH])
        if _QUALITY in facts:
            as_save["quality"] = quality_of(jsontext.parsed(facts[_QUALITY], _QUALITY), _QUALITY)
        metadata = _metadata_of(facts)
        if metadata or _METADATA in facts:
            as_save["metadata"] = Said(metadata)
    except (CorruptDataError, GraphError, TensorMismatchError) as exc:
        raise CorruptDataError(f"{interchange.shown(path)}: expected metadata written by export; {exc}") from exc
    return tensors, as_save


def _texts_of(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return what of a version's metadata can stand in a file by its own name."""
    return {
        key: value
        for key, value in metadata.items()
        if isinstance(value, str) and key not in _OURS and _is_utf8(key) and _is_utf8(value)
    }


def _metadata_of(facts: Mapping[str, str]) -> dict[str, object]:
    """Return the metadata of a file: what it was exported with, and what it says by other names."""
    said = {key: value for key, value in facts.items() if key not in (*_OURS, _PANDAS)}
    if _METADATA not in facts:
        return dict[str, object](said)
    stored = jsontext.mapping(facts[_METADATA], _METADATA)
    ours = _FORMAT.items()
    return {**stored, **{key: value for key, value in said.items() if key in stored or (key, value) not in ours}}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
