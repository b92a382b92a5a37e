"""What one shard reads back from the path: when it starts, when segments become its own, when a home tells it.

Rules
- A shard that starts reads all manifests: of its own names it takes the versions, of its own segments the holders.
- A manifest that cannot be read now is not lost: it is tried again (`care`), and nothing is deleted meanwhile. The home
  of its name logs it; all shards tell of it (`ShardState.unreadable`).
- What others hold only in memory, a shard that starts *again* learns by asking them; what its earlier incarnation had
  only in memory is lost, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence

from ....planner.topology import Topology
from ....store.archive.archive import Archive
from ....store.archive.directory import Content
from ....store.archive.manifestfile import Manifest, SlotLists, version_of
from ....store.archive.numbers import given
from ....store.errors import CorruptDataError, ModelLostError, StorageError, Unreadable, shown, without_frames
from ....store.holders import Reason
from ....store.recovery import Read, Recovered, recover, relearn, take_over
from ....store.refs import ModelRef
from ....store.waiting import Backoff
from ...memory.workers import Workers
from ...rpc.messages import RecoveryInfo
from ..context import ShardContext

log = logging.getLogger(__name__)

READ_AT_ONCE = 1024
"""Manifests whose bytes are in memory at one time."""
LIST_PAUSE_S = 0.2
"""From one try to list the manifests to the next, while the disk refuses it."""


class Recovery:
    """Brings back what is on disk for one shard.

    Args:
        context: the shard's.
        archive: the repository's files.
        workers: threads that read manifests.
        settle: called after the state changed, without the lock.
    """

    def __init__(self, context: ShardContext, archive: Archive, workers: Workers, settle: Callable[[], None]) -> None:
        self._index = context.index
        self._info = context.recovery_info
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._archive = archive
        self._workers = workers
        self._settle = settle
        self.recovered: list[ModelRef] = []
        """Versions that the disk named; those that came since are of commits on their way."""

    def start(self) -> None:
        """Bring back what the path has when the shard starts.

        Raises:
            StorageError: the disk cannot be read.
        """
        began = time.monotonic()
        index, home = self._index, _homes(self._peers.topology, self._info)
        names = self._archive.manifests()
        files = self._archive.segments()
        with _collector_paused():  # all that comes now stays: looking for garbage among it takes a third of the time
            read = self._read(names)
            found = recover(self._state, read, files, home)
            if self._info is not None and self._peers.others:  # a version that only its home knows may name any of it
                self._state.hold_all(Reason.RESTORED)
        first = index == min(self._peers.topology.shards)
        for file in self._state.unreadable():
            if first if file.ref is None else home(file.ref.name) == index:
                what = file.ref or shown(file.file)
                log.error("shard %d: %s cannot be restored, nothing is deleted: %s", index, what, file.reason)
        self.recovered = self._state.version_holders()
        for reader, segment in found.missing:
            log.error("shard %d: %s is partly lost, as its segment %x has no file", index, reader, segment[1])
        if self._info is None:  # when it starts again, others can be about to name these, and tell what is lost
            self._archive.delete_segments(found.garbage)
            self._name_lost(names, home)
        self._log(found, len(names), time.monotonic() - began)

    def _name_lost(self, names: Sequence[str], home: Callable[[str], int]) -> None:
        """Learn which versions earlier clusters had only in memory when they died."""
        lost = sorted(given(self._archive.directory) - set(map(version_of, names)))
        self._state.ledger.note(dict.fromkeys(lost, (None, True)))
        mine = [ref for ref in lost if home(ref.name) == self._index]
        self._state.restore(dict.fromkeys(mine, (None, True)))
        if mine:
            log.warning(
                "shard %d: %d versions are lost, as they were not on disk when their cluster died: %s%s",
                self._index,
                len(mine),
                ", ".join(map(str, mine[:10])),
                ", ..." if len(mine) > 10 else "",
            )

    def _log(self, found: Recovered, manifests: int, seconds: float) -> None:
        if manifests or found.garbage:
            log.info(
                "shard %d: read %d manifests in %.2f s, found %d unused files",
                self._index,
                manifests,
                seconds,
                len(found.garbage),
            )

    async def relearn(self, ref: ModelRef) -> None:
        """Know what a version on disk names here."""
        await self._workers.run(self._relearn, ref)

    def _relearn(self, ref: ModelRef) -> None:
        manifest, files = self._archive.read_manifest(ref), self._archive.segments()
        with self._lock:
            relearn(self._state, manifest, files)
        log.info("shard %d: %s was written to disk while this shard restarted", self._index, ref)

    async def take_over(self, ask_anew: Callable[[Iterable[ModelRef]], None], learn: Callable[[], None]) -> None:
        """Bring back the segments that are this shard's by a new topology, in the step in which it goes by that.

        Args:
            ask_anew: has other homes asked what they name here, and what the disk brought back released if they name it
                no more. Called with the lock held.
            learn: goes by the topology. Called with the lock held.

        Raises:
            StorageError: a manifest that was there before cannot be read; nothing has changed.
        """
        await asyncio.to_thread(self._take_over, ask_anew, learn)

    def _take_over(self, ask_anew: Callable[[Iterable[ModelRef]], None], learn: Callable[[], None]) -> None:
        with self._lock:
            ask_anew(())  # from now on it is noted what they let go
        names = self._archive.manifests()
        read = self._read(names)
        for what, why in (*read.unread.items(), *read.hidden.items()):
            raise StorageError(
                f"shard {self._index}: {what}: expected a readable manifest, to find the owners of its tensors; {why}"
            )
        files = self._archive.segments()
        with self._lock:
            learn()
            before = set(self._state.version_holders())
            missing = take_over(self._state, read.manifests, files)
            self._state.hold_all(Reason.RESTORED)
            ask_anew(set(self._state.version_holders()) - before)
        for reader, segment in missing:
            log.error("shard %d: %s refers to segment %x, which has no file", self._index, reader, segment[1])
        self._read_late(names)
        self._settle()

    def _read_late(self, early: Collection[str]) -> None:
        """Learn of the manifests that came while the others were read: who wrote them may have told of it too early."""
        pauses = Backoff(LIST_PAUSE_S, LIST_PAUSE_S)
        while True:
            try:
                read = self._read(sorted(set(self._archive.manifests()) - set(early)))
                files = self._archive.segments() if read.manifests else {}
                break
            except StorageError as exc:
                log.warning("shard %d: listing the manifests failed, retrying: %s", self._index, exc)
            pauses.wait()
        with self._lock:
            for ref, why in read.unread.items():
                if self._state.known(ref) is None:
                    self._state.miss(ref, why, self._state.home_of(ref.name) == self._index)
            for manifest in read.manifests:
                try:
                    relearn(self._state, manifest, files)
                except ModelLostError as exc:
                    log.error("shard %d: %s", self._index, exc)

    def _read(self, names: Sequence[str]) -> Read:
        """Read manifests, and say why others cannot be read: many at once, but decoded by one thread.

        Several would only wait for one another's turn with the interpreter.
        """
        read: list[Manifest] = []
        lists = SlotLists()
        unread: dict[ModelRef, Unreadable] = {}
        where = self._archive.directory.uri
        hidden: dict[str, Unreadable] = {
            name: CorruptDataError(shown(f"{where}/{name}: expected a manifest or a folder of manifests; found {what}"))
            for name, what in self._archive.hidden().items()
        }
        for start in range(0, len(names), READ_AT_ONCE):
            some = names[start : start + READ_AT_ONCE]
            for name, content in zip(some, self._workers.map(self._content, some), strict=True):
                try:
                    if content is None:
                        continue
                    if isinstance(content, (CorruptDataError, StorageError)):
                        raise content
                    manifest = self._archive.manifest_of(name, content)
                    lists.add(manifest, content.size)
                    read.append(manifest)
                except (CorruptDataError, StorageError) as exc:
                    ref, why = version_of(name), without_frames(exc)
                    if ref is not None:
                        unread[ref] = why
                    else:
                        hidden[name] = why
        return Read(read, unread, hidden)

    def _content(self, name: str) -> Content | CorruptDataError | StorageError | None:
        """Read a manifest's bytes; give the error of the disk, or None where it is not there any more."""
        try:
            return self._archive.directory.read(name)
        except (CorruptDataError, StorageError) as exc:
            return None if isinstance(exc.__cause__, FileNotFoundError) else without_frames(exc)


@contextlib.contextmanager
def _collector_paused() -> Generator[None]:
    """Keep Python from looking for cyclic garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _homes(topology: Topology, recovery_info: RecoveryInfo | None) -> Callable[[str], int]:
    """Say which names on disk are at home here: in the middle of a change, not those that others hand over still."""
    if recovery_info is None or not topology.former:
        return topology.home
    return recovery_info.home
