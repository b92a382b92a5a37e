"""Blocks in the engine's object store, for readers to whom nothing else brings them.

Rules
- A block is put there once, for all who ask, and again when its segment has moved. It stays until it is idle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ....store.segments.segment import Block, SegmentId
from ..context import ShardContext

EXPORT_IDLE_S = 30.0


class Exports:
    """What one shard has in the engine's object store.

    Args:
        context: the shard's.
    """

    def __init__(self, context: ShardContext) -> None:
        self._context = context
        self._state = context.state
        self._lock = context.lock
        self._engine = context.engine
        self._exports: dict[SegmentId, tuple[int, Any, float]] = {}
        """Segment -> its generation, the engine's handle, and when it was asked for last."""

    def exported(
        self, blocks: Mapping[SegmentId, Block], views: Mapping[SegmentId, np.ndarray]
    ) -> dict[SegmentId, Block]:
        """Put blocks into the engine's object store for readers elsewhere; each stays there until it is idle."""
        carried = dict(blocks)
        for segment, view in views.items():
            with self._lock:
                known = self._exports.get(segment)
            generation = blocks[segment].generation
            there = known is not None and known[0] == generation
            handle = known[1] if known is not None and there else self._engine.put(view)
            with self._lock:
                self._context.bytes_sent += 0 if there else view.nbytes
                self._exports[segment] = (generation, handle, time.monotonic())
            carried[segment] = replace(blocks[segment], handle=handle)
        return carried

    def drop_idle(self) -> None:
        """Let go of the copies in the object store that nobody asked for lately, or whose segment is gone."""
        idle = time.monotonic() - EXPORT_IDLE_S
        with self._lock:
            for segment, (_, _, used) in list(self._exports.items()):
                if used < idle or self._state.segment(segment) is None:
                    del self._exports[segment]
