"""A disk in memory that is slow, full or failing at times, for each simulated process apart.

Rules
- A file is whole or not there. What is written is durable when `write` returns.
- Trouble is a process's own: an errno until a moment of the virtual clock, and how often it strikes.
- Operations take virtual time, so that others run meanwhile.
"""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tensorvine.store.archive.directory import Directory, OpenFile
from tensorvine.store.errors import StorageError

from .scheduler import Process, World
from .threads import world

URI = "/simulated"
"""Of the path. All others are private folders of nodes, which never fail."""
READING = (errno.EIO, errno.ESTALE, errno.ENXIO)
WRITING = (errno.EIO, errno.ENOSPC, errno.ESTALE)


class Disk:
    """The disk of a world."""

    def __init__(self, w: World, slowness_s: float) -> None:
        self.files: dict[str, bytes] = {}
        """Of the path."""
        self.private: dict[str, dict[str, bytes]] = {}
        """Node and folder -> files."""
        self.claims: dict[str, Process] = {}
        self.slowness_s = slowness_s
        self._world = w


@dataclass
class Trouble:
    """What a disk does to one process for a while."""

    until: float
    chance: float
    reads: bool
    writes: bool
    only: str = ""
    """Names of the files begin with this."""


class SimulatedDirectory(Directory):
    """A directory of the world's disk."""

    def __init__(self, uri: str, create: bool = True) -> None:
        self.uri = uri
        process = world().process
        place = f"{process.node if process is not None else ''}:{uri}"
        self._files = _disk().files if uri == URI else _disk().private.setdefault(place, {})

    def write(self, name: str, fill: Any) -> int:
        sink = io.BytesIO()
        fill(_Sink(sink))
        content = sink.getvalue()
        self._wait("write", name, 1.0)
        self._fail(name, False)
        self._files[name] = content
        self._wait("written", name, 0.5)
        return len(content)

    def append(self, name: str, data: bytes) -> bool:
        self._wait("append", name, 0.2)
        self._fail(name, False)
        self._files[name] = self._files.get(name, b"") + data
        return True

    def read(self, name: str) -> Any:
        self._wait("read", name, 0.2)
        self._fail(name, True)
        return pa.py_buffer(self._content(name))

    def open(self, name: str) -> OpenFile:
        self._wait("open", name, 0.2)
        self._fail(name, True)
        return _Opened(self, name, self._content(name))

    def list(self, folder: str) -> dict[str, int]:
        self._wait("list", folder, 0.2)
        self._fail(folder, True)
        prefix = f"{folder}/" if folder else ""
        return {name: len(content) for name, content in sorted(self._files.items()) if name.startswith(prefix)}

    def delete(self, *names: str) -> None:
        for name in names:
            self._wait("delete", name, 0.2)
            self._fail(name, False)
            if self._files.pop(name, None) is not None:
                world().note(f"disk: {name} is deleted")

    def claim(self, name: str) -> int | None:
        process, claims = world().process, _disk().claims
        known = claims.get(name)
        if known is not None and not known.dead and known is not process:
            raise StorageError(f"{self.uri}: expected a path of its own; another repository runs on it")
        if process is not None:
            claims[name] = process
        return 1

    def _content(self, name: str) -> bytes:
        content = self._files.get(name)
        if content is None:
            raise StorageError(f"{self.uri}/{name}: expected to read it; no such file") from FileNotFoundError(name)
        return content

    def _wait(self, what: str, name: str, share: float) -> None:
        w = world()
        if w.over:
            return
        slowness = _disk().slowness_s * share if self.uri == URI else 0.0
        if slowness and w.current is not None:
            w.sleep(slowness * w.random.random())
        else:
            w.point()
        if w.trace is not None and what in ("write", "written"):
            w.note(f"disk: {what} {name}")

    def _fail(self, name: str, reading: bool) -> None:
        w = world()
        trouble: Trouble | None = w.process.facts.get("trouble") if w.process is not None else None
        if (
            self.uri != URI
            or trouble is None
            or w.now > trouble.until
            or not (trouble.reads if reading else trouble.writes)
        ):
            return
        if not name.startswith(trouble.only) or name == "manifests":
            return
        if w.random.random() < trouble.chance:
            code = w.random.choice(READING if reading else WRITING)
            w.note(f"disk: {name}: {os.strerror(code)}")
            cause = OSError(code, os.strerror(code))
            raise StorageError(f"{self.uri}/{name}: expected to use it; {os.strerror(code)}") from cause


class _Opened(OpenFile):
    def __init__(self, directory: SimulatedDirectory, name: str, content: bytes) -> None:
        self._directory, self._name, self._content = directory, name, content
        self.nbytes = len(content)

    def part(self, offset: int, nbytes: int, into: Any = None) -> Any:
        self._directory._wait("part", self._name, 0.2)
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise StorageError(f"{self._name}: expected {nbytes} bytes at {offset}; the file has {self.nbytes}")
        found = np.frombuffer(self._content, np.uint8)[offset : offset + nbytes]
        if into is not None:
            into[:] = found
        return found

    def arrow(self) -> Any:
        return pa.BufferReader(pa.py_buffer(self._content))

    def close(self) -> None:
        """Nothing is held."""


class _Sink:
    """What a file is written to."""

    closed = False

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file
        self.tell = file.tell

    def write(self, data: Any) -> int:
        return self._file.write(memoryview(data).cast("B")) if memoryview(data).nbytes else 0

    def flush(self) -> None:
        """Nothing is buffered."""


def open_directory(uri: str, create: bool = True) -> Directory:
    """Open the world's disk."""
    return SimulatedDirectory(uri, create)


def _disk() -> Disk:
    return world().disk  # type: ignore[attr-defined]
