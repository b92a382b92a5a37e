"""What a save offers to a shard that does not share memory with it: its arrays, read over TCP from where they lie.

Rules
- An offer is the save's: it ends with it, whatever became of it, and then no thread reads the arrays any more.
- Nothing is copied but what is not contiguous, and that while it is sent.
- A forked child offers nothing (see `tcp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....store.arrays import as_bytes
from ....store.errors import ModelLostError
from ....store.segments.segment import SegmentId
from ...shard.calls.copies import Address
from ...transport.frames import Gathered, Slots
from ...transport.tcp_server import TcpServer


class Offer:
    """Serves arrays until it is closed.

    Args:
        what: names the save in errors.
        arrays: segment -> those of its slots, in order.
        host: address of an interface of this machine.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, what: str, arrays: Mapping[SegmentId, Sequence[np.ndarray]], host: str) -> None:
        self._what = what
        self._arrays = arrays
        self._server = TcpServer(self._answer, host)
        self.address = Address(*self._server.address, self._server.token)

    def close(self) -> None:
        """End the connections, also in the middle of an answer."""
        self._server.close()

    def _answer(self, slots: Slots, timeout: float, hashed: bool) -> tuple[dict[SegmentId, Gathered], None]:
        """Answer a shard: hashes are not asked for, and nothing is waited for."""
        return {segment: self._gathered(segment, numbers) for segment, numbers in slots.items()}, None

    def _gathered(self, segment: SegmentId, slots: Sequence[int]) -> Gathered:
        arrays = self._arrays.get(segment, ())
        if any(slot >= len(arrays) for slot in slots):
            raise ModelLostError(
                f"{self._what}: expected slots {list(slots)} of segment {segment}; found {len(arrays)} slots"
            )
        return Gathered({slot: as_bytes(arrays[slot]) for slot in slots})
