"""A shard alone, with its rules and the parts that a commit in memory needs: all others have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from tensorvine.actors.memory.process import this_process
from tensorvine.actors.rpc import channel
from tensorvine.actors.rpc.messages import ShardConfig
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.handoff.name_handoff import NameHandoff
from tensorvine.actors.shard.handoff.strays import Strays
from tensorvine.actors.shard.local_clients import LocalClients
from tensorvine.actors.shard.parts.holders import Holders
from tensorvine.actors.shard.parts.queries import Queries
from tensorvine.actors.shard.parts.sessions import Sessions
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.actors.shard.peers import Peers
from tensorvine.actors.shard.replicas.securing import Securing
from tensorvine.actors.shard.serving.patch_cache import PatchCache
from tensorvine.actors.shard.settling import Settling
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Lease, Save
from tensorvine.store.refs import ModelRef
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.version import Draft
from tensorvine.store.waiting import Deadline

from tests.support.contexts import context_of, with_memory
from tests.support.direct import Answering, DirectLines, answered

BYTES = 1 << 20
CLIENT, SAVE = "client", Save("client", 1)
SEGMENT = (0, 4)


class GoneEngine:
    """All shards but this one have gone; the planner answers every call with None."""

    def find(self, name: str) -> Any:
        if "/shard-" in name:
            raise LookupError(f"no actor named {name!r}")
        return name

    def reach(self, actor: Any, timeout: float, who: str) -> list[Answering]:
        return [lambda method, *arguments: answered()]

    def this_node(self) -> str:
        return "here"

    def address(self) -> str:
        return "here"

    def restarted(self) -> bool:
        return False

    def keep(self, name: str, value: bytes | None) -> None:
        pass


class QuietAdmission:
    """Admission for all."""

    async def keep_pace(self, what: str, deadline: Deadline) -> None:
        pass


class QuietSegmentHandoff:
    """Segments that stay."""

    moved = is_telling = False
    successors: tuple[int, ...] = ()

    async def heard(self) -> None:
        pass


class Idle:
    """A part of a shard that has nothing to do."""

    nbytes = 0

    def left(self, client: str) -> None:
        pass


class Home:
    """A shard's rules and the parts that a commit in memory needs.

    Args:
        segment_handoff: the shard's segments; None: they stay.
        roomy: there is memory for one block of `BYTES`, and the client is this process.
        index: the shard's number.
        home_of: name -> its home.
    """

    def __init__(
        self,
        segment_handoff: Callable[[ShardContext], Any] | None = None,
        *,
        roomy: bool = False,
        index: int = 0,
        home_of: Callable[[str], int] = lambda name: 0,
    ) -> None:
        engine: Any = GoneEngine()
        config = ShardConfig(
            repository="gone", index=index, shards=(0, 1), capacity=BYTES, preallocate_bytes=0, session_s=60.0
        )
        with mock.patch.object(channel, "Lines", DirectLines):
            self.peers = Peers(engine, config)
        self.state = ShardState(index, home_of)
        self.context = context = replace(context_of(self.state, self.peers, engine=engine), config=config)
        segment_memory: Any = context.segment_memory
        segment_memory.adopt = lambda save, life, blocks: [self.state.adopt(save, *block) for block in blocks]
        clients = LocalClients()
        room: Any = QuietAdmission()
        if roomy:
            clients.watch(CLIENT, this_process())
            room = Admission(with_memory(context), clients, None)
        segments: Any = segment_handoff(context) if segment_handoff is not None else QuietSegmentHandoff()
        self.settling = Settling(context, segments)
        securing = Securing(context, None, None, room)
        self.names = NameHandoff(context, None, None, securing)
        self.writes = Writes(
            context,
            self.settling,
            admission=room,
            history=None,
            names=self.names,
            segment_handoff=segments,
            securing=securing,
            redis_index=None,
        )
        idle: Any = Idle()
        self.queries = Queries(
            context,
            self.settling,
            names=self.names,
            admission=room,
            history=None,
            securing=securing,
            replica_store=idle,
            patches=PatchCache(),
        )
        self.sessions = Sessions(context, self.settling, local=clients, senders=idle)
        strays = Strays(context, lambda: True)
        self.holders = Holders(
            context, self.settling, history=None, segment_handoff=segments, reconciliation=None, strays=strays
        )

    def save(self, leases: list[Lease], holds: dict[tuple[int, int], list[int]] | None = None) -> ModelRef:
        return asyncio.run(self.commit(leases, holds))

    async def commit(
        self, leases: list[Lease], holds: dict[tuple[int, int], list[int]] | None = None, timeout: float = 60.0
    ) -> ModelRef:
        graph = ModelGraph(())
        names = holds or {SEGMENT: [0]}
        draft = Draft(
            name="m",
            save=SAVE,
            parent=None,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=(graph.to_json(), None),
            body=b"",
            holds=names,
            bytes_owned=4,
            bytes_total=4,
        )
        ref, _ = await self.writes.commit(draft, CLIENT, 0, [(SEGMENT, b"abcd", [4])], leases, False, timeout)
        return ref
