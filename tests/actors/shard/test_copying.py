"""Segments that one shard copies from another, over a real wire, without an engine: what arrives, and what fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.calls.copies import Address, Original
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.copying import Copied, Copying, length_of, original_of, with_bytes
from tensorvine.actors.shard.segment_memory import INLINE_BYTES
from tensorvine.actors.shard.serving.block_server import BlockServer
from tensorvine.actors.transport.frames import message
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    ShardUnavailableError,
    StoreFullError,
    TensorVineError,
)
from tensorvine.store.holders import Request
from tensorvine.store.segments.arena import KEPT, Part
from tensorvine.store.segments.blockheader import HEADER_BYTES
from tensorvine.store.segments.segment import SegmentId, layout
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import digest_of

from tests.support.contexts import context_of
from tests.support.tcp import impostor

SIZES = (3 * INLINE_BYTES, 5, INLINE_BYTES + 1)
SEGMENT, SMALL = (0, 1), (0, 2)
SMALL_SIZES = (7, 9)
SOURCE, TARGET = 0, 1
WAIT_S = 60.0


@dataclass(frozen=True)
class Pair:
    """A shard that has two segments, and one that copies them."""

    source: ShardContext
    target: ShardContext
    copying: Copying
    content: Mapping[SegmentId, list[bytes]]

    def originals(self, served: bool = True) -> dict[SegmentId, Original]:
        found: dict[SegmentId, Original] = {}
        with self.source.lock:
            for segment_id in (SEGMENT, SMALL):
                segment = self.source.state.segment(segment_id)
                if segment is not None:
                    original, view = (
                        original_of(segment, self.source.segment_memory),
                        self.source.segment_memory.view(segment),
                    )
                    found[segment_id] = (
                        original if served or view is None else with_bytes(original, view, segment.offsets)
                    )
        return found

    def copy(self, address: Address | None, originals: dict[SegmentId, Original]) -> dict[SegmentId, list[bytes]]:
        """Copy segments, and return what is in the copies while they last."""

        async def scene() -> dict[SegmentId, list[bytes]]:
            async with self.copying.copied(self.copying.owner("test"), originals, address, WAIT_S) as copies:
                return {segment: self.read(copy) for segment, copy in copies.items()}

        return asyncio.run(scene())

    def read(self, copy: Copied) -> list[bytes]:
        in_memory = isinstance(copy.handle, Part)
        assert in_memory == (length_of(Original(copy.sizes, copy.slots, None)) > INLINE_BYTES)
        block = (
            self.target.segment_memory.memory.read(copy.handle) if in_memory else np.frombuffer(copy.handle, np.uint8)
        )
        starts, _ = layout([copy.sizes[slot] for slot in copy.slots])
        return [bytes(block[at : at + copy.sizes[slot]]) for slot, at in zip(copy.slots, starts, strict=True)]

    @property
    def taken(self) -> int:
        """Bytes of the target's memory that somebody has."""
        segment_memory = self.target.segment_memory
        return segment_memory.bytes_filling + segment_memory._bytes_of(KEPT)

    def let_go(self, segment: SegmentId, slot: int) -> None:
        """A slot is freed, and the segment is compacted."""
        with self.source.lock:
            self.source.state.free({segment: [slot]})
            self.source.segment_memory._compact(segment)
            self.source.state.residents.compactable.clear()


@pytest.fixture
def pair() -> Iterator[Pair]:
    random, content = np.random.default_rng(7), dict[SegmentId, list[bytes]]()
    source = context_of(ShardState(SOURCE, 1))
    for segment, sizes in ((SEGMENT, SIZES), (SMALL, SMALL_SIZES)):
        content[segment] = [random.integers(0, 256, size, np.uint8).tobytes() for size in sizes]
        starts, length = layout(sizes)
        block = np.zeros(length, np.uint8)
        for start, tensor in zip(starts, content[segment], strict=True):
            block[start : start + len(tensor)] = np.frombuffer(tensor, np.uint8)
        with source.lock:
            handle: Any = block.tobytes()
            if length > INLINE_BYTES:
                (offset,) = source.segment_memory.grant(Request("c", 1), [length])
                handle = Part(offset, length)
                source.segment_memory.memory.part(handle)[:] = block
            source.state.stage(Request("c", 1), segment, handle, sizes)
            if isinstance(handle, Part):
                source.segment_memory.keep(handle, segment)
            source.state.commit(Request("c", 1), {segment: range(len(sizes))})
    block_server = BlockServer(source)
    source.tcp_address = block_server.address
    target = context_of(ShardState(TARGET, 1))
    yield Pair(source, target, Copying(target, Admission(target, cast("Any", None), None)), content)
    block_server._server.close()


@pytest.mark.parametrize("served", [True, False])
def test_what_arrives_is_what_the_source_has_and_the_memory_goes_back(pair: Pair, served: bool) -> None:
    originals = pair.originals(served)
    assert [original.data is None for original in originals.values()] == [served, False]
    assert pair.copy(pair.source.tcp_address if served else None, originals) == pair.content
    assert pair.taken == 0


def test_what_a_compaction_left_arrives(pair: Pair) -> None:
    pair.let_go(SEGMENT, 0)
    originals = pair.originals()
    assert originals[SEGMENT].slots == (1, 2)
    assert pair.copy(pair.source.tcp_address, originals)[SEGMENT] == pair.content[SEGMENT][1:]


def lost(pair: Pair) -> tuple[Address | None, dict[SegmentId, Original]]:
    originals = pair.originals()
    pair.let_go(SEGMENT, 0)
    return pair.source.tcp_address, originals


def silent(pair: Pair) -> tuple[Address | None, dict[SegmentId, Original]]:
    assert pair.source.tcp_address is not None
    return (*pair.source.tcp_address[:2], "another token"), pair.originals()


def nowhere(pair: Pair) -> tuple[Address | None, dict[SegmentId, Original]]:
    return None, pair.originals()


def too_large(pair: Pair) -> tuple[Address | None, dict[SegmentId, Original]]:
    size = 2 * pair.target.config.capacity
    return pair.source.tcp_address, {SEGMENT: Original((size,), (0,), None)}


@pytest.mark.parametrize(
    ("case", "error"),
    [(lost, ModelLostError), (silent, TensorVineError), (nowhere, ShardUnavailableError), (too_large, StoreFullError)],
)
def test_what_fails_leaves_no_memory_taken(pair: Pair, case: Any, error: type[TensorVineError]) -> None:
    address, originals = case(pair)
    with pytest.raises(error):
        pair.copy(address, originals)
    assert pair.taken == 0


def shortened(sizes: list[int]) -> list[int]:
    return [sizes[0] - 64, *sizes[1:]]


def longer(sizes: list[int]) -> list[int]:
    return [*sizes[:-1], sizes[-1] + (1 << 16)]


def moved(sizes: list[int]) -> list[int]:
    """As many bytes in all."""
    return [sizes[0] + 64, sizes[1], sizes[2] - 64]


@pytest.mark.parametrize("change", [shortened, longer, moved])
def test_an_answer_of_other_sizes_writes_nothing(pair: Pair, change: Any) -> None:
    """A source that lies; the memory beside the part has another's bytes."""
    arena = pair.target.segment_memory.memory._blocks
    with pair.target.lock:
        arena[:] = 7
    sizes = change(list(SIZES))
    originals = {SEGMENT: pair.originals()[SEGMENT]}
    answer = message({"rows": [[SEGMENT, [0, 1, 2], sizes]]})
    refused = pytest.raises(CorruptDataError, match=r"segment \(0, 1\): expected \(slot, bytes\) .*; found")
    with impostor(answer, bytes(layout(sizes)[1])) as address, refused:
        pair.copy((*address, "token"), originals)
    assert pair.taken == 0
    headers = HEADER_BYTES  # cleared where the part was taken back
    assert np.count_nonzero(arena != 7) <= headers


def test_slots_in_another_order_are_refused(pair: Pair) -> None:
    originals = {SEGMENT: pair.originals()[SEGMENT]}
    answer = message({"rows": [[SEGMENT, [1, 0, 2], [SIZES[1], SIZES[0], SIZES[2]]]]})
    with impostor(answer, bytes(layout(SIZES)[1])) as address, pytest.raises(CorruptDataError, match=r"\(0, 1\)"):
        pair.copy((*address, "token"), originals)
    assert pair.taken == 0


@pytest.mark.parametrize("sent", [0, 1, SIZES[0], layout(SIZES)[1] - 1])
def test_a_source_that_ends_within_the_bytes_leaves_no_copy(pair: Pair, sent: int) -> None:
    originals = {SEGMENT: pair.originals()[SEGMENT]}
    answer = message({"rows": [[SEGMENT, [0, 1, 2], list(SIZES)]]})
    with (
        impostor(answer, bytes(sent)) as address,
        pytest.raises(ShardUnavailableError, match="expected a whole answer"),
    ):
        pair.copy((*address, "token"), originals)
    assert pair.taken == 0


def test_memory_that_is_still_being_filled_is_not_granted_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for the copy has gone; the thread that reads it has not noticed yet."""
    begun, go_on = threading.Event(), threading.Event()
    real = TcpClient.read

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(WAIT_S)
        return real(*arguments)

    async def given_up() -> None:
        task = asyncio.create_task(asyncio.to_thread(pair.copy, pair.source.tcp_address, pair.originals()))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        with pair.target.lock:
            (owner,) = pair.target.segment_memory._arena.owners()
            pair.target.segment_memory.drop_grants(owner)
            size = pair.target.config.capacity - INLINE_BYTES
            assert not pair.target.segment_memory.grant(Request("c", 9), [size])
        go_on.set()
        await task
        with pair.target.lock:
            assert pair.target.segment_memory.grant(Request("c", 9), [size])

    monkeypatch.setattr(TcpClient, "read", slow)
    asyncio.run(given_up())


def test_what_is_sent_has_its_own_hashes_though_the_segment_is_read_again_with_other_bytes(pair: Pair) -> None:
    """As a lossy codec gives them, where the segment leaves the memory while it is sent."""
    with pair.source.lock:
        for segment_id in (SEGMENT, SMALL):
            pair.source.segment_memory.hashing.later(segment_id)
    wait(pair.source.segment_memory.hashing.futures([SEGMENT, SMALL]))
    server = BlockServer(pair.source)
    try:
        served, hashes = server._answer({SEGMENT: [0, 2], SMALL: [1]}, WAIT_S, True)
        assert hashes is not None
        with pair.source.lock:
            state, memory = pair.source.state, pair.source.segment_memory
            segment, kept = state.segment(SEGMENT), state.digests([SMALL])[SMALL]
            assert segment is not None
            length = layout(SIZES)[1]
            (offset,) = memory.grant(Request("c", 2), [length])
            again = Part(offset, length)
            memory.memory.part(again)[:] = 7
            assert state.residents.move(SEGMENT, segment.generation, again, segment.offsets, length)
            memory.keep(again, SEGMENT)
            memory.settle()
            state.set_digests(SEGMENT, ["other"] * len(SIZES))
        found = hashes()
    finally:
        server._server.close()
    for slot, (start, nbytes) in served[SEGMENT].slots.items():
        sent = served[SEGMENT].block[start : start + nbytes]
        assert sent.tobytes() == pair.content[SEGMENT][slot]
        assert found[SEGMENT][slot] == digest_of(sent)
    assert found[SMALL] == kept
