"""What somebody who may write below a repository's path could put there: in a file's place, or as a manifest."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from tensorvine.store.archive.segmentfile import METADATA_KEY

LINKS = ("link to /dev/zero", "link to /etc/passwd", "loop of links", "dangling link")
ENTRIES = ("FIFO", "socket", "folder", "device", *LINKS)


def place(path: Path, entry: str) -> str:
    """Make an entry, in the place of what stands there; gives what it is said to be."""
    if path.exists():
        path.unlink()
    if entry == "FIFO":
        os.mkfifo(path)
        return "a FIFO"
    if entry == "socket":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path must be short
        finally:
            os.close(folder)
        return "a socket"
    if entry == "folder":
        path.mkdir()
        return "a folder"
    if entry == "device":
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
        return "a device"
    path.symlink_to({"loop of links": path.name, "dangling link": "nowhere"}.get(entry, entry.removeprefix("link to ")))
    return "a symbolic link"


def _other_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["name", "layer"])


def _changed(column: str, value: Any, kind: pa.DataType | None = None) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Have a column say something else in all rows."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index(column)
        field = pa.field(column, kind or batch.schema.field(at).type)
        return batch.set_column(at, field, pa.array([value] * batch.num_rows, field.type))

    return change


FORGERIES: dict[str, tuple[dict[str, Any], Callable[[pa.RecordBatch], pa.RecordBatch] | None]] = {
    "other columns": ({}, _other_columns),
    "names that are numbers": ({}, _changed("name", 3, pa.int64())),
    "no names": ({}, _changed("name", None)),
    "one name twice": ({}, _changed("name", "w")),
    "slot -1": ({}, _changed("slot", -1)),
    "slot 2147483647": ({}, _changed("slot", (1 << 31) - 1)),
    "no slots": ({}, _changed("slot", None)),
    "length -1": ({}, _changed("nbytes", -1)),
    "lengths of no memory": ({}, _changed("nbytes", 1 << 62)),
    "a shape that is none": ({}, _changed("shape", [-1000])),
    "no shapes": ({}, _changed("shape", None)),
    "a dtype that is none": ({}, _changed("dtype", "object")),
    "a segment that is none": ({}, _changed("segment", "-1")),
    "an owner that is none": ({}, _changed("owner", "nobody")),
    "an owner that is younger": ({}, _changed("owner", "b@9")),
    "bases that come back": ({}, _changed("bases", ["7/0", "7/0"])),
    "a parent that is itself": ({"parent": "b@2"}, None),
    "a parent that is younger": ({"parent": "b@3"}, None),
    "a parent that is a number": ({"parent": 3}, None),
    "another version": ({"ref": "b@7"}, None),
    "another state": ({"state": ["live"]}, None),
    "a time that is a text": ({"created_ns": "now"}, None),
    "a quality that is a list": ({"quality": []}, None),
    "metadata that are none": ({"metadata": "]"}, None),
    "an architecture that is none": ({"architecture": "AAAA"}, None),
    "no graph key": ({"graph_key": None}, None),
    "another format": ({"format": 2}, None),
    "another kind": ({"kind": "segment"}, None),
}
"""Manifests with a checksum that fits: facts and columns that are changed."""


def forge(path: Path, forgery: str) -> None:
    """Change a manifest of two tensors, and its checksum with it."""
    facts, change = FORGERIES[forgery]
    batch = pa.ipc.open_file(path.read_bytes()).get_batch(0)
    said = {**json.loads(batch.schema.metadata[METADATA_KEY]), **facts, "checksum": "0" * 32}
    batch = change(batch) if change is not None else batch
    schema = batch.schema.with_metadata({METADATA_KEY: json.dumps(said)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(batch.columns, schema=schema))
    content = sink.getvalue().to_pybytes()
    checksum = xxhash.xxh3_128_hexdigest(content)
    path.write_bytes(content.replace(b'"checksum": "' + b"0" * 32, f'"checksum": "{checksum}'.encode(), 1))
