"""The catalog's stream on a file system: appended to before anybody sees a decision.

Rules
- The stream is below the path, if that can append, else in a private folder of this node. If the path fails, a new
  stream begins in the private folder, and from time to time another one on the path.
- A new stream begins with a snapshot, and takes the place of the old one when that is whole. Then the old file goes.
- A stream below the path has a mark, which is deleted when the journal leaves the path: a full disk allows that. The
  next start raises the floor of version numbers if it finds the stream without its mark.
- All is done with the catalog's lock held, except the encoding and writing of a large snapshot.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from ...store.archive.directory import Directory
from ...store.archive.opening import open_directory
from ...store.catalog.journal import FOLDER, Stream, frame, snapshot_of
from ...store.catalog.state import CatalogState
from ...store.errors import CorruptDataError, ShardUnavailableError, StorageError
from ...store.waiting import Deadline

log = logging.getLogger(__name__)

GROWN_BYTES = 16 << 20
"""A stream is begun anew when its decisions are longer than its snapshot and this."""
PIECE_BYTES = 4 << 20
"""What is written at a time."""
TRY_S = 15.0
"""How often a path that did not take the journal is tried again."""


def private_folder(repository: str, start: str, node: str) -> str:
    """Return the private folder of a start of a repository on a node: no two nodes have one of the same name."""
    name = f"{repository}-{start}-{node}".replace("/", "_")
    return str(Path(tempfile.gettempdir()) / f"tensorvine-{os.getuid()}" / name)


class Journal:
    """The stream of one term.

    Args:
        state: what snapshots are made of.
        lock: guards the state and this.
        term: number of the term.
        token: of the term.
        path: the repository's path, if there is one.
        private: opens the private folder.
        say: puts into the registry where the stream is, for the next term.
    """

    def __init__(
        self,
        state: CatalogState,
        lock: threading.RLock,
        term: int,
        token: bytes,
        path: Directory | None,
        private: Callable[[], Directory],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._lock = lock
        self._term = term
        self._token = token
        self._path = path
        self._private = private
        self._say = say
        self._directory: Directory | None = None
        self._numbers = count(1)
        self.stream = Stream(term, 0)
        self.length = 0
        self.snapshot = 0
        """Length of the snapshot."""
        self.on_path = False
        """The stream is below the path."""
        self._begun: list[bytes] | None = None
        """Decisions since the snapshot that is being written now."""
        self._torn = False
        """The last append failed: nothing may follow what it left."""
        self._try_path = Deadline.after(0.0)
        """When the path is tried again."""

    @property
    def where(self) -> str:
        """The directory of the stream."""
        return self._directory.uri if self._directory is not None else ""

    @property
    def wants_new(self) -> bool:
        """Whether a new stream is due: the decisions are long, or the path is to be tried again."""
        if self._path is not None and not self.on_path and self._try_path.passed:
            return True
        return self.length - self.snapshot > max(self.snapshot, GROWN_BYTES)

    def begin(self) -> None:
        """Begin the first stream, on the path if that can be.

        Raises:
            StorageError: neither the path nor the private folder takes it.
        """
        if self._path is not None:
            try:
                stream, written = self._write(self._path, self._pieces())
                if written:
                    self._switch(self._path, stream, written, 0)
                    self.on_path = True
                    return
                self._path = None  # it cannot append, and never will
            except (StorageError, CorruptDataError) as exc:
                log.error("catalog: the path does not take the journal, it is written on this node: %s", exc)
                self._try_path = Deadline.after(TRY_S)
        directory = self._private()
        self._switch(directory, *self._written_whole(directory, ()), 0)

    def append(self, contents: Sequence[bytes]) -> None:
        """Append decisions. Call it with the lock held.

        Raises:
            StorageError: they are in no journal.
            ShardUnavailableError: the registry does not take where the journal goes on; they are in none.
        """
        data = b"".join(map(frame, contents))
        if self._torn or self._directory is None:
            self._go_on_here(data)
            return
        try:
            self._directory.append(self.stream.name, data)
        except (StorageError, CorruptDataError) as exc:
            self._torn = True
            log.error("catalog: the journal %s cannot be written, another one begins: %s", self.stream.name, exc)
            self._go_on_here(data)
            return
        self.length += len(data)
        if self._begun is not None:
            self._begun.append(data)

    def read(self, stream: Stream, offset: int, nbytes: int) -> bytes | None:
        """Read some bytes of the stream; None: another one has begun. Call it without the lock.

        Raises:
            StorageError, CorruptDataError: it cannot be read.
        """
        with self._lock:
            if stream != self.stream or self._directory is None:
                return None
            directory, size = self._directory, min(nbytes, self.length - offset)
        file = directory.open(stream.name)
        try:
            return file.part(offset, size).tobytes()
        finally:
            file.close()

    def renew(self) -> None:
        """Begin a new stream with a snapshot. Call it without the lock, from one thread.

        Raises:
            StorageError: nothing takes it; the old stream goes on.
        """
        with self._lock:
            directory = self._path if self._path is not None and (self.on_path or self._try_path.passed) else None
            if directory is None:
                directory = self._directory
            self._try_path = Deadline.after(TRY_S)
            if directory is None:
                return
            old, place, records = self.stream, self._directory, list(self._state.snapshot(self._token))
            self._begun = begun = list[bytes]()
        try:
            stream, written = self._write(directory, snapshot_of(records))
            with self._lock:
                if self.stream != old:  # it could not be written meanwhile
                    directory.delete(stream.mark, stream.name)
                    return
                for data in begun:
                    directory.append(stream.name, data)
                self._switch(directory, stream, written, sum(map(len, begun)))
                self.on_path = directory is self._path
        finally:
            with self._lock:
                self._begun = None
        if directory is not place:
            self._say(self.where)  # until then the next term takes what it finds on the path for incomplete
        self._delete(place, old)

    def forget(self) -> None:
        """Delete the stream if it is in the private folder: the repository is stopped."""
        with self._lock:
            if not self.on_path:
                self._delete(self._directory, self.stream)

    # ---- within ---------------------------------------------------------------------------------------

    def _pieces(self) -> Iterable[bytes]:
        return snapshot_of(list(self._state.snapshot(self._token)))

    def _go_on_here(self, data: bytes) -> None:
        """Go on in the private folder: with a snapshot of all that was applied, and `data`.

        The registry says so before: what lies on the path is incomplete from then on.
        """
        directory = self._private()
        stream, written = self._written_whole(directory, (data,))
        if self.on_path and self._path is not None:
            try:
                self._path.delete(self.stream.mark)
            except StorageError as exc:
                log.error(
                    "catalog: numbers of versions may be used again if the cluster ends before the path accepts the "
                    "journal: %s",
                    exc,
                )
        try:
            self._say(directory.uri)
        except ShardUnavailableError:
            self._delete(directory, stream)
            raise
        self._switch(directory, stream, written - len(data), len(data))
        self.on_path = False
        self._try_path = Deadline.after(TRY_S)

    def _written_whole(self, directory: Directory, more: Sequence[bytes]) -> tuple[Stream, int]:
        stream, written = self._write(directory, [*self._pieces(), *more])
        if not written:
            raise StorageError("catalog: expected a private folder where files can be appended; this one cannot")
        return stream, written

    def _write(self, directory: Directory, pieces: Iterable[bytes]) -> tuple[Stream, int]:
        """Write the begin of a new stream; give its length, 0 where the file system cannot append."""
        stream, written = Stream(self._term, next(self._numbers)), 0
        if directory is self._path and not directory.append(stream.mark, b"\n"):
            return stream, 0
        for piece in _joined(pieces):
            if not directory.append(stream.name, piece):
                return stream, 0
            written += len(piece)
        return stream, written

    def _switch(self, directory: Directory, stream: Stream, snapshot: int, after: int) -> None:
        self._directory, self.stream, self._torn = directory, stream, False
        self.snapshot, self.length = snapshot, snapshot + after

    def _delete(self, directory: Directory | None, stream: Stream) -> None:
        try:
            if directory is not None:
                directory.delete(stream.mark, stream.name)
        except StorageError as exc:
            log.warning("catalog: the journal %s is no longer needed and could not be deleted: %s", stream.name, exc)


def delete_earlier(directories: Sequence[Directory], newest: Stream) -> None:
    """Delete all streams before the newest."""
    for directory in directories:
        found = [stream for stream in map(Stream.parse, directory.list(FOLDER)) if stream is not None]
        old = [name for stream in found if stream < newest for name in (stream.mark, stream.name)]
        if old:
            directory.delete(*old)


def open_private(folder: str) -> Directory:
    """Open a private folder, which is made where there is none.

    Raises:
        StorageError: it cannot be used.
    """
    return open_directory(folder)


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces to larger ones."""
    held: list[bytes] = []
    nbytes = 0
    for piece in pieces:
        held.append(piece)
        nbytes += len(piece)
        if nbytes >= PIECE_BYTES:
            yield b"".join(held)
            held, nbytes = [], 0
    if held:
        yield b"".join(held)
