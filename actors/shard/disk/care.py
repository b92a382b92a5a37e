"""What one shard sees to on its path as long as it runs: manifests that could not be read, files that nobody needs.

Rules
- A manifest that could not be read is tried again, ever more slowly, until it can be or is not there any more. Until
  then nothing that it may name goes (`store.holders.Reason.UNREAD`).
- A file of this shard's segments is an orphan when two looks, `LOOK_S` apart, found it, no segment has it, and nobody
  writes it. Of a segment that is not known here all homes are asked, too, whether a version names it. Then it goes.
- A half-written file is looked after by the first shard. It is an orphan when two looks found that nobody writes it:
  a write failed and the disk did not take it back, or a writer was killed.
- There is no look while names or segments move, while other homes have not said what they name here, while any shard
  has manifests that it could not read, or while this one has no lease (`tenure`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from ....store.archive.archive import Archive, StoredFile
from ....store.archive.manifestfile import Manifest
from ....store.errors import CorruptDataError, StorageError, TensorVineError, Unreadable, without_frames
from ....store.recovery import readmit
from ....store.refs import ModelRef
from ....store.segments.segment import SegmentId
from ....store.shard import ShardState
from ...rpc.messages import PEER_TIMEOUT_S
from ..calls import ShardCalls
from ..context import ShardContext
from ..ticker import Ticker
from .persister import Persister
from .tiers import Tiers

log = logging.getLogger(__name__)

READ_FIRST_S, READ_LAST_S = 0.25, 60.0
LOOK_S = 60.0


class Care:
    """What one shard sees to.

    Args:
        context: the shard's.
        archive: the repository's files.
        tiers: writes the shard's segments.
        persister: writes its versions.
        settle: called after the state changed, without the lock.
    """

    def __init__(
        self,
        context: ShardContext,
        archive: Archive,
        tiers: Tiers,
        persister: Persister,
        settle: Callable[[], None],
    ) -> None:
        self.orphans = 0
        """Files that the last look found and that are there still."""
        self._state = context.state
        self._lock = context.lock
        self._peers = context.peers
        self._tenure = context.tenure
        self._archive = archive
        self._tiers = tiers
        self._persister = persister
        self._settle = settle
        self._suspects: set[str] = set()
        self._read_pause = READ_FIRST_S

    def start(self, calm: Callable[[], bool]) -> None:
        """See to all this from now on, in a thread, as long as the process lives.

        Args:
            calm: tells whether the other homes have said what they name here. Called with the lock held.
        """
        Ticker("care", f"shard {self._state.index}", self._pause, partial(self._step, calm))

    def _pause(self) -> float:
        return self._read_pause if self._state.unread else LOOK_S

    def _step(self, calm: Callable[[], bool]) -> None:
        try:
            self._persister.clean_up()
            self._read_pause = READ_FIRST_S if self.read_again() else min(2 * self._read_pause, READ_LAST_S)
            self.look(calm)
        except TensorVineError as exc:
            log.warning("shard %d: checking its path failed, retrying later: %s", self._state.index, exc)

    # ---- manifests --------------------------------------------------------------------------------------

    def read_again(self) -> int:
        """Try the manifests that could not be read; gives how many could be now."""
        found = 0
        for ref, before in list(self._state.unread.items()):
            try:
                manifest = read_manifest(self._archive, ref)
                if not isinstance(manifest, (CorruptDataError, StorageError)):
                    self._readmit(ref, manifest)
                    found += 1
                    continue
            except CorruptDataError as exc:
                manifest = without_frames(exc)
            if str(manifest) != str(before):
                log.error("shard %d: %s cannot be restored: %s", self._state.index, ref, manifest)
            with self._lock:
                self._state.unread[ref] = manifest
        return found

    def _readmit(self, ref: ModelRef, manifest: Manifest | None) -> None:
        files = self._archive.segments()
        with self._lock:
            dead = len(self._state.dead_files)
            missing = readmit(self._state, ref, manifest, files)
            del self._state.dead_files[dead:]  # others may be about to name them: if nobody does, they are orphans
        if manifest is None:
            log.error("shard %d: the manifest of %s no longer exists", self._state.index, ref)
        else:
            log.warning("shard %d: %s can be read again and is restored", self._state.index, ref)
        for reader, segment in missing:
            log.error("shard %d: %s refers to segment %x, which has no file", self._state.index, reader, segment[1])
        self._settle()

    # ---- orphans ----------------------------------------------------------------------------------------

    def look(self, calm: Callable[[], bool]) -> None:
        """Find files that nobody needs, and delete those that were so at the last look already."""
        if not self._is_calm(calm):
            self._suspects = set()
            return
        index, files = self._state.index, self._archive.segments()  # first: what is written after this is not seen
        mine = {f.name: (s, f) for s, found in files.items() if self._state.where(s) == index for f in found}
        half = set(self._archive.abandoned()) if index == min(self._peers.topology.shards) else set[str]()
        with self._lock:
            found = half | {name for name, (segment, file) in mine.items() if not self._needs(segment, file)}
            again, self._suspects, self.orphans = found & self._suspects, found, len(found)
            unknown = {mine[name][0] for name in again - half if not self._state.knows_segment(mine[name][0])}
        named = self._named(unknown) if unknown else set[SegmentId]()
        with self._lock:
            doomed = [n for n in again - half if mine[n][0] not in named and not self._needs(*mine[n])]
            doomed += again & half
            if not doomed or not self._is_calm(calm):
                return
        self._tiers.forget(doomed)
        self._archive.delete_segments(doomed)
        self._suspects -= set(doomed)
        self.orphans = len(self._suspects)
        log.warning("shard %d: deleted %d unused files: %s", index, len(doomed), sorted(doomed)[:10])

    def _is_calm(self, calm: Callable[[], bool]) -> bool:
        topology = self._peers.topology
        with self._lock:
            here = self._state.index in topology.shards
            still = not topology.former and not topology.leaving and not self._state.is_blind
            return here and still and self._tenure.holds and calm()

    def _needs(self, segment_id: SegmentId, file: StoredFile) -> bool:
        """Tell whether a file is a segment's, or may be about to be. Call it with the lock held."""
        if self._tiers.writes(segment_id):
            return True
        segment = self._state.segment(segment_id)
        if segment is None:
            return False
        stored = segment.stored.name if segment.stored is not None else None
        return file.name == stored or file.generation >= segment.files

    def _named(self, segments: Collection[SegmentId]) -> set[SegmentId]:
        """Return those of these segments that a version, or a commit on its way, of any home names."""
        with self._lock:
            found = named_here(self._state, segments)
        for shard in self._peers.others:
            try:
                found |= self._peers.call(shard, ShardCalls.named(list(segments)), PEER_TIMEOUT_S)
            except (TensorVineError, LookupError) as exc:
                log.info(
                    "shard %d: shard %d did not return the segments that it needs: %s", self._state.index, shard, exc
                )
                return set(segments)
        return found


def named_here(state: ShardState, segments: Collection[SegmentId]) -> set[SegmentId]:
    """Return those of some segments that versions of this home, or commits on their way, name.

    Call it with the lock held. All of them, while there are versions of which this is not known.
    """
    if state.is_blind:
        return set(segments)
    named = {segment for holds in state.begun().values() for segment in holds}
    return set(segments) & named.union(*(record.segments for record in state.records()))


def read_manifest(archive: Archive, name: ModelRef | str) -> Manifest | Unreadable | None:
    """Read a manifest; give why it cannot be read, or None where there is none."""
    try:
        return archive.read_manifest(name)
    except (CorruptDataError, StorageError) as exc:
        return None if isinstance(exc.__cause__, FileNotFoundError) else without_frames(exc)
