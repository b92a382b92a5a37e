"""Segments that one shard copies from another, over a real wire, without an engine: what arrives, and what fails."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.calls.copies import Address, Original
from tensorvine.actors.shard.calls.replicas import ReplicaOf
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.copying import Copying, original_of, with_bytes
from tensorvine.actors.shard.handoff.segment_handoff import SegmentHandoff
from tensorvine.actors.shard.replicas import restore
from tensorvine.actors.shard.replicas.replica_store import ReplicaStore
from tensorvine.actors.shard.segment_memory import INLINE_BYTES
from tensorvine.actors.shard.serving.block_server import BlockServer
from tensorvine.actors.transport.frames import Row, Served, message
from tensorvine.actors.transport.tcp import TcpClient
from tensorvine.planner.topology import Topology
from tensorvine.store.errors import (
    CorruptDataError,
    ModelLostError,
    MovedError,
    OperationTimeoutError,
    ShardUnavailableError,
    StoreFullError,
    TensorVineError,
)
from tensorvine.store.holders import Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import KEPT, Part
from tensorvine.store.segments.blockheader import HEADER_BYTES
from tensorvine.store.segments.segment import SegmentId, layout
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import digest_of
from tensorvine.store.versions.replica import Copy

from tests.support.contexts import context_of, engine_at, with_memory
from tests.support.tcp import impostor

SIZES = (3 * INLINE_BYTES, 5, INLINE_BYTES + 1)
SEGMENT, SMALL = (0, 1), (0, 2)
SMALL_SIZES = (7, 9)
SOURCE, HEIR = 0, 1
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

    def read(self, copy: Copy) -> list[bytes]:
        in_memory = isinstance(copy.handle, Part)
        assert in_memory == (copy.length > INLINE_BYTES)
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
        """A slot's last holder releases it, and the segment is compacted."""
        with self.source.lock:
            self.source.state.hold(ModelRef("rest", 1), {segment: [s for s in range(3) if s != slot]})
            self.source.state.release(ModelRef("m", 1))
            self.source.segment_memory._compact(segment)
            self.source.state.residents.compactable.clear()


@pytest.fixture
def pair() -> Iterator[Pair]:
    random, content = np.random.default_rng(7), dict[SegmentId, list[bytes]]()
    here = engine_at("here")
    here.address = lambda: "127.0.0.1"
    source = with_memory(context_of(ShardState(SOURCE, lambda _: SOURCE), engine=here))
    source.state.open("c", 0.0)
    for segment, sizes in ((SEGMENT, SIZES), (SMALL, SMALL_SIZES)):
        content[segment] = [random.integers(0, 256, size, np.uint8).tobytes() for size in sizes]
        starts, length = layout(sizes)
        block = np.zeros(length, np.uint8)
        for start, tensor in zip(starts, content[segment], strict=True):
            block[start : start + len(tensor)] = np.frombuffer(tensor, np.uint8)
        with source.lock:
            handle: Any = block.tobytes()
            if length > INLINE_BYTES:
                (offset,) = source.segment_memory.grant(Save("c", 1), [length])
                handle = Part(offset, length)
                source.segment_memory.memory.part(handle)[:] = block
            source.state.adopt(Save("c", 1), segment, handle, sizes)
            if isinstance(handle, Part):
                source.segment_memory.keep(handle, segment)
            source.state.hold(
                ModelRef("m", 1) if segment == SEGMENT else ModelRef("m", 2), {segment: range(len(sizes))}
            )
            source.state.release(Save("c", 1))
    block_server = BlockServer(source)
    source.tcp_address = block_server.address
    target = with_memory(context_of(ShardState(HEIR, lambda _: HEIR)))
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
            assert not pair.target.segment_memory.grant(Save("c", 9), [size])
        go_on.set()
        await task
        with pair.target.lock:
            assert pair.target.segment_memory.grant(Save("c", 9), [size])

    monkeypatch.setattr(TcpClient, "read", slow)
    asyncio.run(given_up())


def test_what_a_source_without_a_lease_has_not_is_not_lost(pair: Pair) -> None:
    """The next incarnation may have it. What this one has, it gives."""
    tenure: Any = pair.source.tenure
    pair.let_go(SEGMENT, 0)
    server = BlockServer(pair.source)
    try:
        tenure.holds = False
        assert server.kept({SEGMENT: [1]}, WAIT_S)[SEGMENT].slots.keys() == {1}
        with pytest.raises(ShardUnavailableError, match="there is no lease"):
            server.kept({SEGMENT: [0]}, WAIT_S)
        tenure.holds = True
        with pytest.raises(ModelLostError):
            server.kept({SEGMENT: [0]}, WAIT_S)
    finally:
        server._server.close()


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
            (offset,) = memory.grant(Save("c", 2), [length])
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


class Keeping:
    """A replica store in the target, which keeps the source's segments."""

    def __init__(self, pair: Pair) -> None:
        here = engine_at("there")
        here.address = lambda: "127.0.0.1"
        self.pair, self.target = pair, replace(pair.target, engine=here)
        self.store = ReplicaStore(self.target, pair.copying, lambda: None)

    def put(self, served: bool) -> None:
        """Have the store keep both segments, of which messages bring the bytes unless they are `served`."""

        async def scene() -> None:
            opened = await self.store.open_replica(SOURCE, 1)
            of = ReplicaOf(SOURCE, 1, opened.replica_store)
            originals = self.pair.originals(served)
            await self.store.put_in_replica(of, originals, {}, self.pair.source.tcp_address, WAIT_S)

        asyncio.run(scene())

    def damage(self, segment: SegmentId) -> None:
        """Change one bit of a copy."""
        replica = self.store._replicas[SOURCE]
        copy = replica.copies[segment]
        if isinstance(copy.handle, Part):
            self.target.segment_memory.memory.part(copy.handle)[-65] ^= 1
            return
        changed = bytearray(copy.handle)
        changed[0] ^= 1
        replica.copies[segment] = replace(copy, handle=bytes(changed))

    def restored(self) -> dict[SegmentId, list[bytes]]:
        """Bring back what a new incarnation of the source gets."""
        again = with_memory(context_of(ShardState(SOURCE, lambda _: SOURCE)))
        offer = asyncio.run(self.store.offer_replica(SOURCE))
        with again.lock:
            parts = restore._admission(again.segment_memory, offer.segments)
        restore._take(again, offer, offer.segments, parts)
        return {s: list(found(again, s).values()) for s in again.state.segment_ids()}

    def close(self) -> None:
        if self.store._server is not None:
            self.store._server.close()


@pytest.fixture
def keeping(pair: Pair) -> Iterator[Keeping]:
    made = Keeping(pair)
    yield made
    made.close()


class TestReplicasAreChecked:
    @pytest.mark.parametrize("served", [True, False])
    def test_what_was_written_comes_back(self, pair: Pair, keeping: Keeping, served: bool) -> None:
        keeping.put(served)
        copies = keeping.store._replicas[SOURCE].copies
        assert {s: copy.digests for s, copy in copies.items()} == {
            s: tuple(digest_of(np.frombuffer(tensor, np.uint8)) for tensor in tensors)
            for s, tensors in pair.content.items()
        }
        assert keeping.restored() == pair.content

    @pytest.mark.parametrize("served", [True, False])
    @pytest.mark.parametrize("segment", [SEGMENT, SMALL])
    def test_a_copy_that_was_damaged_where_it_is_kept_does_not_come_back_and_others_do(
        self, pair: Pair, keeping: Keeping, served: bool, segment: SegmentId, caplog: pytest.LogCaptureFixture
    ) -> None:
        keeping.put(served)
        keeping.damage(segment)
        assert keeping.restored() == {s: tensors for s, tensors in pair.content.items() if s != segment}
        assert caplog.text.count(f"segment {segment} is lost, as its replica is damaged: ") == 1

    def test_a_copy_that_was_damaged_on_its_way_is_not_kept(
        self, pair: Pair, keeping: Keeping, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = Served.pieces

        def damaged(sent: Served, row: Row) -> Iterator[memoryview]:
            first, *rest = served(sent, row)
            changed = bytearray(first)
            changed[0] ^= 1
            yield from (memoryview(changed), *rest)

        monkeypatch.setattr(Served, "pieces", damaged)
        with pytest.raises(CorruptDataError, match=r"slot 0 of \(0, 1\).* by TCP from shard 0: expected content"):
            keeping.put(served=True)
        assert keeping.store._replicas[SOURCE].copies == {}
        assert pair.taken == 0


class Successors:
    """The other shards, as one that drains sees them: the successor does what it is told."""

    def __init__(self, pair: Pair) -> None:
        self.topology = self.topology_after = Topology("copies", (SOURCE, HEIR), "starter").warned((SOURCE,))
        self.told: list[tuple[int, ...]] = []
        self._pair = pair
        pair.target.peers = cast("Any", self)
        self.successor = SegmentHandoff(pair.target)
        self.before_it_copies = lambda: None

    async def ask(self, shard: int, request: Request[Any], timeout: float) -> None:
        assert (shard, request.remote) == (HEIR, ShardCalls.receive)
        moved, original, address, holder = request.arguments
        self.told.append(original.slots)
        self.before_it_copies()
        owner = self._pair.copying.owner("moving")
        async with self._pair.copying.copied(owner, {moved.id: original}, address, WAIT_S) as copies:
            self.successor.receive(moved, copies[moved.id], holder)


@pytest.fixture
def successors(pair: Pair) -> Successors:
    return Successors(pair)


def drain(pair: Pair, successors: Successors) -> SegmentHandoff:
    pair.source.peers = cast("Any", successors)
    return SegmentHandoff(pair.source)


def found(context: ShardContext, segment_id: SegmentId) -> dict[int, bytes]:
    segment = context.state.segment(segment_id)
    assert segment is not None
    view = context.segment_memory.view(segment)
    assert view is not None
    places = enumerate(segment.offsets)
    return {slot: bytes(view[at : at + segment.sizes[slot]]) for slot, at in places if isinstance(at, int)}


AFTER = Topology("copies", (SOURCE, HEIR), "starter").warned((SOURCE,)).shrunk((SOURCE,))


def test_an_successor_has_what_the_shard_has_that_drains(pair: Pair, successors: Successors) -> None:
    nbytes = asyncio.run(drain(pair, successors).copy(AFTER))
    assert nbytes == sum(SIZES) + sum(SMALL_SIZES)
    for segment, tensors in pair.content.items():
        assert found(pair.target, segment) == dict(enumerate(tensors))
    assert pair.target.segment_memory.bytes_filling == 0


def test_a_segment_that_loses_a_slot_while_it_is_copied_is_described_anew(pair: Pair, successors: Successors) -> None:
    def once() -> None:
        successors.before_it_copies = lambda: None
        pair.let_go(SEGMENT, 0)

    successors.before_it_copies = once
    asyncio.run(drain(pair, successors).copy(AFTER))
    assert found(pair.target, SEGMENT) == {1: pair.content[SEGMENT][1], 2: pair.content[SEGMENT][2]}
    assert sorted(successors.told) == [(0, 1), (0, 1, 2), (1, 2)]
    assert pair.target.segment_memory.bytes_filling == 0


def test_an_successor_that_cannot_reach_the_wire_gets_the_bytes_in_messages(
    pair: Pair, successors: Successors, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    pair.source.tcp_address = ("127.0.0.1", port, "token")
    asyncio.run(drain(pair, successors).copy(AFTER))
    for segment, tensors in pair.content.items():
        assert found(pair.target, segment) == dict(enumerate(tensors))
    assert caplog.text.count("shard 1 cannot read its copies over TCP") == 1
    assert pair.target.segment_memory.bytes_filling == 0


def test_a_copy_of_a_drain_that_was_given_up_leaves_no_memory_taken(pair: Pair, successors: Successors) -> None:
    def given_up() -> None:
        successors.topology = successors.topology.warned(())

    successors.before_it_copies = given_up
    with pytest.raises(MovedError, match="was cancelled"):
        asyncio.run(drain(pair, successors).copy(AFTER))
    assert pair.taken == 0


def test_a_copy_that_comes_after_its_save_was_aborted_is_refused(pair: Pair, successors: Successors) -> None:
    """Nothing would release it before the client ends."""
    save = Save("c", 7)
    pair.target.segment_memory.end_save(save)
    with pytest.raises(OperationTimeoutError, match="save c/s7: expected to be in progress; it has ended"):
        asyncio.run(drain(pair, successors)._copy(SEGMENT, AFTER, save))
    assert pair.taken == 0


def test_a_copy_that_comes_twice_is_kept_once(pair: Pair, successors: Successors) -> None:
    segment_handoff = drain(pair, successors)
    asyncio.run(segment_handoff.copy(AFTER))
    before = pair.taken
    asyncio.run(segment_handoff._copy(SEGMENT, AFTER, segment_handoff._drain(AFTER)))
    assert before == pair.taken > 0
