"""How a catalog that starts finds what was decided before: a stream, and manifests that are newer.

Rules (docs/design/catalog.md, *a start*)
- The greatest whole stream counts: of the private folder, of the path, and of the copies that shards keep.
- A path or a shard that does not answer now is asked again. No version is taken for lost by that.
- A manifest that cannot be read is read again later (`care`); the version exists, and no file is deleted meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from ...store.archive.aliases import read_aliases
from ...store.archive.archive import Archive
from ...store.archive.directory import Content, Directory
from ...store.archive.manifestfile import Manifest, SlotLists, version_of
from ...store.archive.numbers import given
from ...store.catalog.journal import FOLDER, Stream, replay, whole
from ...store.catalog.state import CatalogState
from ...store.errors import (
    CorruptDataError,
    RepositoryNotFoundError,
    StorageError,
    TensorVineError,
    Unreadable,
    shown,
    without_frames,
)
from ...store.refs import ModelRef
from ...store.segments.segment import SegmentId
from ...store.waiting import Backoff, Deadline
from ..memory.workers import Workers
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from ..shard.calls.orders import Kept

log = logging.getLogger(__name__)

READERS = 8
"""Threads that read manifests: an object store answers slowly, but many at once."""
READ_AT_ONCE = 1024
"""Manifests whose bytes are in memory at one time."""
ASK_S, ASK_PAUSE_S = 5.0, 0.2
"""How long a shard may take to list its copies of the journal, and from one try to the next."""
PIECE_BYTES = 8 << 20
"""What is read at a time of a copy of the journal."""
COPIES_S = 30.0
"""How long shards that do not answer are waited for: some may have ended with their nodes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stream that can be replayed."""

    stream: Stream
    content: bytes
    where: str = ""
    """URI of the directory of the stream; empty: it is a copy of it."""
    is_current: bool = True
    """It has its mark: the journal never left the path."""


def in_directory(directory: Directory) -> Found | None:
    """Return the greatest whole stream of a directory.

    Raises:
        StorageError: it cannot be read.
    """
    names = directory.list(FOLDER)
    streams = sorted((s for s in map(Stream.parse, names) if s is not None), reverse=True)
    for stream in streams:
        try:
            content = directory.read(stream.name).to_pybytes()
        except StorageError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                continue
            raise
        if whole(content):
            return Found(stream, content, directory.uri, stream.mark in names)
    return None


def in_shards(channels: ShardChannels, shards: Sequence[int], than: Found | None) -> Found | None:
    """Return the greatest stream that shards have copies of, if it is greater than another one; see `Stream`."""
    deadline, pauses = Deadline.after(COPIES_S), Backoff(ASK_PAUSE_S, ASK_PAUSE_S)
    kept: dict[int, list[Kept]] = {}
    while True:
        for shard in [shard for shard in shards if shard not in kept]:
            try:
                kept[shard] = channels[shard].call(ShardCalls.journals(), ASK_S)
            except RepositoryNotFoundError:  # it was ended for good, or never started
                kept[shard] = []
            except TensorVineError as exc:
                log.info("catalog: shard %d does not list its copies of the journal: %s", shard, exc)
        if len(kept) == len(shards) or not pauses.wait(deadline):
            break
    best = than
    offers = [(Stream(one.term, one.number), one.length, shard) for shard, all_ in kept.items() for one in all_]
    for stream, length, shard in sorted(offers, reverse=True):
        if best is not None and (stream, length) <= (best.stream, len(best.content)):
            break
        try:
            content = _read(channels, shard, stream)
        except (TensorVineError, LookupError) as exc:
            log.warning("catalog: shard %d does not give its copy of %s: %s", shard, stream.name, exc)
            continue
        if whole(content):
            best = Found(stream, content)
    return best


def _read(channels: ShardChannels, shard: int, stream: Stream) -> bytes:
    pieces: list[bytes] = []
    length = 0
    while True:
        request = ShardCalls.read_journal(stream.term, stream.number, length, PIECE_BYTES)
        piece = channels[shard].call(request, ASK_S)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        length += len(piece)


def replayed(state: CatalogState, found: Found) -> int:
    """Apply a stream to a new state; return the term that wrote it.

    Raises:
        CorruptDataError: it is damaged although its checksums are right; names it.
    """
    try:
        with collector_paused():
            outcome = replay(state, found.content)
    except CorruptDataError as exc:
        raise CorruptDataError(
            f"{found.stream.name}: {exc}; to start from the manifests alone, move this file away"
        ) from exc
    cut = len(found.content) - outcome.length
    if cut:
        log.warning(
            "catalog: the last %d bytes of %s are incomplete and are ignored: no caller was answered",
            cut,
            found.stream.name,
        )
    return found.stream.term


class Manifests:
    """Reads the manifests of a path that a state does not know.

    Args:
        archive: the path's files.
        state: knows what a stream said.
    """

    def __init__(self, archive: Archive, state: CatalogState) -> None:
        self._archive = archive
        self._state = state
        self._bases: dict[tuple[SegmentId, int], tuple[SegmentId, int]] = {}

    def read(self, shards: Sequence[int]) -> None:
        """Take what is new.

        Args:
            shards: those that may keep files.

        Raises:
            StorageError: the path cannot be listed.
        """
        names = self._archive.manifests()
        refs = {name: version_of(name) for name in names}
        new = [name for name, ref in refs.items() if ref is None or not self._state.is_used(ref)]
        new += [name for name, ref in refs.items() if ref in self._state.unread]
        lost = given(self._archive.directory)
        with collector_paused():
            self._take(new)
        for what, found in self._archive.hidden().items():
            text = f"{self._archive.directory.uri}/{what}: expected a manifest or a folder of manifests; found {found}"
            self._state.hidden[what] = CorruptDataError(shown(text))
        self._read_aliases()
        known = set(refs.values())
        for ref in [ref for ref in self._state.ending if ref in known]:
            self._state.ending[ref].written = True  # perhaps it says that already: it is written again
        for ref in [ref for ref in self._state.unwritten if ref in known]:
            del self._state.unwritten[ref]
        for ref in sorted(lost - known):
            if not self._state.is_used(ref):
                self._state.restore_lost(ref, None)
        self._state.restore_files(self._files(), self._bases, shards)
        for ref, why in self._state.unread.items():
            log.error("catalog: %s cannot be restored, nothing is deleted: %s", ref, why)
        for file, why in self._state.hidden.items():
            log.error("catalog: %s: nothing is deleted: %s", shown(file), why)
        if new:
            log.info("catalog: read %d manifests, of %d", len(new), len(names))

    def _read_aliases(self) -> None:
        try:
            aliases = read_aliases(self._archive.directory)
        except CorruptDataError as exc:
            log.error("catalog: the aliases of the path are ignored: %s", exc)
            return
        if aliases is not None:
            self._state.restore_aliases(aliases)

    def read_again(self, ref: ModelRef, shards: Sequence[int], lock: threading.RLock) -> Unreadable | None:
        """Try a manifest that could not be read; return why it still cannot be. Call it without the lock.

        Raises:
            StorageError: the path cannot be listed.
        """
        found = self._read_one(ref)
        if isinstance(found, (CorruptDataError, StorageError)):
            return found
        files = self._files()
        self._note_bases([found] if found is not None else [])
        with lock:
            try:
                self._state.found(ref, found)
            except CorruptDataError as exc:
                return without_frames(exc)
            self._state.restore_files(files, self._bases, shards)
        return None

    def _read_one(self, ref: ModelRef) -> Manifest | Unreadable | None:
        try:
            return self._archive.read_manifest(ref)
        except (CorruptDataError, StorageError) as exc:
            return None if isinstance(exc.__cause__, FileNotFoundError) else without_frames(exc)

    def _files(self) -> Mapping[SegmentId, tuple[int, int]]:
        return {segment: (files[0].generation, files[0].nbytes) for segment, files in self._archive.segments().items()}

    def _take(self, names: Sequence[str]) -> None:
        """Read manifests, many at once, and take them in the order of their versions."""
        workers = Workers(READERS, thread_name_prefix="tensorvine-manifests")
        lists = SlotLists()
        manifests: list[Manifest] = []
        try:
            for start in range(0, len(names), READ_AT_ONCE):
                some = names[start : start + READ_AT_ONCE]
                for name, content in zip(some, workers.map(self._content, some), strict=True):
                    manifest = self._decoded(name, content, lists)
                    if manifest is not None:
                        manifests.append(manifest)
        finally:
            workers.shutdown()
        self._note_bases(manifests)
        retired = [manifest for manifest in manifests if manifest.retired]
        for manifest in sorted((m for m in manifests if not m.retired), key=lambda m: m.header.ref):
            try:
                self._state.restore(manifest)
            except CorruptDataError as exc:
                self._state.miss(manifest.header.ref, without_frames(exc))
        self._state.restore_retired(retired)

    def _decoded(self, name: str, content: Content | Unreadable | None, lists: SlotLists) -> Manifest | None:
        try:
            if content is None:
                return None
            if isinstance(content, (CorruptDataError, StorageError)):
                raise content
            manifest = self._archive.manifest_of(name, content)
            lists.add(manifest, content.size)
            return manifest
        except (CorruptDataError, StorageError) as exc:
            ref, why = version_of(name), without_frames(exc)
            if ref is not None:
                self._state.miss(ref, why)
            else:
                self._state.hidden[name] = why
            return None

    def _content(self, name: str) -> Content | Unreadable | None:
        """Read a manifest's bytes; give the error of the disk, or None where it is not there any more."""
        try:
            return self._archive.directory.read(name)
        except (CorruptDataError, StorageError) as exc:
            return None if isinstance(exc.__cause__, FileNotFoundError) else without_frames(exc)

    def _note_bases(self, manifests: Sequence[Manifest]) -> None:
        for manifest in manifests:
            for place, chain in manifest.bases.items():
                for own, base in zip((place, *chain), chain, strict=False):
                    self._bases[own] = base


def until_read(what: Callable[[], None], waits: bool) -> None:
    """Do something that reads the path; where it `waits`, again until it succeeds.

    Raises:
        StorageError: the path cannot be read, and this does not wait.
    """
    pauses = Backoff(0.25, 5.0)
    while True:
        try:
            return what()
        except StorageError as exc:
            if not waits:
                raise
            log.error("catalog: waiting for its path: %s", exc)
        pauses.wait()


@contextlib.contextmanager
def collector_paused() -> Generator[None]:
    """Keep Python from looking for cyclic garbage: all that comes now stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
