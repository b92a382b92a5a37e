"""A shard's part in a change of the topology: names move by `elastic`, segments by `estate`; here they are told to.

Rules
- Whoever takes something over has its mirrors told before it answers.
- What all shards are asked is answered with how things stood (`Tag`): the asker sees whether a name was on its way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...planner.topology import Topology
from ...store.errors import ShardUnavailableError, StorageError
from ...store.segments.arena import Part
from ...store.segments.segment import SegmentId
from ...store.versions.handover import Bundle, MovedSegment
from ..rpc.calls import answers
from ..rpc.messages import PEER_TIMEOUT_S, Moved, Tag
from .calls.changes import ChangeCalls
from .handoff.elastic import Unwritten
from .handoff.estate import MOVING, needed
from .parts import ShardParts
from .peers import Sender

log = logging.getLogger(__name__)

CLAIM_PAUSE_S = 0.1
"""How often a shard that is to drain looks whether all others have said what they hold here."""


class ShardChanges(ShardParts):
    """A shard, as the planner sees it that changes the topology."""

    # ---- topology ---------------------------------------------------------------------------------------

    @answers(ChangeCalls.learn)
    async def learn(self, topology: Topology) -> None:
        with self._lock:
            missed = self._estate.missed(topology)
        if missed and self._history is not None and self._claims is not None:
            log.warning(
                "shard %d started again after it had heard of what %s had: it is read", self._config.index, missed
            )
            await self._history.take_over(self._claims.ask_anew, lambda: self._elastic.learn(topology))
        self._elastic.learn(topology)
        self._estate.learned()
        await self._settle()
        self._wake(None)
        if self._mirrors is not None and topology.leaving:
            await self._mirrors.leave(time.monotonic() + PEER_TIMEOUT_S / 2)

    @answers(ChangeCalls.topology)
    async def topology(self) -> Topology:
        return self._peers.topology

    @answers(ChangeCalls.node)
    async def node(self) -> str:
        return self._engine.this_node()

    @answers(ChangeCalls.tag)
    async def tag(self) -> Tag:
        return self._elastic.tag()

    @answers(ChangeCalls.gathered)
    async def gathered(self, method: str, arguments: Sequence[Any]) -> tuple[Tag, Any]:
        before = self._elastic.tag()
        answer = await getattr(self, method)(*arguments)
        return (before if self._elastic.tag() == before else replace(before, sending=True)), answer

    # ---- names ------------------------------------------------------------------------------------------

    @answers(ChangeCalls.hand_over)
    async def hand_over(self) -> Moved:
        return await self._elastic.hand_over()

    @answers(ChangeCalls.take)
    async def take(self, bundle: Bundle, unwritten: Sequence[Unwritten], sender: Sender) -> int:
        if self._mirrors is None:
            await self._elastic.announce(list(bundle.names), sender)
            return self._elastic.take(bundle, unwritten)
        in_memory = {header.ref for header, _ in unwritten} if self._history is not None else None
        records = bundle.records(in_memory)
        with self._lock:
            self._state.arriving |= records.keys()
        try:
            await self._mirrors.secure((), records, time.monotonic() + PEER_TIMEOUT_S / 2)
            await self._elastic.announce(list(bundle.names), sender)
            return self._elastic.take(bundle, unwritten)
        finally:
            with self._lock:
                self._state.arriving -= records.keys()

    @answers(ChangeCalls.arrived)
    async def arrived(self, former: int, version: int) -> None:
        self._elastic.arrived(former, version)

    # ---- segments ---------------------------------------------------------------------------------------

    @answers(ChangeCalls.copy_out)
    async def copy_out(self, after: Topology) -> int:
        for ref, why in list(self._state.unread.items()):
            raise StorageError(f"shard {self._config.index}: expected to read {ref} before it drains; {why}")
        await self._claimed()
        return await self._estate.copy(after)

    @answers(ChangeCalls.has_moved)
    async def has_moved(self) -> bool:
        with self._lock:
            return self._estate.moved

    @answers(ChangeCalls.move_segments)
    async def move_segments(self, after: Topology) -> int:
        await self._claimed()
        nbytes = await self._estate.hand_over(after)
        await self._settle()
        return nbytes

    async def _claimed(self) -> None:
        """Wait until all other shards have said what they hold here, if this one has started again."""
        deadline = time.monotonic() + PEER_TIMEOUT_S
        while self._claims is not None and self._claims.open:
            if time.monotonic() > deadline:
                raise ShardUnavailableError(
                    f"shard {self._config.index}: expected all other shards to say what they hold here before it drains"
                )
            await asyncio.sleep(CLAIM_PAUSE_S)

    @answers(ChangeCalls.receive)
    async def receive(self, moved: MovedSegment, block: np.ndarray | None, holder: str) -> None:
        length = needed(block)
        part = Part((await self._room.granted(MOVING, [length]))[0], length) if length else None
        try:
            await self._estate.receive(moved, block, part, holder)
        except BaseException:
            with self._lock:
                if part is not None:
                    self._holdings.give_back(part, MOVING)
            raise

    @answers(ChangeCalls.inherit)
    async def inherit(self, holder: str, segments: Sequence[MovedSegment]) -> list[SegmentId]:
        lacking = self._estate.inherit(holder, segments)
        await self._settle()
        if self._mirrors is not None and not lacking:
            await self._mirrors.secure([moved.id for moved in segments], {}, time.monotonic() + PEER_TIMEOUT_S / 2)
        return lacking

    @answers(ChangeCalls.is_needed)
    async def is_needed(self) -> bool:
        with self._lock:
            telling = bool(self._state.outbox) or bool(self._settling)
            return self._holdings.serves_saves or bool(self._committing) or telling
