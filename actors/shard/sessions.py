"""The clients of a shard: they come, stay and go, and what they leave behind is swept up.

Rules
- A client's session ends when it says so, when it is not renewed in time, or when its process on this node dies. Only
  a process that died has surely stopped filling memory: its parts are taken back at once.
- One thread sweeps as long as the process lives. A sweep that fails is logged; the next one comes.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from ..engine.engine import Engine
from ..rpc.calls import answers
from ..rpc.messages import Hello, ShardConfig
from ..rpc.sockets.framing import SocketAddress
from ..rpc.sockets.server import LazyServer
from .calls.sessions import SessionCalls
from .parts import ShardParts

log = logging.getLogger(__name__)

SWEEP_S = 0.5


class ShardSessions(ShardParts):
    """A shard, as clients see it that come and go."""

    def __init__(self, engine: Engine, config: ShardConfig) -> None:
        super().__init__(engine, config)
        self._server = LazyServer(self, f"shard {config.index}")
        self._sweeper = threading.Thread(target=self._sweep, name="tensorvine-sweep", daemon=True)
        self._sweeper.start()

    @answers(SessionCalls.hello)
    async def hello(self, client: str, node: str, pid: int) -> Hello:
        here = self._engine.this_node()
        with self._lock:
            self._state.open(client, time.monotonic())
            if node == here:
                self._local.watch(client, pid)
        memory, wire = self._holdings.memory, self._outlet.address if self._outlet is not None else None
        socket = await self.socket_address(node)
        return Hello(self._config.index, here, os.getpid(), memory.fd, memory.capacity, wire, socket)

    @answers(SessionCalls.socket_address)
    async def socket_address(self, node: str) -> SocketAddress | None:
        return self._server.address() if node == self._engine.this_node() else None

    @answers(SessionCalls.goodbye)
    async def goodbye(self, client: str) -> None:
        self._end(client)
        await self._settle()

    @answers(SessionCalls.renew)
    async def renew(self, client: str) -> bool:
        with self._lock:
            return self._state.renew(client, time.monotonic())

    # ---- the sweep --------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """End the sessions of clients that died or fell silent. Runs as long as the process."""
        pause = threading.Event()
        while not pause.wait(SWEEP_S):
            try:
                self._sweep_once()
            except Exception:
                log.exception("shard %d: a sweep failed; the next comes in %s s", self._config.index, SWEEP_S)

    def _sweep_once(self) -> None:
        if self._claims is not None and self._claims.open and not self._peers.topology.former:
            self._claims.gather()
        self._strays.look()
        self._holdings.start_hashing()
        with self._lock:
            ended = self._state.sweep(time.monotonic())
            died = self._local.died()
        for client in {*ended, *died}:
            log.info("client %s is gone: its pins and unfinished saves are dropped", client)
            self._end(client, parts_too=client in died)
        self._holdings.drop_idle_exports()
        topology = self._peers.topology
        with self._lock:
            self._shelf.forget(topology.gone.keys() - set(topology.alive))
        self._settle_from_thread()

    def _end(self, client: str, parts_too: bool = True) -> None:
        with self._lock:
            self._state.end(client)
            if parts_too:
                self._holdings.drop_client(client)
                self._local.drop(client)
                self._senders.left(client)
