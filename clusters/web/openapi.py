"""The description of the JSON twins, as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

Shape = Mapping[str, object]
"""Key -> "text", "number", "integer", "boolean" or "map", with "?" if it may be null; a shape; or a list of one."""

_TYPES = {"text": "string", "number": "number", "integer": "integer", "boolean": "boolean", "map": "object"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the API."""

    path: str
    summary: str
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the query, or of a change's body -> their meaning. Names that end with "?" are optional."""
    answer: Shape = field(default_factory=dict[str, object])
    method: Literal["GET", "POST"] = "GET"


_VERSION: Shape = {
    "ref": "text",
    "parent": "text?",
    "quality": "number?",
    "created": "text",
    "bytes_owned": "integer",
    "bytes_total": "integer",
}
_TRAINING: Shape = {
    "model": "text",
    "iteration": "integer",
    "losses": [["number"]],
    "curve": "map?",
    "planned": ["integer"],
    "published": ["integer"],
    "costs": "map?",
    "why": "text",
}
_RELATIVE: Shape = {
    "ref": "text",
    "live": "boolean",
    "quality": "number?",
    "created": "text?",
    "bytes_owned": "integer?",
    "tensors": "integer?",
}
_NOW: Shape = {
    "repository": "text",
    "time": "text",
    "state": "text",
    "trouble": "text",
    "totals": "map",
    "shards": [{"shard": "integer", "node": "text", "answers": "boolean", "trouble": "text"}],
    "nodes": [{"address": "text", "id": "text", "cpus": "number", "gpus": "number", "shards": ["integer"]}],
    "trainings": [_TRAINING],
    "consumers": [{"consumer": "text", "model": "text", "trouble": "text"}],
    "traffic": [{"transport": "text", "deliveries": "integer", "bytes": "integer"}],
    "runs": [{"run": "text", "ranks": "integer"}],
    "newest": [_VERSION],
    "missing": "map",
}
_TENSOR: Shape = {"a": "text?", "b": "text?", "state": "text", "dtypes": ["text"], "shapes": [["integer"]]}
_A_VERSION = "version, as NAME@VERSION, or NAME for the latest one"
OPERATIONS = (
    Operation("/api/now", "The current state. With state 'away', only the first four keys exist.", {}, _NOW),
    Operation("/api/events", "Server-sent events 'now', each with the answer of /api/now as data."),
    Operation(
        "/api/compare",
        "Two versions: layers matched by the longest common prefix, and what became of each tensor.",
        {"a": _A_VERSION, "b": _A_VERSION},
        {
            "a": "text",
            "b": "text",
            "summary": {"layers": "map", "tensors": "map", "bytes": "map"},
            "layers": [{"match": "text", "a": "text?", "b": "text?", "class": "text", "tensors": [_TENSOR]}],
        },
    ),
    Operation(
        "/api/version",
        "One version. Metadata that is long is left out with brief=1.",
        {"ref": _A_VERSION, "brief?": "1 to leave out long metadata"},
        {
            **_VERSION,
            "latest": "boolean",
            "codec": "text?",
            "metadata": "map?",
            "metadata_text": "text",
            "metadata_chars": "integer",
            "layers": [{"name": "text", "config": "map", "inputs": ["text"], "tensors": "map"}],
            "other_tensors": "map",
            "owners": "map",
            "ancestors": [_RELATIVE],
            "more_ancestors": "integer",
            "descendants": [_RELATIVE],
            "more_descendants": "integer",
            "consumers": ["map"],
            "training": "map?",
        },
    ),
    Operation(
        "/api/versions",
        "Versions whose references contain all words, newest first.",
        {"q?": "words", "parent?": "only children of this version", "limit?": "of the answer, at most 1,000"},
        {"versions": [_VERSION], "count": "integer"},
    ),
    Operation(
        "/api/lineage",
        "A window of the graph of versions, with like ones folded.",
        {"ref?": _A_VERSION, "open?": "id of a fold to show in full; may be repeated"},
        {"focus": "text?", "count": "integer", "nodes": [{"id": "text", "kind": "text", "parent": "text?"}]},
    ),
    Operation(
        "/api/changes",
        "Whether changes are allowed, and the effects of a retirement.",
        {"ref?": _A_VERSION},
        {"allowed": "boolean", "shards": ["integer"], "retire": "map?"},
    ),
    Operation(
        "/api/retire",
        "Retire a version.",
        {"ref": "version, as NAME@VERSION", "confirm": "the same text"},
        {"retired": "text"},
        "POST",
    ),
    Operation(
        "/api/scale",
        "Change the number of shards.",
        {"shards": "the new number", "confirm": "'scale from OLD to NEW'"},
        {"shards_before": "integer", "shards_after": "integer", "seconds": "number"},
        "POST",
    ),
)


def described(version: str, operations: Sequence[Operation] = OPERATIONS) -> dict[str, object]:
    """Return the document.

    >>> described("1.0")["paths"]["/api/now"]["get"]["summary"].partition(".")[0]
    'The current state'
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "TensorVine",
            "version": version,
            "description": "NaN and infinity are the strings 'NaN', 'Infinity' and '-Infinity', and integers above "
            "2**53 are strings. Errors are objects with the key 'error'.",
        },
        "security": [{"token": []}, {"cookie": []}],
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "tensorvine-PORT"},
            }
        },
        "paths": {one.path: {one.method.lower(): _operation(one)} for one in operations},
    }


def _operation(one: Operation) -> dict[str, object]:
    names = {name.rstrip("?"): (text, not name.endswith("?")) for name, text in one.parameters.items()}
    kind = "text/event-stream" if one.path == "/api/events" else "application/json"
    made: dict[str, object] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {"schema": schema(one.answer)}}},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": schema({"error": "text"})}},
            },
        },
    }
    if one.method == "GET":
        made["parameters"] = [
            {"name": name, "in": "query", "required": needed, "description": text, "schema": {"type": "string"}}
            for name, (text, needed) in names.items()
        ]
    else:
        properties = {name: {"description": text} for name, (text, _) in names.items()}
        body = {"type": "object", "properties": properties, "required": list(names)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def schema(shape: object) -> dict[str, object]:
    """Return the JSON schema of a shape.

    >>> schema({"a": ["number?"]})["properties"]["a"]["items"]
    {'type': ['number', 'string', 'null']}
    """
    if isinstance(shape, str):
        known = _TYPES[shape.rstrip("?")]
        types = [known, *(["string"] if known in ("number", "integer") else []), *(["null"] if "?" in shape else [])]
        return {"type": types if len(types) > 1 else known}
    if isinstance(shape, list):
        return {"type": "array", "items": schema(cast("list[object]", shape)[0])}
    known_keys = cast("Shape", shape)
    if not known_keys:
        return {}
    return {"type": "object", "properties": {key: schema(value) for key, value in known_keys.items()}}
