"""Keras's weights files as tensors: one format of `interchange`.

Rules
- HDF5 works in memory only: it crashes the process when it closes a file on a full disk.
- A file that came from elsewhere is read by a process of its own (`hdf5child`), for HDF5's library crashes, hangs and
  takes gigabytes on damaged ones. What Keras itself is to read was written anew there.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, NotRequired, TypedDict

import numpy as np

from ..arrays import Array, as_numpy, from_bytes, read_only
from ..bounds.allowance import allowed
from ..errors import CorruptDataError, OperationTimeoutError, TensorMismatchError
from ..lazy import optional

HDF5_ERRORS = (OSError, RuntimeError, KeyError, OverflowError, TypeError, ValueError)
"""What Keras and h5py raise for a file that does not fit a model."""
_CPU_S = 5
_LEAST_RATE = 20 << 20
"""Seconds of the processor that reading a file may take, and bytes of the file in one second more."""
_WALL_FACTOR = 20
"""How much longer than that it may take on a busy machine."""
_LENGTH_BYTES = 8
_SCRIPT = Path(__file__).with_name("hdf5child.py")


class _Row(TypedDict):
    """A tensor in the result."""

    name: str
    dtype: str
    shape: list[int]
    at: int


class _Described(TypedDict):
    """What `hdf5child` says of its result: one of these by its mode, or why there is none."""

    tensors: list[_Row]
    bytes: int
    refused: NotRequired[str]
    mismatched: NotRequired[str]
    dtype: str


class NamedBuffer(io.BytesIO):
    """A file in memory that has a name: that is what Keras asks for."""

    def __str__(self) -> str:
        return "model.weights.h5"


def tensors_in(path: object, file: IO[bytes]) -> dict[str, Array]:
    """Return the tensors of a file by HDF5 path, read-only.

    Args:
        path: names the file.
        file: it, open.

    Raises:
        CorruptDataError: it is truncated or damaged, or has what is not read.
        TensorMismatchError: a tensor is not of numbers.
        CodecUnavailableError: h5py is not installed.
    """
    described, memory = _read("tensors", path, file)
    tensors: dict[str, Array] = {}
    for row in described["tensors"]:
        tensors[row["name"]] = read_only(_tensor(f"{path}: tensor {row['name']!r}", row, memory))
    return tensors


def copy_of(path: object, file: IO[bytes]) -> NamedBuffer:
    """Return a file of the same objects, written anew.

    Raises:
        CorruptDataError: it is truncated or damaged, or has what is not read.
        CodecUnavailableError: h5py is not installed.
    """
    described, memory = _read("copy", path, file)
    return NamedBuffer(memory[: described["bytes"]])


def _tensor(where: str, row: _Row, memory: memoryview) -> Array:
    dtype, shape = row["dtype"], tuple(row["shape"])
    if dtype == "bfloat16":
        plain = np.ndarray(shape, np.uint16, memory, row["at"])
        return from_bytes(plain.reshape(-1).view(np.uint8), dtype, shape)
    return as_numpy(np.ndarray(shape, dtype, memory, row["at"]), where)


def _read(mode: str, path: object, file: IO[bytes]) -> tuple[_Described, memoryview]:
    """Have another process read a file; return its description and its result."""
    optional("h5py", path, "files")
    size = os.fstat(file.fileno()).st_size
    seconds = _CPU_S + size // _LEAST_RATE
    result = os.memfd_create("tensorvine-hdf5", os.MFD_CLOEXEC)
    try:
        command = [sys.executable, "-P", str(_SCRIPT), mode, str(allowed(size)), str(seconds)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(  # noqa: S603  our own script
            command,
            stdin=file,
            stdout=result,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_WALL_FACTOR * seconds,
            check=False,
        )
        written = os.fstat(result).st_size
        memory = memoryview(mmap.mmap(result, written, prot=mmap.PROT_READ)) if written else memoryview(b"")
    except subprocess.TimeoutExpired as exc:
        raise OperationTimeoutError(f"{path}: expected to read it within {exc.timeout:.0f} s; it took longer") from exc
    finally:
        os.close(result)
    if done.returncode or len(memory) < _LENGTH_BYTES:
        raise CorruptDataError(f"{path}: expected a whole HDF5 file; HDF5 ended with {done.returncode} when reading it")
    end = len(memory) - _LENGTH_BYTES
    described: _Described = json.loads(bytes(memory[end - int.from_bytes(memory[end:], "little") : end]))
    if "refused" in described:
        raise CorruptDataError(f"{path}: {described['refused']}")
    if "mismatched" in described:
        where = f"{path}: tensor {described['mismatched']!r}"
        raise TensorMismatchError(f"{where}: expected an array of numbers or booleans; found {described['dtype']}")
    return described, memory
