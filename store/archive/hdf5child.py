"""Reads an HDF5 file for another process: `hdf5file` runs this as a script.

Rules
- HDF5's library crashes, hangs and takes gigabytes on damaged files. So it reads them here, where nothing is lost, with
  limits of memory and of processor time. Nothing of TensorVine is imported, so that it starts soon.
- The file is standard input. Standard output is an empty file in memory: first the result, then a description of it in
  JSON, then that one's length. Without a description, this process came to a bad end.
- What points to another file, or claims more bytes than are allowed, is refused before it is read.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import resource
import sys
from typing import Any, cast

import numpy as np

h5py: Any = importlib.import_module("h5py")  # which has no types
LENGTH_BYTES = 8
"""Of the description's length."""
ALIGNMENT = 64
"""Of each dataset in the result."""
_NUMBERS = "biufc"


class RefusedError(Exception):
    """Says what was expected, and what was found."""


def main(mode: str, allowed: int, seconds: int) -> None:
    """Read standard input.

    Args:
        mode: "tensors": the result is the bytes of all datasets; "copy": a file of the same objects, written anew.
        allowed: bytes that may be taken.
        seconds: of the processor that may be used.
    """
    limit(allowed, seconds)
    try:
        with h5py.File("/proc/self/fd/0", "r", locking=False) as file:
            described = _tensors(file, allowed) if mode == "tensors" else _copied(file, allowed)
    except RefusedError as exc:
        described = {"refused": str(exc)}
    except (OSError, RuntimeError, KeyError, OverflowError, TypeError, ValueError, MemoryError) as exc:
        described = {"refused": f"expected a whole HDF5 file; found {exc or type(exc).__name__}"}
    with open(1, "ab", closefd=False) as output:
        text = json.dumps(described).encode()
        output.write(text + len(text).to_bytes(LENGTH_BYTES, "little"))


def limit(allowed: int, seconds: int) -> None:
    """Take no more memory, output and processor time than this from now on."""
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + allowed, now + allowed))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * allowed, 2 * allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, int(used) + 2 + seconds))


def _tensors(file: Any, allowed: int) -> dict[str, Any]:
    """Read all datasets, one behind another, and describe them."""
    found = _datasets(file, allowed)
    for name, dataset in found.items():
        if _dtype(dataset) is None:
            return {"mismatched": name, "dtype": str(dataset.dtype)}
    rows: list[dict[str, Any]] = []
    at = 0
    for name, dataset in found.items():
        rows.append({"name": name, "dtype": _dtype(dataset), "shape": dataset.shape, "at": at})
        at += -(-dataset.nbytes // ALIGNMENT) * ALIGNMENT
    if at:
        os.ftruncate(1, at)
        memory = mmap.mmap(1, at)
        for row, dataset in zip(rows, found.values(), strict=True):
            if dataset.nbytes:
                dataset.read_direct(np.ndarray(dataset.shape, dataset.dtype, memory, row["at"]))
    return {"tensors": rows}


def _copied(file: Any, allowed: int) -> dict[str, Any]:
    """Write all objects anew, with their attributes; each dataset in one piece, for chunks may be damaged, too."""
    _datasets(file, allowed)
    with open(1, "r+b", closefd=False) as output, h5py.File(output, "w") as copy:

        def write(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                made = copy.create_dataset(name, data=item[()], dtype=item.dtype)
            else:
                made = copy.require_group(name)
            for key, value in item.attrs.items():
                made.attrs[key] = value

        write("/", file)
        file.visititems(write)
    return {"bytes": os.stat(1).st_size}


def _datasets(file: Any, allowed: int) -> dict[str, Any]:
    """Return all datasets by path."""
    found: dict[str, Any] = {}
    left = allowed

    def visit(name: str, item: Any) -> None:
        nonlocal left
        if not isinstance(item, h5py.Dataset):
            return
        if item.external or item.is_virtual:
            raise RefusedError(f"tensor {name!r}: expected its bytes in this file; found a reference to another file")
        if item.nbytes > left:
            raise RefusedError(
                f"tensor {name!r}: expected at most {left} bytes in a file of this size; found {item.nbytes}"
            )
        left -= item.nbytes
        found[name] = item

    def visit_link(name: str, link: Any) -> str | None:
        return None if isinstance(link, h5py.HardLink) else name

    elsewhere = file.visititems_links(visit_link)
    if elsewhere is not None:
        raise RefusedError(f"{elsewhere!r}: expected an object in this file; found a link")
    file.visititems(visit)
    return found


def _dtype(dataset: Any) -> str | None:
    """Return how NumPy writes a dataset's dtype; None: it is not of numbers.

    Keras stores bfloat16 as two opaque bytes and says so in an attribute, which is asked for only where it matters.
    """
    if dataset.shape is None:
        return None
    dtype = cast("np.dtype[Any]", dataset.dtype)
    if dtype.str == "|V2" and dataset.attrs.get("dtype") == "bfloat16":
        return "bfloat16"
    return dtype.str if dtype.kind in _NUMBERS else None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
