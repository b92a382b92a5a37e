"""Tensors that are put together in a shard's memory, from slices over a real wire, without an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given as each
from hypothesis import strategies as st
from tensorvine.actors.client.save import place as place_module
from tensorvine.actors.client.save.offer import Offer
from tensorvine.actors.client.save.place import Place
from tensorvine.actors.client.session import Session
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import Filled
from tensorvine.actors.shard.calls.copies import Address, Piece
from tensorvine.actors.shard.copying import put_together
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.store.errors import CorruptDataError, ShardUnavailableError, TensorMismatchError
from tensorvine.store.holders import Request as Save
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.segment import layout
from tensorvine.store.shard import ShardState

SAVE, LENGTH, OFFSET = Save("client", 1), 1 << 18, 128
SERIALS = count(100)
WAIT_S = 60.0


class Near:
    """A session whose shard is this process: what it is asked it does at once."""

    def __init__(self) -> None:
        self.state = ShardState(0, 1)
        self.state.requests.open("client", 0.0)
        self.memory = SegmentMemory(self.state, threading.RLock(), 1 << 20, 0)
        self.engine = SimpleNamespace(address=lambda: "127.0.0.1")
        self.known = SimpleNamespace(unreached=False)
        self.fetched = 0
        """Pieces that no message brought."""

    def granted(self, save: Save = SAVE) -> Part:
        (offset,) = self.memory.grant(save, [LENGTH])
        self.memory.expect_pieces(save, [offset])
        return Part(offset, LENGTH)

    def end(self, save: Save) -> None:
        self.state.end(save)
        self.memory.drop_grants(save)

    def connection(self, *_: object) -> object:
        return self.known

    def call(self, shard: int, request: Request[Any], timeout: float) -> None:
        save, part, pieces, address, left = request.arguments
        self.fetched += sum(piece.data is None for piece in pieces)
        put_together(part, pieces, save, self.memory, address, left)


@pytest.fixture(scope="module")
def near() -> Near:
    return Near()


@pytest.fixture
def part(near: Near) -> Iterator[Part]:
    made = near.granted()
    yield made
    near.memory.give_back(made, SAVE)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, list[Sequence[int]]]:
    """A tensor, and where it is cut along each axis."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = draw(st.sampled_from(["u1", "f2", "f4", "f8", "c16"]))
    tensor = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 250, shape).astype(dtype)
    bounds = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    return tensor, bounds


def slices(bounds: Sequence[Sequence[int]]) -> Iterator[tuple[slice, ...]]:
    if not bounds:
        yield ()
        return
    for start, stop in zip(bounds[0], bounds[0][1:], strict=False):
        for rest in slices(bounds[1:]):
            yield (slice(start, stop), *rest)


@each(cuts(), st.booleans(), st.booleans())
def test_slices_in_any_order_make_the_tensor(near: Near, cut: Any, few: bool, fortran: bool) -> None:
    tensor, bounds = cut
    tensor = np.array(tensor, order="F" if fortran else "C")
    part = near.granted()
    near.memory.memory.part(part)[:] = 255
    place = Place(0, SAVE, part, OFFSET, tensor.shape, tensor.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place_module, "INLINE_BYTES", 1 << 20 if few else 0)
        patch.setattr(place_module, "PIECE_BYTES", 16)
        for region in reversed(list(slices(bounds))):
            place.bring(cast(Session, near), [axis.start for axis in region], tensor[region], WAIT_S)
    block = near.memory.memory.part(part)
    end = OFFSET + tensor.nbytes
    assert block[OFFSET:end].tobytes() == tensor.tobytes()
    assert (block[:OFFSET] == 255).all()
    assert (block[end:] == 255).all()
    near.memory.give_back(part, SAVE)


SHAPE, ITEM = (6, 8), 4
SIZES = (prod(SHAPE) * ITEM, 0, 3)
"""Bytes of the tensors of a part: one that is cut, one without elements, one that a single piece brings."""


def bring(near: Near, save: Save, part: Part, *regions: tuple[slice, slice]) -> None:
    """Bring slices of the first tensor, and all of the third."""
    place = Place(0, save, part, 0, SHAPE, ITEM)
    for rows, columns in regions:
        chunk = np.zeros(SHAPE, "f4")[rows, columns]
        place.bring(cast(Session, near), (rows.start, columns.start), chunk, WAIT_S)
    Place(0, save, part, layout(SIZES)[0][2], (3,), 1).bring(cast(Session, near), (0,), np.zeros(3, "u1"), WAIT_S)


ALL, LEFT, RIGHT = slice(0, 6), slice(0, 5), slice(5, 8)


@pytest.mark.parametrize(
    ("regions", "fault"),
    [
        ([], "tensor 0 is written by no chunk"),
        ([(ALL, LEFT)], "tensor 0: 0 to 6 of axis 0, 5 to 8 of axis 1, written by no chunk"),
        ([(ALL, LEFT), (slice(0, 4), RIGHT)], "4 to 6 of axis 0, 5 to 8 of axis 1, written by no chunk"),
        ([(ALL, LEFT), (ALL, slice(4, 8))], "0 to 6 of axis 0, 4 to 5 of axis 1, .* written by 2 different chunks"),
        ([(slice(0, 4), slice(0, 8)), (slice(3, 6), slice(0, 8))], "3 to 4 of axis 0, .* by 2 different chunks"),
    ],
)
def test_no_segment_is_made_of_a_part_with_a_gap_or_an_overlap(
    near: Near, regions: list[tuple[slice, slice]], fault: str
) -> None:
    save = Save("client", next(SERIALS))
    part = near.granted(save)
    bring(near, save, part, *regions)
    with pytest.raises(TensorMismatchError, match=f"expected each byte of its tensors to be written once; .*{fault}"):
        near.memory.adopt(save, os.getpid(), [Filled((0, 7), part, SIZES)])
    near.end(save)
    assert near.memory.bytes_filling == 0


def test_a_tensor_that_no_segment_has_is_refused(near: Near) -> None:
    save = Save("client", next(SERIALS))
    part = near.granted(save)
    bring(near, save, part, (ALL, LEFT), (ALL, RIGHT))
    for sizes in ((SIZES[0],), (SIZES[0] - 8, *SIZES[1:])):
        with pytest.raises(TensorMismatchError, match=r"a chunk is written to a tensor of .* where none starts"):
            near.memory.adopt(save, os.getpid(), [Filled((0, 7), part, sizes)])
    near.end(save)


def test_a_chunk_that_is_computed_twice_is_written_once(near: Near) -> None:
    save, serial = Save("client", next(SERIALS)), 1000 + next(SERIALS)
    part = near.granted(save)
    bring(near, save, part, (ALL, LEFT), (ALL, RIGHT), (ALL, LEFT))
    again = Place(0, save, part, 0, SHAPE, ITEM)
    again.bring(cast(Session, near), (0, 0), np.ones((6, 5), "f4"), WAIT_S)
    near.memory.adopt(save, os.getpid(), [Filled((0, serial), part, SIZES)])
    assert not near.memory.memory.part(part)[: SIZES[0]].any()


def test_memory_that_is_granted_again_remembers_no_chunk(near: Near) -> None:
    for _ in range(2):
        save = Save("client", next(SERIALS))
        part = near.granted(save)
        bring(near, save, part, (ALL, LEFT))
        near.end(save)
    save = Save("client", next(SERIALS))
    (offset,) = near.memory.grant(save, [LENGTH])
    near.memory.expect_pieces(Save("client", next(SERIALS)), [offset])  # has ended before
    near.memory.adopt(save, os.getpid(), [Filled((0, 2000 + next(SERIALS)), Part(offset, LENGTH), SIZES)])


def test_many_bytes_are_fetched_and_few_are_brought(near: Near, part: Part) -> None:
    place = Place(0, SAVE, part, 0, (200, 300), 4)
    before = near.fetched
    place.bring(cast(Session, near), (0, 0), np.ones((1, 300), "f4"), WAIT_S)
    assert near.fetched == before
    place.bring(cast(Session, near), (0, 0), np.ones((200, 300), "f4"), WAIT_S)
    assert near.fetched == before + 1


@pytest.mark.parametrize(
    ("start", "array"),
    [
        ((0,), np.zeros((2, 2), "f4")),
        ((0, 0), np.zeros(2, "f4")),
        ((3, 0), np.zeros((2, 2), "f4")),
        ((-1, 0), np.zeros((2, 2), "f4")),
        ((0, 0), np.zeros((2, 2), "f8")),
    ],
)
def test_what_is_no_slice_of_the_tensor_is_refused(near: Near, part: Part, start: tuple[int, ...], array: Any) -> None:
    with pytest.raises(TensorMismatchError, match=r"expected a slice of \(4, 4\) with 4 bytes per element; "):
        Place(0, SAVE, part, 0, (4, 4), 4).bring(cast(Session, near), start, array, WAIT_S)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, (4, 1), (0, 0), (5, 1), None),
        Piece(0, (4, 1), (-1, 0), (2, 1), None),
        Piece(0, (4, 1), (3, 0), (2, 1), None),
        Piece(0, (4, 1), (0,), (2, 1), None),
        Piece(LENGTH - 3, (4, 1), (0, 0), (1, 1), None),
        Piece(-1, (4, 1), (0, 0), (1, 1), None),
        Piece(0, (4, 1), (0, 0), (2, 1), b"123"),
    ],
)
def test_a_piece_that_does_not_lie_in_its_part_is_not_written(near: Near, part: Part, piece: Piece) -> None:
    near.memory.memory.part(part)[:] = 7
    with pytest.raises(CorruptDataError):
        put_together(part, [piece], SAVE, near.memory, Address("127.0.0.1", 1, b""), WAIT_S)
    assert (near.memory.memory.part(part) == 7).all()


def test_who_offers_less_than_it_said_is_refused(near: Near, part: Part) -> None:
    offer = Offer("a test", {(0, 0): [np.zeros(3, np.uint8)]}, "127.0.0.1")
    try:
        with pytest.raises(CorruptDataError):
            put_together(part, [Piece(0, (4, 1), (0, 0), (4, 1), None)], SAVE, near.memory, offer.address, WAIT_S)
    finally:
        offer.close()


def test_a_save_that_has_ended_is_brought_nothing(near: Near) -> None:
    save = Save("client", 2)
    (offset,) = near.memory.grant(save, [LENGTH])
    part = Part(offset, LENGTH)
    near.end(save)
    with pytest.raises(ShardUnavailableError, match="the save was cancelled"):
        put_together(part, [Piece(0, (1, 1), (0, 0), (1, 1), b"1")], save, near.memory, None, WAIT_S)


def test_no_segment_is_made_of_what_is_still_being_filled(near: Near) -> None:
    save = Save("client", 3)
    (offset,) = near.memory.grant(save, [LENGTH])
    part, blocks = Part(offset, LENGTH), [Filled((0, 9), Part(offset, LENGTH), (LENGTH,))]
    unended = pytest.raises(ShardUnavailableError, match=r"expected .* to be complete; another process still fills it")
    with near.memory.filling([part], save), near.memory.filling([part], save), unended:
        near.memory.adopt(save, os.getpid(), blocks)
    near.memory.adopt(save, os.getpid(), blocks)
    with pytest.raises(ShardUnavailableError), near.memory.filling([part], save):
        pass
