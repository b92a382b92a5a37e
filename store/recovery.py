"""Bringing a shard's state back from the manifests on disk.

Rules
- The committed manifests say all: which versions there are, which segments they name, and what these need to be read.
  No tensor is touched.
- A shard becomes home to the names that the placement gives it, and owner of the segments whose number says so; both
  follow from the number of shards, which may be another than when the files were written.
- A file that no manifest needs is garbage; so is an older generation of one that has a newer.
- A manifest that names a missing file is reported; its other tensors stay readable.
- A manifest that another shard wrote after this one had read them all is learnt of by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .archive import StoredFile
from .errors import ModelLostError
from .manifest import encode_body
from .manifestfile import Manifest
from .segment import SegmentId, Stored
from .segmentfile import Slot
from .segments import file_holder
from .shard import ShardState


@dataclass(slots=True)
class _Need:
    """What manifests say of one segment."""

    sizes: dict[int, int] = field(default_factory=dict[int, int])
    bases: dict[int, tuple[Slot, ...]] = field(default_factory=dict[int, tuple[Slot, ...]])
    holders: dict[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    dependents: dict[SegmentId, set[int]] = field(default_factory=dict[SegmentId, set[int]])
    """Segments, on any shard, with tensors that are encoded against slots of this one."""
    readers: dict[str, None] = field(default_factory=dict[str, None])
    """Versions that cannot be read whole without it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` found."""

    garbage: list[str]
    """Files of this shard's segments that nobody needs."""
    missing: list[tuple[str, SegmentId]]
    """(version, segment): files of this shard's segments that should be there."""


def recover(
    state: ShardState,
    manifests: Iterable[Manifest],
    files: Mapping[SegmentId, Sequence[StoredFile]],
    home_of: Callable[[str], int],
) -> Recovered:
    """Restore versions and segments into a new state.

    Args:
        state: of the shard that starts.
        manifests: all that are on disk, of every home.
        files: all segments' files, the newest generation of each first.
        home_of: name -> number of the shard that is its home.
    """
    needs: dict[SegmentId, _Need] = {}
    for manifest in manifests:
        if home_of(manifest.header.ref.name) == state.index:
            state.restore_version(manifest, encode_body(manifest.entries))
        _note(state, manifest, needs)
    kept = _restore(state, {segment: need for segment, need in needs.items() if segment in files}, files)
    mine = [(segment, found) for segment, found in files.items() if state.where(segment) == state.index]
    garbage = [file.name for segment, found in mine for file in (found[1:] if segment in kept else found)]
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
    new = {segment: need for segment, need in needs.items() if not state.knows_segment(segment)}
    missing = [segment for segment in new if segment not in files]
    if missing:
        raise ModelLostError(
            f"shard {state.index}: expected files of the segments that {manifest.header.ref} names; {missing} have none"
        )
    _restore(state, new, files)


def _note(state: ShardState, manifest: Manifest, needs: dict[SegmentId, _Need]) -> None:
    """Gather what a manifest says of the segments that this shard owns."""
    reader = str(manifest.header.ref)
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
        file = files[segment][0]
        sizes = [need.sizes.get(slot, 0) for slot in range(max(need.sizes) + 1)]
        slots = frozenset(need.sizes)
        state.recover(segment, sizes, Stored(file.name, file.generation, file.nbytes, slots, need.bases))
    for segment, need in needs.items():
        for holder, held in need.holders.items():
            state.hold(holder, {segment: held})
        for dependent, based in need.dependents.items():
            # Also where the dependent's file is missing: it may be back one day.
            state.hold(file_holder(dependent), {segment: sorted(based)})
    return needs.keys() - state.drop_unheld()
