"""Targets: files of other tools, as an import reads them.

Rules
- Files are read from a folder in memory, by `interchange.read`: the suffix says what they are.
- Arrow files come as other tools write them, too: with dictionaries, compression, other types, several batches.
- HDF5 files come by both of its layouts; a later one has checksums, which are computed anew. The process that reads
  such a file is a fork here, which starts in milliseconds, and has a second of the processor.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import IO, Any
from unittest import mock

import h5py
import numpy as np
import pyarrow as pa
from tensorvine.store.archive import arrowfile, hdf5child, hdf5file, interchange, safetensorsfile
from tensorvine.store.arrays import as_bytes

from tests.fuzz.mutations import evil_number, evil_text, of_bytes, of_json
from tests.fuzz.stored import arrays
from tests.fuzz.target import Read, Target

MASK = 0xFFFFFFFF
FACTS = {"ref": "m@1", "metadata.epoch": "3"}


def reading(suffix: str) -> Callable[[Path], Any]:
    """Read files of this suffix."""

    @contextmanager
    def open_reader(folder: Path) -> Iterator[Read]:
        path = folder / f"imported{suffix}"

        def read(content: bytes) -> object:
            path.write_bytes(content)
            return interchange.read(path)

        yield read

    return open_reader


def _filled(fill: Callable[[Any], object]) -> bytes:
    sink = io.BytesIO()
    fill(sink)
    return sink.getvalue()


# ---- Arrow --------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table() -> Any:
    sink = pa.BufferOutputStream()
    arrowfile.filler(_small(), {"half": "layer"}, FACTS)(sink)
    return pa.ipc.open_file(sink.getvalue()).read_all()


def _small() -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays().items() if array.nbytes < 2000}


def _arrow_files(folder: Path) -> list[bytes]:
    table = _table()
    wide = table.set_column(0, "name", table["name"].cast(pa.large_utf8())).append_column("more", table["nbytes"])
    dictionaries = table
    for column in ("dtype", "checksum", "name"):
        place = dictionaries.schema.get_field_index(column)
        dictionaries = dictionaries.set_column(place, column, dictionaries[column].dictionary_encode())
    compressed = [pa.ipc.IpcWriteOptions(compression=name) for name in ("lz4", "zstd")]
    return [
        _arrow(table),
        _arrow(wide, rows=2),
        _arrow(dictionaries),
        *(_arrow(table, options=options) for options in compressed),
        _arrow(dictionaries, rows=3, options=compressed[0]),
        _arrow(table.slice(0, 0)),
    ]


def _arrow(table: Any, rows: int | None = None, options: Any = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def _damaged_arrow(dice: Random, valid: Sequence[bytes]) -> bytes:
    if dice.random() < 0.8:
        return of_bytes(dice, dice.choice(valid), valid)
    table = _table()
    name = dice.choice(table.schema.names)
    values = table[name].to_pylist()
    values[dice.randrange(len(values))] = _other_value(dice, values[0])
    try:
        place = table.schema.get_field_index(name)
        return _arrow(table.set_column(place, name, pa.array(values, table.schema.field(name).type)))
    except (pa.ArrowException, OverflowError, TypeError, ValueError):  # no Arrow file can say so
        return of_bytes(dice, dice.choice(valid), valid)


def _other_value(dice: Random, value: object) -> object:
    if isinstance(value, str):
        return dice.choice((None, evil_text(dice, value), "object", "V8", "int4"))
    if isinstance(value, list):
        return dice.choice((None, [], [evil_number(dice)], [None], [-1, -1], [1] * 70, [0, 1 << 62]))
    return dice.choice((None, evil_number(dice)))


# ---- safetensors --------------------------------------------------------------------------------------


def _safetensors(folder: Path) -> list[bytes]:
    return [
        _filled(safetensorsfile.filler(Path("x"), each, facts))
        for each, facts in ((_small(), FACTS), ({}, {}), ({"a": np.ones(3, np.int8)}, {}))
    ]


def _damaged_safetensors(dice: Random, valid: Sequence[bytes]) -> bytes:
    content = dice.choice(valid)
    if dice.random() < 0.5:
        return of_bytes(dice, content, valid)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(of_json(dice, header)).encode()
    if dice.random() < 0.2:  # two rows of one name
        text = text[:-1] + b"," + json.dumps(header).encode()[1:]
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


# ---- HDF5 ---------------------------------------------------------------------------------------------


@contextmanager
def forked() -> Iterator[None]:
    """Have `hdf5file` fork its process in the place of starting it."""
    with mock.patch.object(hdf5file.subprocess, "run", _run), mock.patch.object(hdf5file, "_CPU_S", 0):
        yield


def _run(command: Sequence[str], *, stdin: IO[bytes], stdout: int, **_: object) -> subprocess.CompletedProcess[bytes]:
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            for descriptor, place in ((stdin.fileno(), 0), (stdout, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
                os.dup2(descriptor, place)
            hdf5child.main(command[-3], int(command[-2]), int(command[-1]))
            code = 0
        os._exit(code)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@contextmanager
def _hdf5_reading(folder: Path) -> Iterator[Read]:
    with forked(), reading(".weights.h5")(folder) as read:
        yield read


def _hdf5_files(folder: Path) -> list[bytes]:
    return [_hdf5("earliest", more=False), _hdf5("earliest", more=True), _hdf5("latest", more=False)]


def _hdf5(libver: str, more: bool) -> bytes:
    """Write a file as Keras does; with more, also what other tools put there."""
    sink = io.BytesIO()
    with h5py.File(sink, "w", libver=libver) as file:
        file.attrs["keras_version"] = "3.15"
        for index, array in enumerate(_small().values()):
            group = file.create_group(f"layers/dense_{index}/vars")
            if array.dtype == "bfloat16":
                dataset = group.create_dataset("0", data=as_bytes(array).view("V2").reshape(array.shape))
                dataset.attrs["dtype"] = "bfloat16"
            else:
                group["0"] = array
        if more:
            even = np.arange(400, dtype=np.float32).reshape(20, 20)
            file.create_dataset("chunked", data=even, chunks=(7, 9))
            file.create_dataset("packed", data=even, chunks=(10, 10), compression="gzip", shuffle=True, fletcher32=True)
            file.create_dataset("growing", data=even[0], chunks=(5,), maxshape=(None,))
            file["again"] = file["chunked"]
    return sink.getvalue()


def _damaged_hdf5(dice: Random, valid: Sequence[bytes]) -> bytes:
    content = dice.choice(valid)
    found = of_bytes(dice, content, valid)
    return resealed(found) if dice.random() < 0.7 else found


def resealed(content: bytes) -> bytes:
    """Compute the checksums of an HDF5 file's later layout anew: of its superblock and its object headers."""
    found = bytearray(content)
    if found[:9] == b"\x89HDF\r\n\x1a\n\x02" or found[:9] == b"\x89HDF\r\n\x1a\n\x03":
        _seal(found, 0, 44)
    at = found.find(b"OHDR")
    while at >= 0:
        flags = found[at + 5] if at + 5 < len(found) else 0
        start = at + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = int.from_bytes(found[start : start + width], "little")
        _seal(found, at, start + width + size)
        at = found.find(b"OHDR", at + 4)
    return bytes(found)


def _seal(content: bytearray, start: int, end: int) -> None:
    if start < end <= len(content) - 4:
        content[end : end + 4] = lookup3(bytes(content[start:end])).to_bytes(4, "little")


def lookup3(key: bytes) -> int:
    """Return Jenkins' hash of bytes, which is HDF5's checksum of its structures.

    >>> hex(lookup3(b"Four score and seven years ago"))
    '0x17770551'
    """
    a = b = c = (0xDEADBEEF + len(key)) & MASK
    while len(key) > 12:
        a, b, c = _added(a, b, c, key)
        key = key[12:]
        a = ((a - c) ^ _rotated(c, 4)) & MASK
        c = (c + b) & MASK
        b = ((b - a) ^ _rotated(a, 6)) & MASK
        a = (a + c) & MASK
        c = ((c - b) ^ _rotated(b, 8)) & MASK
        b = (b + a) & MASK
        a = ((a - c) ^ _rotated(c, 16)) & MASK
        c = (c + b) & MASK
        b = ((b - a) ^ _rotated(a, 19)) & MASK
        a = (a + c) & MASK
        c = ((c - b) ^ _rotated(b, 4)) & MASK
        b = (b + a) & MASK
    if not key:
        return c
    a, b, c = _added(a, b, c, key.ljust(12, b"\0"))
    c = ((c ^ b) - _rotated(b, 14)) & MASK
    a = ((a ^ c) - _rotated(c, 11)) & MASK
    b = ((b ^ a) - _rotated(a, 25)) & MASK
    c = ((c ^ b) - _rotated(b, 16)) & MASK
    a = ((a ^ c) - _rotated(c, 4)) & MASK
    b = ((b ^ a) - _rotated(a, 14)) & MASK
    return ((c ^ b) - _rotated(b, 24)) & MASK


def _added(a: int, b: int, c: int, key: bytes) -> tuple[int, int, int]:
    parts = (int.from_bytes(key[at : at + 4], "little") for at in (0, 4, 8))
    first, second, third = ((old + new) & MASK for old, new in zip((a, b, c), parts, strict=True))
    return first, second, third


def _rotated(value: int, count: int) -> int:
    return (value << count | value >> (32 - count)) & MASK


IMPORTED = (
    Target("arrow", _arrow_files, reading(".arrow"), _damaged_arrow),
    Target("safetensors", _safetensors, reading(".safetensors"), _damaged_safetensors),
    Target("hdf5", _hdf5_files, _hdf5_reading, _damaged_hdf5, slow=True),
)
