"""A reader of a repository's files, written from docs/reference/format.md: NumPy, PyArrow, json, zlib, zstandard.

Rules
- Nothing of TensorVine is imported. What the page does not say is not known here.
- What the page forbids is an AssertionError: this reader is for tests.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import xxhash
import zstandard

FORMAT = 1
BLOCK = 131_072
"""Elements of a block of `shuffle`."""
STAGES = ("quantize", "delta", "shuffle", "zstd", "gzip")


# ---- files ------------------------------------------------------------------------------------------------


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a manifest or a segment."""
    header = json.loads(pa.ipc.open_file(path).schema.metadata[b"tensorvine"])
    assert header["format"] == FORMAT
    return header


def manifest_path(folder: Path, name: str, version: int) -> Path:
    """Return where a version's manifest stands."""
    parts = [{"": "%", ".": "%2E"}.get(part, part) for part in name.split("/")]
    return folder / "manifests" / "/".join(parts[:-1]) / f"{parts[-1]}@{version}.arrow"


def segment_path(folder: Path, serial: str) -> Path:
    """Return the file of a segment: that of its highest generation."""
    generations = [int(path.name.split(".")[1]) for path in (folder / "segments").glob(f"{serial}.*.arrow")]
    return folder / "segments" / f"{serial}.{max(generations)}.arrow"


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor's stored bytes take."""
    return -(-nbytes // 64) * 64


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype, little-endian."""
    return np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")


def array_of(data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    """Return the array that bytes are."""
    return np.frombuffer(data, dtype_of(dtype)).reshape(shape)


class Reader:
    """Reads tensors of a version by position.

    Args:
        folder: the repository's path.
        name: the model's.
        version: its number.
    """

    def __init__(self, folder: Path, name: str, version: int) -> None:
        self.folder = folder
        path = manifest_path(folder, name, version)
        self.header = header_of(path)
        assert (self.header["kind"], self.header["ref"]) == ("manifest", f"{name}@{version}")
        self.rows = {row["name"]: row for row in pa.ipc.open_file(path).read_all().to_pylist()}

    def architecture(self) -> list[str | None]:
        """Return the graph's JSON text, and what rebuilds a Keras model."""
        return json.loads(zlib.decompress(base64.b64decode(self.header["architecture"])))

    def stored(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return a tensor's row, and its stored bytes."""
        wanted = self.rows[name]
        return self._stored(wanted["segment"], wanted["slot"])

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor."""
        wanted = self.rows[name]
        array, chain = self._tensor(wanted["segment"], wanted["slot"])
        assert (array.nbytes, list(array.shape)) == (wanted["nbytes"], wanted["shape"])
        assert chain == wanted["bases"]
        return array

    def _tensor(self, serial: str, slot: int) -> tuple[np.ndarray, list[str]]:
        """Return a tensor, and what it is encoded against."""
        row, data = self._stored(serial, slot)
        assert xxhash.xxh3_128_hexdigest(data) == row["checksum"]
        base: np.ndarray | None = None
        chain: list[str] = []
        if row["base"] is not None:
            of, _, place = row["base"].partition("/")
            base, chain = self._tensor(of, int(place))
            chain = [row["base"], *chain]
        array = decoded(data, row["codec"], row["dtype"], row["shape"], base)
        assert array.nbytes == row["nbytes"]
        assert row["digest"] in ("", xxhash.xxh3_128_hexdigest(array.tobytes()))
        return array, chain

    def _stored(self, serial: str, slot: int) -> tuple[dict[str, Any], bytes]:
        path = segment_path(self.folder, serial)
        header = header_of(path)
        assert (header["kind"], header["segment"]) == ("segment", serial)
        at = int(header["data_at"])
        assert (at % 64, header["data_at"]) == (0, f"{at:016d}")
        for row in pa.ipc.open_file(path).read_all().drop_columns(["data"]).to_pylist():
            if row["slot"] == slot:
                return row, path.read_bytes()[at : at + row["stored"]]
            at += padded(row["stored"])
        raise KeyError(slot)


# ---- codecs -----------------------------------------------------------------------------------------------


def decoded(data: bytes, codec: str, dtype: str, shape: list[int], base: np.ndarray | None = None) -> np.ndarray:
    """Undo a codec.

    Args:
        data: the stored bytes.
        codec: as in the column of that name.
        dtype: of the tensor.
        shape: of the tensor.
        base: the tensor that this one is encoded against, if `codec` names a delta.
    """
    head, data = unpacked(data, codec, dtype)
    if head.startswith("quantize"):
        bits, per = head[len("quantize(") : -1].split(",")
        return _dequantised(data, int(bits), per, dtype, shape)
    if head:
        assert base is not None
        data = _with_delta(data, base.tobytes(), dtype_of(dtype).itemsize)
    return array_of(data, dtype, shape)


def unpacked(data: bytes, codec: str, dtype: str) -> tuple[str, bytes]:
    """Undo all stages but one that looks at the tensor; return that one, or an empty text, and what it made."""
    stages = codec.split("|") if codec else []
    head = stages.pop(0) if stages and stages[0].partition("(")[0] in ("quantize", "delta") else ""
    size = dtype_of(dtype).itemsize
    if head.startswith("quantize"):
        size = 2 if head.startswith("quantize(16,") else 1
    sizes: list[int] = []
    for stage in stages:
        sizes.append(size)
        size = size if stage == "shuffle" else 1
    for stage, itemsize in zip(reversed(stages), reversed(sizes), strict=True):
        data = _undone(stage.partition("(")[0], data, itemsize)
    return head, data


def _undone(name: str, data: bytes, itemsize: int) -> bytes:
    if name == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return gzip.decompress(data) if name == "gzip" else _unshuffled(data, itemsize)


def _unshuffled(data: bytes, itemsize: int) -> bytes:
    out: list[bytes] = []
    for start in range(0, len(data), BLOCK * itemsize):
        block = data[start : start + BLOCK * itemsize]
        count = len(block) // itemsize
        planes = np.frombuffer(block[: count * itemsize], np.uint8).reshape(itemsize, count)
        out += [planes.T.tobytes(), block[count * itemsize :]]
    return b"".join(out)


def _with_delta(data: bytes, base: bytes, itemsize: int) -> bytes:
    if len(data) == len(base):
        return (np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)).tobytes()
    words = np.frombuffer(base, f"<u{min(itemsize, 8)}").copy()
    count, width = int.from_bytes(data[-9:-1], "little"), data[-1]
    values = np.frombuffer(data[: count * words.itemsize], words.dtype)
    where = data[count * words.itemsize : -9]
    if width:
        assert len(where) == count * width
        places = np.cumsum(np.frombuffer(where, f"<u{width}").astype(np.int64) + 1) - 1
    else:
        places = np.flatnonzero(np.unpackbits(np.frombuffer(where, np.uint8), bitorder="little")[: len(words)])
    assert len(places) == count
    words[places] ^= values
    return words.tobytes()


def _dequantised(data: bytes, bits: int, per: str, dtype: str, shape: list[int]) -> np.ndarray:
    count = math.prod(shape)
    group = _groups(count, per, shape)
    groups = int(group.max()) + 1
    low, wide = data[-1], np.dtype("<f8" if dtype == "float64" else "<f4")
    numbers = np.frombuffer(data[-1 - 2 * groups * wide.itemsize : -1], wide).astype(np.float64)
    minimum, scale = numbers[:groups][group], numbers[groups:][group]
    codes, at = np.zeros(count, np.int64), 0
    if low < bits:
        codes += np.frombuffer(data[:count], np.uint8).astype(np.int64) << low
        at = count
    packed = np.frombuffer(data[at : at + -(-count * low // 8)], np.uint8)
    if low:
        single = np.unpackbits(packed, bitorder="little", count=count * low).reshape(count, low)
        codes += single.astype(np.int64) @ (1 << np.arange(low))
    assert len(data) == at + len(packed) + 2 * groups * wide.itemsize + 1
    return (minimum + codes * scale).astype(wide).astype(dtype_of(dtype)).reshape(shape)


def _groups(count: int, per: str, shape: list[int]) -> np.ndarray:
    """Return, for each element, the number of its group."""
    if per == "channel" and len(shape) > 1:
        return np.arange(count) % shape[-1]
    return np.arange(count) // int(per) if per.isdigit() else np.zeros(count, np.int64)
