"""A real catalog and real shards in this process, without Ray; see `shard_room`."""

from __future__ import annotations

import concurrent.futures
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tensorvine.actors.catalog import catalog as catalog_module
from tensorvine.actors.catalog.catalog import Catalog
from tensorvine.actors.rpc import channel, lease
from tensorvine.actors.rpc.calls import Request as Call
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.catalog_messages import CatalogConfig, Committed
from tensorvine.actors.rpc.messages import Disk, Handed, actor_name, catalog_name
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.planner.topology import Topology
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.graphs.index import PrefixQuery
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.segment import Label, SegmentId
from tensorvine.store.versions.architectures import packed
from tensorvine.store.versions.manifest import TensorEntry, encode_body
from tensorvine.store.versions.slots import packed_slots

from tests.support.direct import DirectLines
from tests.support.shard_room import CLIENT, REPOSITORY, WAIT_S, Room

GRAPH = ModelGraph(())
LARGE = bytes(range(256)) * 1024
"""A tensor that travels in no message."""


class CatalogRoom(Room):
    """A repository whose catalog is real.

    Args:
        shards: how many.
        disk: the path; None: memory only.
        private: folder in the place of the private one.
        replicas: nodes that have each version.
        catalog_node: node of the catalog; those of the shards are "node".
    """

    def __init__(
        self, shards: int, disk: Disk | None, private: Path, replicas: int = 1, catalog_node: str = "node"
    ) -> None:
        super().__init__()
        self.topology = Topology(REPOSITORY, tuple(range(shards)), "", disk.uri if disk else None, replicas)
        self.disk = disk
        self.private = private
        self.catalog_node = catalog_node
        self.again = False
        self.number = secrets.randbits(20)
        self.engine.restarted = lambda: self.again  # type: ignore[attr-defined]
        self.start_catalog()
        for index in range(shards):
            self.start(index, disk=disk, replicas=replicas)

    def start_catalog(self) -> Catalog:
        """Start the catalog; one that ran before is stopped without a word."""
        if self.again:
            self._kill(catalog_name(REPOSITORY))
            self.real._context.lease.end()
        engine: Any = self.engine
        private = mock.patch.object(catalog_module, "private_folder", return_value=str(self.private))
        node = mock.patch.object(engine, "this_node", return_value=self.catalog_node)
        with private, node, mock.patch.object(catalog_module, "_claim"):  # this process has the lock of the path
            self.real = Catalog(engine, CatalogConfig(topology=self.topology, session_s=60.0, disk=self.disk))
        self.again = True
        self._host(catalog_name(REPOSITORY), self.real)
        return self.real

    def kill_shard(self, index: int) -> None:
        """Start a shard anew, whose memory is gone."""
        self._kill(actor_name(REPOSITORY, index))
        self.shards.pop(index)
        self.start(index, disk=self.disk, replicas=self.topology.replicas)

    def _kill(self, name: str) -> None:
        loops = self.engine.actors.pop(name)[1]
        self.loops.remove(loops)
        loops.stop()

    def ask(self, call: Call[Any]) -> Any:
        """Call the catalog."""
        actor, loops = self.engine.actors[catalog_name(REPOSITORY)]
        return loops.run(actor, call.remote.name, call.arguments).result(WAIT_S)

    def request(self) -> Request:
        self.number += 1
        return Request(CLIENT, self.number)

    def commit(self, handed: Handed, name: str = "m", shard: int = 0, parent: ModelRef | None = None) -> Any:
        """Commit at a shard."""
        return self.committing(handed, name, shard, parent).result(WAIT_S)

    def committing(
        self, handed: Handed, name: str = "m", shard: int = 0, parent: ModelRef | None = None
    ) -> concurrent.futures.Future[Any]:
        """Begin to commit at a shard."""
        entries = {
            f"{block.id[1]:x}/{slot}": TensorEntry("uint8", (size,), size, None, block.id, slot)
            for block in handed.blocks
            for slot, size in enumerate(block.sizes)
        }
        draft = replace(
            handed.draft,
            name=name,
            body=encode_body(entries),
            parent=parent,
            architecture=packed((GRAPH.to_json(), None)),
            fingerprints=PrefixQuery.of(GRAPH),
        )
        return self.send(ShardCalls.commit(replace(handed, draft=draft, default_parent=False)), shard)

    def saved(self, *contents: bytes, name: str = "m", shard: int = 0, **named: Any) -> ModelRef:
        """Save one segment of tensors."""
        self.number += 1
        segment = self.segment()
        labels = tuple(Label(slot, f"t{slot}", None, "uint8", (len(one),)) for slot, one in enumerate(contents))
        filled = self.filled(self.number, segment, contents, labels, shard)
        answer = self.commit(self.handed(self.number, [filled], **named), name, shard)
        assert isinstance(answer, Committed), answer
        return answer.ref

    def inheriting(self, parent: ModelRef, *contents: bytes, durable: bool = True) -> Handed:
        """Make a save at shard 0 that brings tensors, inherits all of its parent's, each `LARGE`, and has no graph."""
        self.number += 1
        named: dict[SegmentId, list[int]] = {}
        for segment in self.locate(parent).places:
            known = self.real._context.state.references.get(segment)
            assert known is not None
            named[segment] = known.live()
        labels = tuple(Label(slot, f"own{slot}", None, "uint8", (len(one),)) for slot, one in enumerate(contents))
        block = self.filled(self.number, self.segment(), contents, labels)
        handed = self.handed(self.number, [block], durable=durable)
        entries = {
            f"{segment[1]:x}/{slot}": TensorEntry("uint8", (len(LARGE),), len(LARGE), parent, segment, slot)
            for segment, slots in named.items()
            for slot in slots
        }
        entries |= {
            f"{block.id[1]:x}/{slot}": TensorEntry("uint8", (size,), size, None, block.id, slot)
            for slot, size in enumerate(block.sizes)
        }
        draft = replace(
            handed.draft,
            parent=parent,
            body=encode_body(entries),
            slots=packed_slots({**named, block.id: list(range(len(contents)))}),
        )
        return replace(handed, draft=draft, default_parent=False)

    def retire(self, ref: ModelRef) -> None:
        self.ask(CatalogCalls.retire(self.request(), ref.name, ref.version))

    def locate(self, ref: ModelRef | str) -> Any:
        name, version = (ref, None) if isinstance(ref, str) else (ref.name, ref.version)
        return self.ask(CatalogCalls.locate(CLIENT, name, version, None))

    def read(self, ref: ModelRef) -> list[bytes]:
        """Read all tensors of a version."""
        found: list[bytes] = []
        for segment, (shard, _) in self.locate(ref).places.items():
            known = self.real._context.state.references.get(segment)
            assert known is not None
            found += self.content(segment, known.live(), shard)
        return found


@contextmanager
def catalog_room(
    private: Path, shards: int = 1, disk: Disk | None = None, replicas: int = 1, catalog_node: str = "node"
) -> Iterator[CatalogRoom]:
    """Have a repository with a real catalog."""
    with (
        mock.patch.object(channel, "Lines", DirectLines),
        mock.patch.object(lease, "_await_end", return_value=None),
    ):
        made = CatalogRoom(shards, disk, private, replicas, catalog_node)
        try:
            yield made
        finally:
            made.stop()
            made.real._context.lease.end()
