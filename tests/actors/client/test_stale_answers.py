"""Answers that are of another version, or of another shard, than the client thought: what it gives is still right."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client.fetch.transports import SharedMemoryTransport
from tensorvine.actors.memory.memory import MemoryView, SharedMemory
from tensorvine.store import Layer, ModelGraph
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import HEADER_BYTES, header_of
from tensorvine.store.segments.segment import Block

from tests.support.disk import same, start

SIZE = 50_000


def full(value: float) -> np.ndarray:
    return np.full(SIZE, value, np.float32)


@pytest.mark.timeout(240)
class TestTheLatestVersionIsAnotherThanTheClientKnew:
    def test_its_tensors_on_disk_are_read_and_not_what_lies_before_a_block(
        self, cluster: object, tmp_path: Path
    ) -> None:
        """The version that was known and the new one have slots of one segment, of which only some are in memory."""
        graph = ModelGraph([Layer("a", {}, (), ("a",)), Layer("b", {}, ("a",), ("b",))])
        first = {"a": full(1), "b": full(2)}
        with start(tmp_path) as repo:
            repo.save("m", first, graph=graph)
            repo.save("m", {"a": full(1), "b": full(3)}, graph=graph)
            repo.save("m", {"a": full(1), "b": full(4)}, graph=graph)
            repo.flush()
        with start(tmp_path) as repo, Repository.connect(repo.name) as reader:
            assert same(reader.load("m"), {"a": full(1), "b": full(4)})
            repo.save("m", {}, graph=graph, parent="m@1", inherit={"a": "a", "b": "b"})
            assert same(reader.load("m"), first)

    @pytest.mark.parametrize("tensors", [None, ["backbone", "head"]], ids=["all", "chosen"])
    def test_a_new_head_on_a_frozen_backbone_whose_old_head_was_retired(
        self, repository: Repository, tensors: list[str] | None
    ) -> None:
        with Repository.connect(repository.name) as reader:
            backbone = full(1)
            for turn in range(4):
                new = {"backbone": backbone, "head": full(10 + turn)}
                saved = repository.save("m", new)
                if turn:
                    repository.retire(f"m@{saved.ref.version - 1}")
                assert same(reader.load("m", tensors=tensors), new)


def mapping(*memories: SharedMemory) -> Any:
    """Return a session that has mapped the memories of so many shards."""
    views = [MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20) for memory in memories]
    return SimpleNamespace(connections=SimpleNamespace(present=lambda shard: SimpleNamespace(view=views[shard])))


class TestTheShardThatAnswered:
    def test_is_the_one_that_is_mapped(self) -> None:
        """While a shard drains, it answers with blocks of its own that by the new topology are another shard's."""
        memories = [SharedMemory(1 << 20) for _ in range(2)]
        session = mapping(*memories)
        part, segment = Part(HEADER_BYTES, 4096), (0, 7)
        memories[0].part(part)[:] = 5
        memories[0].label(part, header_of(segment, 3))
        way = SharedMemoryTransport(session)
        found = way.lock(segment, Block(part, (0,), 3, shard=0))
        assert found is not None
        assert (found == 5).all()
        del found
        assert way.lock(segment, Block(part, (0,), 3, shard=1)) is None

    def test_a_block_of_an_earlier_life_of_a_shard_is_not_taken_for_one_of_this(self) -> None:
        memory = SharedMemory(1 << 20)
        session = mapping(memory)
        part, segment = Part(HEADER_BYTES, 4096), (0, 7)
        memory.label(part, header_of(segment, 4))
        assert SharedMemoryTransport(session).lock(segment, Block(part, (0,), 3, shard=0)) is None
