"""One shard's memory and disk in this process, without Ray, other shards or clients; and files for it to bring back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tensorvine.actors.rpc.messages import Disk, RecoveryInfo
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.disk.history import History
from tensorvine.planner.topology import Topology
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.ledger import Told
from tensorvine.store.versions.manifest import Header, TensorEntry
from tensorvine.store.versions.retention import Retention

from tests.support.contexts import context_of, with_memory
from tests.support.crash import tensor_of
from tests.support.disk import MIB

CAPACITY = 8 * MIB
GRAPH = ModelGraph(()).to_json()
ALONE = Topology("alone", (0,), "starter")


class Alone:
    """The other shards, where there are none."""

    others: tuple[int, ...] = ()

    def __init__(self, topology: Topology) -> None:
        self.topology = topology


class Life:
    """One life of a shard on a path: what it brings back, and what it does there."""

    def __init__(
        self, path: Path, again: bool, keep: Retention | None = None, topology: Topology = ALONE, home: int = 0
    ) -> None:
        self.state = ShardState(0, lambda name: home)
        self.state.where = topology.where
        self.state.open("c", 0.0)
        self.peers = Alone(topology)
        recovery_info = RecoveryInfo(self.peers.topology, (), Told({}), {}) if again else None
        self.context = with_memory(context_of(self.state, self.peers, recovery_info=recovery_info, capacity=CAPACITY))
        self.lock = self.context.lock
        self.segment_memory = self.context.segment_memory
        self.history = History(self.context, Disk(str(path), None, None, keep), self.settle)
        self.room = Admission(self.context, cast("Any", None), self.history.persister)

    def settle(self) -> None:
        with self.lock:
            self.segment_memory.settle()

    def retire(self, ref: ModelRef) -> None:
        """Make a version cease to exist in memory, and carry out what follows."""
        with self.lock:
            self.state.retire(ref)
            self.history.tidy()
        self.history.persister._deleter.submit(int).result(60)  # what was to be deleted is

    def content(self, ref: ModelRef) -> list[bytes]:
        """Read a version's tensors from disk."""
        return [
            content for segment, slots in self.state.held(ref).items() for content in self.content_of(segment, slots)
        ]

    def content_of(self, segment: SegmentId, slots: Sequence[int]) -> list[bytes]:
        """Read tensors of a segment from disk."""
        found: list[bytes] = []
        for slot in slots:
            known = self.state.segment(segment)
            assert known is not None
            array = self.history._tiers._read((segment, slot), known.sizes[slot])
            assert array is not None
            found.append(array.tobytes())
        return found


def put(archive: Archive, segment: SegmentId, arrays: Mapping[int, np.ndarray], generation: int = 0) -> None:
    """Write a segment's file."""
    tensors = [tensor_of(slot, f"t{slot}", array) for slot, array in arrays.items()]
    archive.write_segment(segment, generation, *encode_tensors(None, tensors))


def note(archive: Archive, ref: ModelRef, places: Sequence[tuple[int, int, int]], maker: int = 0) -> None:
    """Write a version's manifest: its tensors' (serial, slot, bytes)."""
    entries = {f"t{s}.{i}": TensorEntry("uint8", (n,), n, None, (maker, s), i) for s, i, n in places}
    header = Header(
        ref=ref,
        parent=None,
        quality=None,
        metadata="{}",
        created_ns=ref.version,
        graph_key=b"key",
        bytes_owned=1,
        bytes_total=1,
    )
    archive.write_manifest(Manifest(header, (GRAPH, None), entries, {}), {})
