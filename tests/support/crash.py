"""Faults at scripted system calls, and a short history of a repository's files that is run under each of them.

    python tests/support/crash.py FOLDER EVENT...

runs the history in FOLDER/0, FOLDER/1, ... with the events in turn at its first, second, ... system call that matters,
until it ends without one, and prints a JSON list per run: [event, calls that were made, what the history said].

Rules
- The calls are those that change or sync files below a folder; the fault comes before the call. A writer that is
  killed at a `write` has written half.
- Each run is a fork of one process that has imported everything: a run costs milliseconds.
- What was said goes to a file outside the folder at once, so that it survives SIGKILL.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tensorvine.store.archive import local
from tensorvine.store.archive.archive import Archive, StoredFile
from tensorvine.store.archive.encoding import Tensor, encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.archive.segmentfile import Slot
from tensorvine.store.arrays import Array, as_bytes, dtype_name
from tensorvine.store.codecs.delta import Delta
from tensorvine.store.errors import StorageError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import Header, TensorEntry, digest_of

CALLS = ("mkdir", "open", "write", "fsync", "rename", "open folder", "fsync folder", "unlink")
KILL = -1
"""The event that is no error: SIGKILL."""

FIRST, SECOND, THIRD = ModelRef("m", 1), ModelRef("deep/m", 1), ModelRef("m", 2)
ARRAYS: dict[Slot, Array] = {
    ((0, 1), 0): np.arange(100, dtype=np.float32),
    ((0, 1), 1): np.array(7, np.int64),
    ((0, 2), 0): np.arange(3000, dtype=np.float64).reshape(30, 100),
    ((0, 2), 1): np.zeros((0, 3), np.int16),
    ((0, 2), 2): np.ones(9000, np.uint8),
    ((0, 3), 0): np.arange(3000, dtype=np.float64).reshape(30, 100) + (np.arange(3000).reshape(30, 100) == 5),
    ((0, 4), 0): np.arange(10),
}
"""What the history writes, where."""
BASES: dict[Slot, Slot] = {((0, 3), 0): ((0, 2), 0)}
TABLES: dict[ModelRef, dict[str, Slot]] = {
    FIRST: {"a": ((0, 1), 0), "b": ((0, 1), 1), "c": ((0, 2), 0), "d": ((0, 2), 1), "e": ((0, 2), 2)},
    SECOND: {"c": ((0, 3), 0), "d": ((0, 2), 1)},
    THIRD: {"f": ((0, 4), 0)},
}
"""Tensors of the versions."""


class _Script:
    """Counts calls below a folder, and lets one of them fail."""

    def __init__(self, folder: Path, call: str | None, number: int, event: int) -> None:
        self.left = number + 1
        self.seen = 0
        self._prefix = f"{folder}/"
        self._call = call
        self._event = event

    def step(self, call: str, path: str, before: Callable[[], object] = lambda: None) -> None:
        if not f"{path}/".startswith(self._prefix) or self._call not in (None, call):
            return
        self.seen += 1
        self.left -= 1
        if self.left:
            return
        if self._event == KILL:
            before()
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self._event, os.strerror(self._event))


@contextlib.contextmanager
def scripted(folder: Path, call: str | None, number: int, event: int) -> Iterator[_Script]:
    """Let a system call fail.

    Args:
        folder: only calls below it count.
        call: one of `CALLS`, or None: of any kind.
        number: which of these calls, from 0.
        event: error number, or `KILL`.
    """
    script = _Script(folder, call, number, event)
    real = {name: getattr(os, name) for name in ("mkdir", "rename", "unlink", "open", "fsync")}

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            script.step("write", os.fspath(self.name), lambda: super(File, self).write(data[: len(data) // 2]))
            return super().write(data)

    def on_path(call: str) -> Callable[..., object]:
        def run(path: Any, *rest: Any, **named: Any) -> object:
            folder = named.get("dir_fd", named.get("src_dir_fd"))
            where = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if folder is not None else path
            kind = "open folder" if call == "open" and os.path.isdir(where) else call
            if kind != "open":  # files are opened for writing by `open_file`, and locks are not of this history
                script.step(kind, os.fspath(where))
            return real[call](path, *rest, **named)

        return run

    def fsync(descriptor: int) -> None:
        kind = "fsync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync"
        script.step(kind, os.readlink(f"/proc/self/fd/{descriptor}"))
        real["fsync"](descriptor)

    def open_file(path: Any, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        if "r" in mode:
            return open(path, mode, buffering)
        script.step("open", os.fspath(path))
        return File(path, mode, opener=opener)

    with contextlib.ExitStack() as patches:
        for name in ("mkdir", "rename", "unlink", "open"):
            patches.enter_context(mock.patch.object(os, name, on_path(name)))
        patches.enter_context(mock.patch.object(os, "fsync", fsync))
        patches.enter_context(mock.patch.object(local, "open", open_file, create=True))
        yield script


def tensor_of(slot: int, name: str, array: Array, base: tuple[Slot, Array] | None = None) -> Tensor:
    """Describe an array that is to be stored."""
    against = (base[0], as_bytes(base[1])) if base is not None else None
    data = as_bytes(array)
    return Tensor(
        slot=slot,
        name=name,
        layer="layer",
        dtype=dtype_name(array.dtype),
        shape=array.shape,
        data=data,
        digest=digest_of(data),
        base=against,
    )


def manifest_of(ref: ModelRef, table: Mapping[str, Slot], parent: ModelRef | None = None) -> Manifest:
    """Make the manifest of one of the history's versions."""
    entries = {
        name: TensorEntry(dtype_name(a.dtype), a.shape, a.nbytes, None, place[0], place[1])
        for name, place in table.items()
        for a in [ARRAYS[place]]
    }
    header = Header(
        ref=ref,
        parent=parent,
        quality=None,
        metadata="{}",
        created_ns=1,
        graph_key=b"key",
        bytes_owned=1,
        bytes_total=1,
    )
    bases = {place: (BASES[place],) for place in table.values() if place in BASES}
    return Manifest(header, (ModelGraph(()).to_json(), None), entries, bases)


def write(archive: Archive, segment: SegmentId, generation: int, slots: list[int]) -> StoredFile:
    """Write one of the history's segments."""
    tensors = [
        tensor_of(slot, f"t{slot}", ARRAYS[segment, slot], (base, ARRAYS[base]) if base is not None else None)
        for slot in slots
        for base in [BASES.get((segment, slot))]
    ]
    return archive.write_segment(segment, generation, *encode_tensors(Delta(), tensors))


def history(uri: str, say: Callable[[str], None]) -> None:
    """Save two versions, retire the first, delete a segment, rewrite another; what is refused is tried once more."""

    def stubborn(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StorageError as exc:
            say(f"refused: {exc}")
            return call()

    archive = stubborn(lambda: Archive(uri))
    say(f"saving {FIRST}")
    stubborn(lambda: write(archive, (0, 1), 0, [0, 1]))
    stubborn(lambda: write(archive, (0, 2), 0, [0, 1, 2]))
    stubborn(lambda: archive.write_manifest(manifest_of(FIRST, TABLES[FIRST]), {}))
    say(f"saved {FIRST}")
    say(f"saving {SECOND}")
    stubborn(lambda: write(archive, (0, 3), 0, [0]))
    stubborn(lambda: archive.write_manifest(manifest_of(SECOND, TABLES[SECOND], FIRST), {}))
    say(f"saved {SECOND}")
    say(f"retiring {FIRST}")
    stubborn(lambda: archive.write_manifest(retired(FIRST), {}))
    say(f"retired {FIRST}")
    stubborn(lambda: archive.delete_segments(["segments/1.0.arrow"]))
    stubborn(lambda: write(archive, (0, 2), 1, [0, 1]))
    stubborn(lambda: archive.delete_segments(["segments/2.0.arrow"]))


def retired(ref: ModelRef) -> Manifest:
    """Make the manifest that says that a version is no more."""
    return Manifest(
        Header(
            ref=ref,
            parent=None,
            quality=None,
            metadata="{}",
            created_ns=1,
            graph_key=b"key",
            bytes_owned=1,
            bytes_total=1,
        ),
        ("", None),
        {},
        {},
        retired=True,
    )


def _run(folder: Path, number: int, event: int) -> tuple[int, list[str]]:
    """Run the history in a child with one fault; give the calls that it made (0: it was killed), and what it said."""
    said = folder.with_suffix(".said")
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            with open(said, "a", buffering=1) as out, scripted(folder, None, number, event) as script:
                history(str(folder), lambda text: print(text, file=out))
            (folder.with_suffix(".calls")).write_text(str(script.seen))
            code = 0
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    if status not in (0, signal.SIGKILL):
        raise RuntimeError(f"run {number}: expected a child that ends or is killed; found status {status}")
    return int(folder.with_suffix(".calls").read_text()) if not status else 0, said.read_text().splitlines()


def main() -> None:
    """See the top."""
    top, events = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    with tempfile.TemporaryDirectory(dir=top) as folder:  # what is compiled at first use is so once, and not per run
        history(folder, lambda text: None)
    for number in range(10_000):
        event = events[number % len(events)]
        calls, said = _run(top / str(number), number, event)
        sys.stdout.write(json.dumps([event, calls, said]) + "\n")
        if 0 < calls <= number:
            return


if __name__ == "__main__":
    main()
