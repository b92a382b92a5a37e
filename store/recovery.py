"""Bringing a shard's state back from the manifests on disk.

Rules
- The committed manifests say all: which versions there are, which segments they name, and what these need to be read.
  No tensor is touched.
- A shard becomes home to the names that the placement gives it, and owner of the segments whose number says so; both
  follow from the number of shards, which may be another than when the files were written.
- A file that no manifest needs is garbage; so is an older generation of one that has a newer.
- A manifest that names a missing file is reported; its other tensors stay readable.
- A manifest that cannot be read may name any file. As long as there is one, all files of this shard's segments count
  as needed; when it can be read it is learnt of as if it had been there. So does what stands among the manifests and is
  none, until the next start.
- What is wrong with one manifest costs its version, and no other.
- A manifest that another shard wrote after this one had read them all is learnt of by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .archive.archive import StoredFile
from .archive.manifestfile import Manifest, manifest_name
from .archive.segmentfile import Slot
from .errors import CorruptDataError, GraphError, ModelLostError, Unreadable
from .holders import FileOf, Reason
from .refs import ModelRef
from .segments.segment import SegmentId, Stored
from .shard import ShardState
from .versions.manifest import encode_body


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of the manifests on disk."""

    manifests: Sequence[Manifest]
    """Those that could be read."""
    unread: Mapping[ModelRef, Unreadable] = field(default_factory=dict[ModelRef, Unreadable])
    """Versions, of every home, whose manifests cannot be read -> why."""
    hidden: Mapping[str, Unreadable] = field(default_factory=dict[str, Unreadable])
    """Files that are no version's by their names, and what else stands there -> what it is."""


@dataclass(slots=True)
class _Need:
    """What manifests say of one segment."""

    sizes: dict[int, int] = field(default_factory=dict[int, int])
    bases: dict[int, tuple[Slot, ...]] = field(default_factory=dict[int, tuple[Slot, ...]])
    holders: dict[ModelRef | Reason, Sequence[int]] = field(default_factory=dict[ModelRef | Reason, Sequence[int]])
    dependents: dict[SegmentId, set[int]] = field(default_factory=dict[SegmentId, set[int]])
    """Segments, on any shard, with tensors that are encoded against slots of this one."""
    readers: dict[ModelRef, None] = field(default_factory=dict[ModelRef, None])
    """Versions that cannot be read whole without it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` found."""

    garbage: list[str]
    """Files of this shard's segments that nobody needs."""
    missing: list[tuple[ModelRef, SegmentId]]
    """(version, segment): files of this shard's segments that should be there."""


def recover(
    state: ShardState,
    read: Read,
    files: Mapping[SegmentId, Sequence[StoredFile]],
    home_of: Callable[[str], int],
) -> Recovered:
    """Restore versions and segments into a new state.

    Args:
        state: of the shard that starts.
        read: all manifests that are on disk, of every home.
        files: all segments' files, the newest generation of each first.
        home_of: name -> number of the shard that is its home.
    """
    for ref, why in read.unread.items():
        state.miss(ref, why, home_of(ref.name) == state.index)
    state.hidden.update(read.hidden)
    needs: dict[SegmentId, _Need] = {}
    state.ledger.read((manifest.header, not manifest.retired) for manifest in read.manifests)
    for manifest in read.manifests:
        ref = manifest.header.ref
        if home_of(ref.name) == state.index:
            try:
                state.restore_version(manifest, encode_body(manifest.entries))
            except GraphError as exc:
                state.miss(ref, _no_graph(ref, exc), mine=True)
        _note(state, manifest, needs)
    mine = [(segment, found) for segment, found in files.items() if state.where(segment) == state.index]
    if state.is_blind:
        for segment, _ in mine:
            need = needs.setdefault(segment, _Need())
            need.holders[Reason.UNREAD] = list(need.sizes)
    kept = _restore(state, {segment: need for segment, need in needs.items() if segment in files}, files)
    garbage = [file.name for segment, found in mine for file in (found[1:] if segment in kept else found)]
    garbage = garbage if not state.is_blind else []
    missing = [(reader, s) for s, need in needs.items() if s not in files for reader in need.readers]
    return Recovered(garbage, missing)


def relearn(state: ShardState, manifest: Manifest, files: Mapping[SegmentId, Sequence[StoredFile]]) -> None:
    """Restore what one more manifest names: it was written, by another home, after `recover` had read all there were.

    What the state knows already stays as it is.

    Args:
        state: of a shard that started again.
        manifest: the one.
        files: all segments' files, the newest generation of each first.

    Raises:
        ModelLostError: a file is not there; nothing changes.
    """
    needs: dict[SegmentId, _Need] = {}
    _note(state, manifest, needs)
    new = {segment: need for segment, need in needs.items() if not state.knows_slots(segment, need.sizes)}
    missing = [segment for segment in new if segment not in files]
    if missing:
        raise ModelLostError(
            f"shard {state.index}: expected files of all segments of {manifest.header.ref}; found no files of {missing}"
        )
    _restore(state, new, files)


def take_over(
    state: ShardState, manifests: Iterable[Manifest], files: Mapping[SegmentId, Sequence[StoredFile]]
) -> list[tuple[ModelRef, SegmentId]]:
    """Restore the segments that are this shard's since its topology changed; what the state knows stays as it is.

    Args:
        state: of a shard that started again, and does not know what its earlier incarnation was handed.
        manifests: all that are on disk.
        files: all segments' files, the newest generation of each first.

    Returns:
        (version, segment): files that should be there.
    """
    needs: dict[SegmentId, _Need] = {}
    for manifest in manifests:
        _note(state, manifest, needs)
    new = {segment: need for segment, need in needs.items() if not state.knows_segment(segment)}
    _restore(state, {segment: need for segment, need in new.items() if segment in files}, files)
    return [(reader, s) for s, need in new.items() if s not in files for reader in need.readers]


def readmit(
    state: ShardState, ref: ModelRef, manifest: Manifest | None, files: Mapping[SegmentId, Sequence[StoredFile]]
) -> list[tuple[ModelRef, SegmentId]]:
    """Restore what a manifest names that can be read at last.

    With the last one of these, what the manifests do not name goes.

    Args:
        state: of the shard that could not read it when it started.
        ref: the version.
        manifest: its manifest; None: there is none any more.
        files: all segments' files, the newest generation of each first.

    Returns:
        (version, segment): files that should be there.

    Raises:
        CorruptDataError: its architecture is none; it stays unread.
    """
    needs: dict[SegmentId, _Need] = {}
    if manifest is not None:
        _note(state, manifest, needs)
    _restore(state, {segment: need for segment, need in needs.items() if segment in files}, files)
    try:
        state.found(ref, manifest, encode_body(manifest.entries) if manifest is not None else b"")
    except GraphError as exc:
        raise _no_graph(ref, exc) from exc
    if not state.is_blind:
        state.release(Reason.UNREAD)
    return [(ref, segment) for segment in needs.keys() - files.keys()]


def _no_graph(ref: ModelRef, error: GraphError) -> CorruptDataError:
    return CorruptDataError(f"{manifest_name(ref)}: expected an architecture; found {error}")


def _note(state: ShardState, manifest: Manifest, needs: dict[SegmentId, _Need]) -> None:
    """Gather what a manifest says of the segments that this shard owns."""
    reader = manifest.header.ref
    found: dict[SegmentId, dict[int, int]] = {}
    for entry in manifest.entries.values():
        found.setdefault(entry.segment, {})[entry.slot] = entry.nbytes
    for segment, slots in found.items():
        if state.where(segment) == state.index:
            need = needs.setdefault(segment, _Need())
            need.sizes.update(slots)
            need.holders[reader] = list(slots)
            need.readers[reader] = None
    for place, chain in manifest.bases.items():
        for position, (segment, slot) in enumerate((place, *chain)):
            if state.where(segment) != state.index:
                continue
            need = needs.setdefault(segment, _Need())
            need.readers[reader] = None
            need.sizes[slot] = found[place[0]][place[1]]  # a base has the size of what is encoded against it
            if position < len(chain):
                need.bases[slot] = chain[position:]
            if position > 0:
                dependent = (place, *chain)[position - 1][0]
                need.dependents.setdefault(dependent, set()).add(slot)


def _restore(
    state: ShardState, needs: Mapping[SegmentId, _Need], files: Mapping[SegmentId, Sequence[StoredFile]]
) -> set[SegmentId]:
    """Restore segments with their holders, and give those that have some."""
    for segment, need in needs.items():
        if state.knows_segment(segment):
            state.extend(segment, need.sizes, need.bases)
            continue
        file = files[segment][0]
        sizes = [need.sizes.get(slot, 0) for slot in range(max(need.sizes, default=-1) + 1)]
        slots = frozenset(need.sizes)
        state.recover(segment, sizes, Stored(file.name, file.generation, file.nbytes, slots, need.bases))
    for segment, need in needs.items():
        for holder, held in need.holders.items():
            state.hold(holder, {segment: held})
            if isinstance(holder, ModelRef):
                state.durability.written(holder)
        for dependent, based in need.dependents.items():
            # Also where the dependent's file is missing: it may be back one day.
            state.hold(FileOf(dependent[1]), {segment: sorted(based)})
    return needs.keys() - state.drop_unheld()
