"""Groups as ways of updates: pairs, and who fails when. A shard and its readers in one process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorvine.actors.client.fetch.group_transport import GroupTransport
from tensorvine.actors.collective.rendezvous import LocalRendezvous
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import TRANSPORTS
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.transport.backends import BACKENDS, is_here, load
from tensorvine.actors.transport.frames import Received, Row, Served, Slots
from tensorvine.actors.transport.pair_sender import IDLE_S, PairSender
from tensorvine.actors.transport.parcels import COPIED_BYTES, PairAnswer, Parcel, check_parcels, cut, packed
from tensorvine.actors.transport.targets import SHARED_BYTES, received
from tensorvine.actors.transport.tcp import check_content
from tensorvine.store.errors import CorruptDataError, ModelLostError, OperationTimeoutError, ShardUnavailableError
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import digest_of
from tensorvine.store.waiting import Deadline

from tests.support.waiting import eventually

SIZES = (3_000_000, 100, 0, 70_000)


class Room:
    """A shard's side: segments, their hashes, a rendezvous and a sender, and what happens at each answer."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rendezvous = LocalRendezvous()
        self.segments: dict[SegmentId, Served] = {}
        self.before_find: Callable[[], None] = lambda: None
        self.sender = self.start()

    def start(self) -> PairSender:
        return PairSender(self.backend, "room/0", self.find, self.rendezvous)

    def add(self, serial: int, sizes: Sequence[int] = SIZES) -> dict[SegmentId, list[int]]:
        """Make a segment; give what a reader asks for it."""
        starts = list(itertools.accumulate((-(-n // 64) * 64 for n in sizes), initial=0))
        block = np.random.default_rng(serial).integers(0, 256, starts[-1], np.uint8)
        block.flags.writeable = False
        self.segments[(0, serial)] = Served(block, dict(enumerate(zip(starts, sizes, strict=False))))
        return {(0, serial): list(range(len(sizes)))}

    def find(self, slots: Slots, timeout: float) -> Mapping[SegmentId, Served]:
        self.before_find()
        lost = sorted(slots.keys() - self.segments.keys())
        if lost:
            raise ModelLostError(f"segments {lost} are not here")
        return {s: Served(self.segments[s].block, {n: self.segments[s].slots[n] for n in slots[s]}) for s in slots}

    def content(self, segment: SegmentId, slot: int) -> bytes:
        start, nbytes = self.segments[segment].slots[slot]
        return self.segments[segment].block[start : start + nbytes].tobytes()

    def digests(self, segments: Sequence[SegmentId]) -> dict[SegmentId, tuple[str, ...]]:
        """Hash slots."""
        return {
            s: tuple(
                digest_of(np.frombuffer(self.content(s, n) or bytearray(), np.uint8)) for n in self.segments[s].slots
            )
            for s in segments
        }


class Calls:
    """A client's session: calls go to the room directly. Whatever `event` does happens as an answer comes."""

    def __init__(self, room: Room, client: str) -> None:
        self.room = room
        self.client = client
        self.answers: list[PairAnswer] = []
        self.event: Callable[[PairAnswer], None] = lambda answer: None

    def call(self, shard: int, request: Request[Any], timeout: float) -> Any:
        if request.remote is ShardCalls.meet:
            return self.room.rendezvous.exchange(*request.arguments)
        assert request.remote is ShardCalls.send_by
        _, member, question = request.arguments
        try:
            answer = self.room.sender.ask(member, question).result(timeout)
        except TimeoutError as exc:
            raise OperationTimeoutError("no answer") from exc
        self.answers.append(answer)
        self.event(answer)
        return answer

    def send(self, shard: int, request: Request[Any]) -> Any:
        assert request.remote is ShardCalls.digests
        answer: Future[Any] = Future()
        answer.set_result(self.room.digests(*request.arguments))
        return answer


class Reader:
    """A way, and what it was told."""

    def __init__(self, room: Room, name: str) -> None:
        self.room = room
        self.calls = Calls(room, name)
        self.transport = GroupTransport(self.calls, room.backend)  # type: ignore[arg-type]

    def read(self, places: Slots, timeout: float = 20.0, digests: bool = False) -> dict[SegmentId, Received]:
        found = self.transport.blocks(0, places, digests, Deadline.after(timeout), f"load by {self.calls.client}")
        check(self.room, found, places)
        return found


def check(room: Room, found: Mapping[SegmentId, Received], places: Slots) -> None:
    assert {s: sorted(part.offsets) for s, part in found.items()} == {s: sorted(slots) for s, slots in places.items()}
    for segment, part in found.items():
        assert not part.block.flags.writeable
        for slot, start in part.offsets.items():
            expected = room.content(segment, slot)
            assert part.block[start : start + len(expected)].tobytes() == expected


@pytest.fixture(params=["shared", "gloo"])
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    made = Room(request.param)
    yield made
    made.sender.close()


@pytest.fixture
def enter(room: Room) -> Iterator[Callable[[str], Reader]]:
    with ExitStack() as stack:

        def make(name: str) -> Reader:
            reader = Reader(room, name)
            stack.callback(reader.transport.close)
            return reader

        yield make


class TestPair:
    def test_what_was_asked_for_arrives_with_its_hashes(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader, places = enter("a"), {**room.add(1), **room.add(2, [5, 7]), **room.add(3, [0])}
        found = reader.read(places, digests=True)
        tensors = [(f"t{s}{n}", s, n, len(room.content(s, n))) for s, slots in places.items() for n in slots]
        check_content(tensors, found, "this")
        found[(0, 2)].digests[0] = "0"  # type: ignore[index]
        with pytest.raises(CorruptDataError, match="expected content 0"):
            check_content(tensors, found, "this")

    def test_a_part_of_a_segment_and_nothing(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        places = room.add(1)
        reader.read({segment: [3, 1] for segment in places})
        assert reader.read({}) == {}

    def test_the_pair_is_kept(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        for serial in range(4):
            reader.read(room.add(serial))
        assert len({answer.pair for answer in reader.calls.answers}) == 1
        assert len(room.sender._pairs) == 1

    def test_several_threads_of_a_reader_take_turns(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        places = [room.add(serial, [50_000 + serial]) for serial in range(6)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(reader.read, places))
        assert len({answer.pair for answer in reader.calls.answers}) == 1

    def test_it_is_taken_by_itself_once_it_has_worked(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        assert not reader.transport.automatic
        reader.read(room.add(1))
        assert reader.transport.automatic
        assert reader.transport.brings(0, Deadline.after(5.0))

    def test_what_is_lost_is_lost_and_the_pair_stays(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))
        with pytest.raises(ModelLostError, match="not here"):
            reader.read({(0, 99): [0]})
        reader.read(room.add(2))
        assert len({answer.pair for answer in reader.calls.answers}) == 1

    def test_an_error_of_another_kind_is_told(self, room: Room, enter: Callable[[str], Reader]) -> None:
        def fail() -> None:
            raise RuntimeError("the disk is on fire")

        room.before_find = fail
        with pytest.raises(ShardUnavailableError, match="on fire"):
            enter("a").read(room.add(1))

    def test_an_idle_pair_is_closed_and_made_anew(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))

        (pair,) = room.sender._pairs.values()
        eventually(lambda: pair.idle_since is not None, "the pair is idle", pause=0.005)
        room.sender.close_idle(time.monotonic() + IDLE_S / 2)
        assert room.sender._pairs
        room.sender.close_idle(time.monotonic() + IDLE_S)
        assert not room.sender._pairs
        reader.read(room.add(2))
        assert len({answer.pair for answer in reader.calls.answers}) == 2

    def test_a_way_that_was_closed_opens_again(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))
        reader.transport.close()
        reader.read(room.add(2))


class TestTroubleWithAPair:
    """Phase x event."""

    def test_the_reader_is_gone_before_it_connects(self, room: Room, enter: Callable[[str], Reader]) -> None:
        gone, other = enter("a"), enter("b")

        def vanish(answer: PairAnswer) -> None:
            raise KeyboardInterrupt

        gone.calls.event = vanish
        with pytest.raises(KeyboardInterrupt):
            gone.read(room.add(1))
        other.read(room.add(2))
        room.sender.left("a")
        assert {member.partition(".")[0] for member in room.sender._pairs} == {"b"}

    def test_the_reader_leaves_while_it_is_sent_to(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))
        reader.calls.event = lambda answer: reader.transport.close()
        with pytest.raises(ShardUnavailableError, match="load by a: expected shard 0 to send by"):
            reader.read(room.add(2))
        eventually(lambda: not room.sender._pairs, "the pair is gone", pause=0.005)
        reader.calls.event = lambda answer: None
        reader.read(room.add(3))

    def test_the_shards_end_breaks_and_the_pair_is_made_anew(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))
        (pair,) = room.sender._pairs.values()
        held = pair.group
        assert held is not None
        reader.calls.event = lambda answer: held.close()
        reader.read(room.add(2))
        assert len({answer.pair for answer in reader.calls.answers}) == 2

    def test_the_shard_starts_again_before(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))
        room.sender.close()
        room.sender = room.start()
        reader.read(room.add(2))
        assert len({answer.pair for answer in reader.calls.answers}) == 2

    def test_the_shard_ends_before_the_bytes_come(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        reader.read(room.add(1))

        def end(answer: PairAnswer) -> None:
            room.sender.close()
            raise ShardUnavailableError("the shard died")

        reader.calls.event = end
        with pytest.raises(ShardUnavailableError, match="the shard died"):
            reader.read(room.add(2))

    def test_a_shard_that_does_not_answer(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader, stuck = enter("a"), threading.Event()
        room.before_find = lambda: stuck.wait(20) and None
        began = time.monotonic()
        with pytest.raises(OperationTimeoutError):
            reader.read(room.add(1), timeout=0.5)
        assert time.monotonic() - began < 5
        stuck.set()
        room.before_find = lambda: None
        reader.read(room.add(2))

    def test_a_shard_that_does_not_come_to_the_pair(
        self, room: Room, enter: Callable[[str], Reader], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = enter("a")
        with monkeypatch.context() as patch:
            patch.setattr(room.sender, "_connected", lambda *pair: _never())
            with pytest.raises(OperationTimeoutError, match="load by a"):
                reader.read(room.add(1), timeout=1.0)
        reader.read(room.add(2))

    @pytest.mark.parametrize("event", ["leaves", "falls silent"])
    def test_no_other_load_fails(self, event: str, room: Room, enter: Callable[[str], Reader]) -> None:
        readers, again = [enter(name) for name in "abc"], threading.Event()
        for reader in readers:
            reader.read(room.add(1))
        *others, gone = readers
        gone.calls.event = lambda answer: gone.transport.close() if event == "leaves" else again.wait(20) and None
        places = room.add(2, [20_000_000])
        with ThreadPoolExecutor(3) as pool:
            last = pool.submit(gone.read, places)
            for read in [pool.submit(reader.read, places) for reader in others]:
                read.result(20)
            again.set()
            if event == "leaves":
                with pytest.raises(ShardUnavailableError):
                    last.result(20)
            else:
                last.result(20)

    def test_an_answer_that_is_none(self, room: Room, enter: Callable[[str], Reader]) -> None:
        reader = enter("a")
        wrong = room.add(2)
        real, room.find = room.find, lambda slots, timeout: room.segments and real(wrong, timeout)  # type: ignore[method-assign]
        room.sender._find = room.find
        with pytest.raises(ShardUnavailableError, match=r"expected slots .* found"):
            reader.read(room.add(1))


def _never() -> Any:
    raise OperationTimeoutError("nobody comes")


class TestParcels:
    @settings(max_examples=60, deadline=None)
    @given(
        sizes=st.lists(
            st.lists(
                st.sampled_from([0, 1, 63, 64, 65, 1000, COPIED_BYTES, COPIED_BYTES + 1, SHARED_BYTES]),
                min_size=1,
                max_size=5,
            ),
            max_size=4,
        ),
        data=st.data(),
    )
    def test_any_slots_arrive_as_they_are(self, sizes: list[list[int]], data: st.DataObject) -> None:
        room = Room("shared")
        try:
            places: dict[SegmentId, list[int]] = {}
            for serial, some in enumerate(sizes):
                for segment, slots in room.add(serial, some).items():
                    places[segment] = data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True))
            parcels, messages = packed(room.find(places, 1.0))
        finally:
            room.sender.close()
        check_parcels(parcels, places, "x")
        assert [n for parcel in parcels for n in parcel.lengths] == [m.nbytes for m in messages]
        assert all(m.nbytes for m in messages)
        found: dict[SegmentId, Received] = {}
        coming = iter(messages)
        for parcel in parcels:
            memory = memoryview(bytearray(parcel.nbytes))
            for part in cut(memory, parcel.lengths):
                part[:] = next(coming)
            found |= received(parcel.rows, np.frombuffer(memory.toreadonly(), np.uint8))
        check(room, found, places)

    def test_large_segments_are_not_copied(self) -> None:
        block = np.zeros(4 << 20, np.uint8)
        _, (message,) = packed({(0, 1): Served(block, {0: (0, 2 << 20), 1: (2 << 20, 2 << 20)})})
        assert np.shares_memory(message, block)

    def test_many_small_segments_are_one_message(self) -> None:
        served = {(0, n): Served(np.zeros(64, np.uint8), {0: (0, 64)}) for n in range(1000)}
        parcels, messages = packed(served)
        assert (len(parcels), len(messages)) == (1, 1)

    @pytest.mark.parametrize(
        "parcels",
        [
            (),
            (Parcel((Row((0, 1), [0], [5]),), (63,)),),
            (Parcel((Row((0, 1), [1], [5]),), (64,)),),
            (Parcel((Row((0, 1), [0], [5]), Row((0, 1), [0], [5])), (128,)),),
            (Parcel((Row((0, 1), [0], [5]), Row((0, 2), [0], [5])), (128,)),),
        ],
    )
    def test_what_was_not_asked_for_is_refused(self, parcels: tuple[Parcel, ...]) -> None:
        with pytest.raises(CorruptDataError, match="x: expected slots"):
            check_parcels(parcels, {(0, 1): [0]}, "x")

    def test_sizes_other_than_the_manifests_are_refused(self) -> None:
        parcel = Parcel((Row((0, 1), [0], [5]),), (64,))
        check_parcels((parcel,), {(0, 1): {0: 5}}, "x")
        with pytest.raises(
            CorruptDataError, match=r"x: segment \(0, 1\): expected slots of sizes {0: 6}; found {0: 5}"
        ):
            check_parcels((parcel,), {(0, 1): {0: 6}}, "x")


class TestBackends:
    def test_they_are_ways(self) -> None:
        assert set(BACKENDS) <= set(TRANSPORTS)
        assert is_here("gloo")

    def test_a_back_end_that_cannot_be_used_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cupy", None)
        assert not is_here("nccl")
        with pytest.raises(ShardUnavailableError, match="shard 3: expected the packages of 'nccl'"):
            load("nccl", "shard 3")

    def test_a_shard_without_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cupy", None)
        room = Room("nccl")
        monkeypatch.setattr("tensorvine.actors.client.fetch.group_transport.load", lambda backend, where: None)
        reader = Reader(room, "a")
        try:
            with pytest.raises(ShardUnavailableError, match=r"room/0/\w+: expected the packages of 'nccl'"):
                reader.read(room.add(1))
        finally:
            room.sender.close()
