"""What was read from the disk for a reader stays in the memory until that reader has locked it; without Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.memory.memory import MemoryView, SharedMemory
from tensorvine.actors.shard.parts import reads as module
from tensorvine.actors.shard.parts.reads import Reads
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import header_of
from tensorvine.store.segments.segment import Block

from tests.support.disk import MIB, noise
from tests.support.disklife import Life, note, put

SEGMENT, NBYTES = (0, 1), MIB
WAIT_S = 60.0


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """A shard that has one segment, on disk only."""
    archive = Archive(str(tmp_path), 1)
    put(archive, SEGMENT, {0: noise(NBYTES)})
    note(archive, ModelRef("m", 1), [(1, 0, NBYTES)])
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    return Life(tmp_path, again=False)


def stays(life: Life) -> bool:
    """Tell whether the segment cannot leave the memory."""
    with life.lock:
        return not list(life.segment_memory._leaving())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def read(life: Life) -> Block:
    unused: Any = None
    reads = Reads(
        life.context,
        admission=life.room,
        history=life.history,
        names=unused,
        senders=unused,
        rendezvous=unused,
        exports=unused,
    )
    return (await reads.blocks({SEGMENT: [0]}))[SEGMENT]


def test_it_stays_until_the_reader_has_locked_it(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Part] = []
    is_read_by_others = SharedMemory.is_read_by_others

    def counted(memory: SharedMemory, part: Part) -> bool:
        looks.append(part)
        return is_read_by_others(memory, part)

    monkeypatch.setattr(SharedMemory, "is_read_by_others", counted)
    memory = life.segment_memory.memory

    async def scene() -> None:
        block = await read(life)
        await until(lambda: len(looks) >= 10)
        assert stays(life)
        view = MemoryView(os.getpid(), memory.fd, memory.file, memory.capacity)
        found = view.read(cast(Part, block.handle), header_of(SEGMENT, block.generation))
        assert found is not None
        await until(lambda: not memory._locks._held)
        assert stays(life)  # the reader has it
        assert np.array_equal(found[:NBYTES], noise(NBYTES))
        del found
        view.close()
        assert not stays(life)

    asyncio.run(scene())


def test_a_shard_without_a_lease_tells_no_places(life: Life) -> None:
    """A reader that has the memory of the next incarnation would look there for them, until its timeout."""
    tenure: Any = life.context.tenure
    tenure.holds = False
    with pytest.raises(ShardUnavailableError, match="there is no lease"):
        asyncio.run(read(life))


def test_a_reader_that_never_locks_it_keeps_nothing_for_long(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.01)

    async def scene() -> None:
        await read(life)
        await until(lambda: not stays(life))

    asyncio.run(scene())


def test_it_is_released_to_a_reader_of_the_shards_own_process(life: Life) -> None:
    """The server that sends blocks to other nodes."""

    async def scene() -> None:
        block = await read(life)
        assert isinstance(block.handle, Part)
        sent = life.segment_memory.memory.read(block.handle)
        await until(lambda: [len(held) for held in life.segment_memory.memory._locks._held.values()] == [1])
        assert stays(life)
        del sent
        assert not stays(life)

    asyncio.run(scene())
