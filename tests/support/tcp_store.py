"""What a TCP server serves to tests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
from tensorvine.actors.transport.frames import Digests, Received, Served, Slots
from tensorvine.store.errors import ModelLostError
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.versions.manifest import digest_of

BIG = 64 << 20
"""More than the kernel keeps for a connection at both ends."""


class Store:
    """What a server serves: slots of blocks, and who still holds a view on one."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, tuple[np.ndarray, dict[int, tuple[int, int]]]] = {}
        self.let_go = threading.Event()

    def add(self, segment: SegmentId, *tensors: bytes, gap: int = 0) -> None:
        """Put tensors one after another, at multiples of 64, or further apart and anywhere."""
        block, slots = bytearray(gap), {}
        for slot, content in enumerate(tensors):
            slots[slot] = (len(block), len(content))
            block += content + bytes(gap or -len(content) % 64)
        self.segments[segment] = np.frombuffer(bytes(block), np.uint8), slots

    def content(self, segment: SegmentId, slot: int) -> bytes:
        block, slots = self.segments[segment]
        offset, nbytes = slots[slot]
        return block[offset : offset + nbytes].tobytes()

    def answer(
        self, asked: Slots, timeout: float, hashed: bool
    ) -> tuple[dict[SegmentId, Served], Callable[[], Digests] | None]:
        found: dict[SegmentId, Served] = {}
        for segment, numbers in asked.items():
            if segment not in self.segments:
                raise ModelLostError(f"expected segment {segment}; it is gone")
            block, slots = self.segments[segment]
            view = np.frombuffer(block.data, np.uint8)
            weakref.finalize(view, self.let_go.set).atexit = False
            found[segment] = Served(view, {number: slots[number] for number in numbers})
        return found, (lambda: self.digests(asked)) if hashed else None

    def digests(self, asked: Slots) -> Digests:
        return {
            segment: [
                digest_of(np.frombuffer(self.content(segment, slot), np.uint8)) for slot in self.segments[segment][1]
            ]
            for segment in asked
        }


def contents(found: dict[SegmentId, Received], store: Store) -> dict[tuple[SegmentId, int], bytes]:
    """Return what arrived, each tensor cut to its length."""
    return {
        (segment, slot): part.block[offset : offset + store.segments[segment][1][slot][1]].tobytes()
        for segment, part in found.items()
        for slot, offset in part.offsets.items()
    }
