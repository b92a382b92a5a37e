"""Starting from what is on disk: random histories of manifests, and any number of shards before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.store.archive.archive import StoredFile
from tensorvine.store.archive.manifestfile import Manifest, decode_manifest, encode_manifest
from tensorvine.store.errors import ModelLostError, ModelNotFoundError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.recovery import Read, Recovered, recover, relearn
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import Header, TensorEntry, decode_body, encode_body

NAMES = ("a", "b/c", "dd")
GRAPH = ModelGraph(()).to_json()
Place = tuple[int, int]
"""Serial number of a segment, and slot: whatever the number of shards."""


@dataclass
class Version:
    """A version of a drawn history."""

    ref: ModelRef
    parent: ModelRef | None
    tensors: dict[Place, int]
    """Where its tensors are -> their sizes."""
    retired: bool = False


@dataclass
class Disk:
    """A drawn history and its files."""

    versions: list[Version] = field(default_factory=list[Version])
    bases: dict[Place, tuple[Place, ...]] = field(default_factory=dict[Place, tuple[Place, ...]])
    generations: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Serial number -> generations of which there is a file, the newest first."""

    def live(self) -> list[Version]:
        return [version for version in self.versions if not version.retired]

    def chain(self, place: Place) -> tuple[Place, ...]:
        """Return a place and what it is encoded against."""
        return (place, *self.bases.get(place, ()))

    def readers(self) -> dict[int, set[ModelRef]]:
        """Give, for each segment that live versions need, these versions."""
        found: dict[int, set[ModelRef]] = {}
        for version in self.live():
            for place in version.tensors:
                for serial, _ in self.chain(place):
                    found.setdefault(serial, set()).add(version.ref)
        return found

    def contents(self, shards: int) -> list[bytes]:
        """Write the manifests, as a repository of so many shards does."""

        def at(serial: int) -> SegmentId:
            return serial % shards, serial

        def manifest(version: Version) -> Manifest:
            header = Header(
                ref=version.ref,
                parent=version.parent,
                quality=None,
                metadata="{}",
                created_ns=version.ref.version,
                graph_key=b"key",
                bytes_owned=1,
                bytes_total=2,
            )
            entries = {
                f"t{serial}/{slot}": TensorEntry("uint8", (size,), size, None, at(serial), slot)
                for (serial, slot), size in version.tensors.items()
            }
            bases = {
                (at(place[0]), place[1]): tuple((at(serial), slot) for serial, slot in self.bases[place])
                for place in version.tensors
                if place in self.bases
            }
            return Manifest(header, (GRAPH, None), entries, bases, version.retired)

        return [encode_manifest(manifest(version), {}) for version in self.versions]

    def files(self, shards: int) -> dict[SegmentId, list[StoredFile]]:
        return {
            (serial % shards, serial): [StoredFile(name_of(serial, g), g, 1000 * serial + g) for g in generations]
            for serial, generations in self.generations.items()
            if generations
        }


def name_of(serial: int, generation: int) -> str:
    return f"segments/{serial:x}.{generation}.arrow"


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    disk = Disk()
    sizes: dict[Place, int] = {}
    for count in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(NAMES))
        number = 1 + max((v.ref.version for v in disk.versions if v.ref.name == name), default=0)
        parent = draw(st.none() | st.sampled_from(disk.versions)) if disk.versions else None
        version = Version(ModelRef(name, number + draw(st.integers(0, 2))), parent.ref if parent else None, {})
        if parent is not None and parent.tensors:
            for place in draw(st.sets(st.sampled_from(sorted(parent.tensors)))):
                version.tensors[place] = sizes[place]
        for part in range(draw(st.integers(0, 2))):
            serial = 10 * count + 3 * part + draw(st.integers(1, 3))
            disk.generations[serial] = draw(st.sampled_from([[0], [0], [4], [2, 0]]))
            for slot in draw(st.sets(st.integers(0, 4), min_size=1)):
                older = sorted(p for p in (parent.tensors if parent else ()) if len(disk.chain(p)) < 4)
                base = draw(st.none() | st.sampled_from(older)) if older else None
                if base is not None:
                    disk.bases[serial, slot] = disk.chain(base)
                sizes[serial, slot] = sizes[base] if base else draw(st.integers(0, 99))
                version.tensors[serial, slot] = sizes[serial, slot]
        disk.versions.append(version)
    for version in disk.versions:
        version.retired = draw(st.booleans())
    for serial in draw(st.sets(st.integers(100, 110), max_size=3)):
        disk.generations[serial] = [0]  # of saves that never ended
    return disk


def start(disk: Disk, before: int, after: int) -> tuple[list[ShardState], list[Recovered]]:
    """Recover all shards of a repository from what one with another number of shards wrote."""
    contents = disk.contents(before)
    states: list[ShardState] = []
    found: list[Recovered] = []
    for index in range(after):
        state = ShardState(index, lambda name: home_of(name, after))
        manifests = [decode_manifest(content, "here", after) for content in contents]
        found.append(recover(state, Read(manifests), disk.files(after), lambda name: home_of(name, after)))
        states.append(state)
    return states, found


def home_of(name: str, shards: int) -> int:
    return len(name) % shards


def deliver(states: list[ShardState]) -> None:
    """Carry messages between shards until there are none."""
    while any(state.outbox for state in states):
        for state in states:
            outbox, state.outbox = state.outbox, []
            for shard, holder in outbox:
                states[shard].release(holder)


def grouped(tensors: Mapping[Place, int], index: int, shards: int) -> dict[SegmentId, list[int]]:
    found: dict[SegmentId, list[int]] = {}
    for serial, slot in sorted(tensors):
        if serial % shards == index:
            found.setdefault((index, serial), []).append(slot)
    return found


counts = st.integers(1, 4)
few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class TestRecovery:
    @given(disk=disks(), before=counts, after=counts)
    @few
    def test_every_version_is_back_at_its_home(self, disk: Disk, before: int, after: int) -> None:
        states, _ = start(disk, before, after)
        parents = {version.ref: version.parent for version in disk.versions}
        named: set[ModelRef | None] = set()
        for ref in (version.ref for version in disk.versions if not version.retired):
            while ref not in named:
                named.add(ref)
                ref = parents.get(ref)
        for state in states:
            mine = [version for version in disk.versions if home_of(version.ref.name, after) == state.index]
            assert state.models() == sorted(version.ref for version in mine if not version.retired)
            for version in mine:
                expected = [version.ref, version.parent] if version.parent else [version.ref]
                assert state.lineage.chain(version.ref)[:2] == (expected if version.ref in named else [version.ref])
                if version.retired:
                    with pytest.raises(ModelNotFoundError, match="was retired"):
                        state.resolve(version.ref.name, version.ref.version)
                    continue
                table = decode_body(state.record(version.ref.name, version.ref.version, "c").body, version.ref)
                assert {(e.segment, e.slot): e.nbytes for e in table.values()} == {
                    ((serial % after, serial), slot): size for (serial, slot), size in version.tensors.items()
                }

    @given(disk=disks(), before=counts, after=counts)
    @few
    def test_segments_have_the_holders_sizes_and_files_that_the_manifests_say(
        self, disk: Disk, before: int, after: int
    ) -> None:
        states, found = start(disk, before, after)
        needed = {place for version in disk.live() for tensor in version.tensors for place in disk.chain(tensor)}
        sizes = {place: size for version in disk.versions for place, size in version.tensors.items()}
        for state, recovered in zip(states, found, strict=True):
            state.check()
            assert recovered.missing == []
            mine = {place for place in needed if place[0] % after == state.index}
            assert set(state._segments) == {(state.index, serial) for serial, _ in mine}
            for version in disk.live():
                assert state.held(version.ref) == grouped(version.tensors, state.index, after)
            for segment_id, segment in state._segments.items():
                serial = segment_id[1]
                assert set(segment.live_slots) == {slot for other, slot in mine if other == serial}
                assert all(segment.sizes[slot] == sizes[serial, slot] for slot in segment.live_slots)
                assert segment.handle is None
                assert segment.absent(segment.live_slots) == segment.live_slots
                assert segment.stored is not None
                assert segment.stored.name == name_of(serial, disk.generations[serial][0])
                assert segment.stored.bases == {
                    slot: tuple(((base % after, base), at) for base, at in disk.bases[serial, slot])
                    for slot in segment.live_slots
                    if (serial, slot) in disk.bases
                }
            stats = state.stats()
            assert (stats.tensors, stats.bytes_memory, stats.bytes_allocated) == (len(mine), 0, 0)
            newest = {serial: disk.generations[serial][0] for serial, _ in mine}
            assert stats.bytes_disk == sum(1000 * serial + generation for serial, generation in newest.items())
            files = {
                name_of(serial, g)
                for serial, gs in disk.generations.items()
                if serial % after == state.index
                for g in gs
            }
            assert set(recovered.garbage) == files - {name_of(serial, g) for serial, g in newest.items()}
            assert len(recovered.garbage) == len(set(recovered.garbage))

    @given(disk=disks(), before=counts, after=counts, data=st.data())
    @few
    def test_manifests_that_come_after_the_start_are_learnt_of_as_if_they_had_been_there(
        self, disk: Disk, before: int, after: int, data: st.DataObject
    ) -> None:
        whole, _ = start(disk, before, after)
        late = data.draw(st.sets(st.sampled_from(range(len(disk.versions))))) if disk.versions else set()
        contents = disk.contents(before)
        for expected in whole:
            state = ShardState(expected.index, lambda name: home_of(name, after))
            manifests = [decode_manifest(content, "here", after) for content in contents]
            others = [manifest for manifest in manifests if home_of(manifest.header.ref.name, after) != state.index]
            coming = [others[at] for at in late if at < len(others)]
            early = [manifest for manifest in manifests if manifest not in coming]
            recover(state, Read(early), disk.files(after), lambda name: home_of(name, after))
            for manifest in (*coming, *coming):
                relearn(state, manifest, disk.files(after))
            state.check()
            assert state._segments.keys() >= expected._segments.keys()
            for version in disk.live():
                named = grouped(version.tensors, state.index, after)
                assert state.held(version.ref).keys() <= named.keys()
                assert state._segments.keys() >= named.keys()

    def test_a_manifest_that_names_a_missing_file_is_not_learnt_of(self) -> None:
        entry = TensorEntry("float32", (2,), 8, None, (0, 1), 0)
        header = Header(
            ref=ModelRef("a", 1),
            parent=None,
            quality=None,
            metadata="{}",
            created_ns=1,
            graph_key=b"key",
            bytes_owned=1,
            bytes_total=1,
        )
        state = ShardState(0, lambda name: 1)
        with pytest.raises(ModelLostError, match=r"shard 0: expected files of all segments of a@1; found no files of"):
            relearn(state, Manifest(header, (GRAPH, None), {"t": entry}, {}), {})
        assert not state._segments

    @given(disk=disks(), before=counts, after=counts, data=st.data())
    @few
    def test_files_outlive_the_versions_that_need_them_and_no_longer(
        self, disk: Disk, before: int, after: int, data: st.DataObject
    ) -> None:
        states, _ = start(disk, before, after)
        for version in data.draw(st.permutations(disk.live())):
            states[home_of(version.ref.name, after)].retire(version.ref)
            version.retired = True
            deliver(states)
            needed = set(disk.readers())
            assert {serial for state in states for _, serial in state._segments} == needed
            for state in states:
                state.check()
        dead = [name for state in states for name in state.dead_files]
        assert len(set(dead)) == len(dead)

    @given(disk=disks(), before=counts, after=counts, data=st.data())
    @few
    def test_a_missing_file_is_reported_for_each_version_that_needs_it(
        self, disk: Disk, before: int, after: int, data: st.DataObject
    ) -> None:
        readers = disk.readers()
        if not readers:
            return
        gone = data.draw(st.sets(st.sampled_from(sorted(readers)), min_size=1))
        for serial in gone:
            disk.generations[serial] = []
        states, found = start(disk, before, after)
        missing = [entry for recovered in found for entry in recovered.missing]
        assert sorted(missing) == sorted((ref, (s % after, s)) for s in gone for ref in readers[s])
        named = {serial for version in disk.live() for serial, _ in version.tensors} - gone
        assert named <= {serial for state in states for _, serial in state._segments}
        garbage = {name for recovered in found for name in recovered.garbage}
        assert not garbage & {name_of(serial, disk.generations[serial][0]) for serial in named}
        for state in states:
            state.check()
            assert state.models() == sorted(v.ref for v in disk.live() if home_of(v.ref.name, after) == state.index)

    @given(disk=disks(), before=counts, after=counts)
    @few
    def test_numbers_of_versions_are_not_used_again(self, disk: Disk, before: int, after: int) -> None:
        states, _ = start(disk, before, after)
        for name in {version.ref.name for version in disk.versions}:
            state = states[home_of(name, after)]
            state.open("c", 0.0)
            highest = max(version.ref.version for version in disk.versions if version.ref.name == name)
            manifest = Manifest(
                Header(
                    ref=ModelRef(name, highest + 1),
                    parent=None,
                    quality=None,
                    metadata="{}",
                    created_ns=1,
                    graph_key=b"key",
                    bytes_owned=0,
                    bytes_total=0,
                ),
                (GRAPH, None),
                {},
                {},
            )
            assert state._names[name].next_version == highest + 1
            state.restore_version(manifest, encode_body({}))
            assert state.resolve(name, None) == ModelRef(name, highest + 1)

    def test_nothing_on_disk_is_an_empty_shard(self) -> None:
        (state,), (found,) = start(Disk(), 1, 1)
        assert found == Recovered([], [])
        assert state.models() == []
        assert state.stats().bytes_disk == 0
