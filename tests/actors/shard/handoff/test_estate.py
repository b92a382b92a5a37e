"""A shard that drains, where the heir refuses."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.shard.handoff.estate import Estate
from tensorvine.planner.topology import Topology
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import StoreFullError
from tensorvine.store.segments.arena import Part

from tests.support.disk import MIB
from tests.support.disklife import Life

SEGMENTS = tuple((0, serial) for serial in range(1, 4))


class Full:
    """The other shards: none has room."""

    topology_after: Topology

    async def tell_long(self, shard: int, method: str, *arguments: Any) -> None:
        raise StoreFullError(f"shard {shard}: no room")


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """A shard with three segments in memory."""
    Archive(str(tmp_path), 1)
    life = Life(tmp_path, again=False)
    for segment in SEGMENTS:
        with life.lock:
            (offset,) = life.holdings.grant("c/s1", [MIB])
            part = Part(offset, MIB)
            life.holdings.memory.part(part)[:] = np.uint8(segment[1])
            life.state.adopt("c/s1", segment, part, [MIB])
            life.holdings.keep(part, segment)
            life.state.hold("m@1", {segment: [0]})
    return life


def test_a_drain_that_is_refused_locks_no_memory_however_long_its_error_is_kept(life: Life) -> None:
    estate = Estate(life.state, life.lock, life.holdings, cast("Any", Full()))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(StoreFullError) as kept:
            asyncio.run(estate.copy(Topology("alone", (1,), "starter")))
        found = [life.state.segment(segment) for segment in SEGMENTS]
        assert not any(life.holdings.memory.is_read(segment.handle) for segment in found if segment is not None)
        del kept
    finally:
        gc.enable()
