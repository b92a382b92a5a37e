"""The engine on Dask: what clients and actors call.

Rules (see docs/design/dask.md)
- A client asks the directory itself, an actor through its host. Both own what they start and reserve.
- The server of its blocks, and connections to those of others, are in the event loop of this process (`lines`).
- Where it is unpickled it is the engine of that cluster in that process.
- `spawn` does not wait until an actor has started: `reach` does, and raises the constructor's error if it failed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np

from ....store.errors import (
    EngineStoppedError,
    ModelLostError,
    OperationTimeoutError,
    OptionError,
    ShardUnavailableError,
)
from ....store.waiting import Backoff, Deadline
from ..engine import SERVICE, Lifetime, Node
from ..opened import Opened
from ..sockets.framing import SocketAddress, outcome_of
from ..sockets.lines import Lines, LostError, background_loop, result_of
from ..sockets.packing import pack
from ..sockets.server import CallServer
from .blocks import GROUP, Block, BlockHandle, Blocks, Owner
from .records import DaskActor, Plan, Reach, Seat, Standing, State

FREED_S = 10.0
"""How long it may take until memory that was let go is known to be free."""
SERVE_S = 60.0
"""How long a busy machine may take to open or close a socket."""

Ask: TypeAlias = Callable[[bytes], bytes]
"""Asks the directory: takes a method and its arguments, pickled, and returns the pickled outcome. It raises
`ShardUnavailableError` if the directory does not answer."""


class DaskEngine:
    """The engine; `clients.engine_of` makes it for a client.

    Args:
        seat: who it works for, and where.
        directory: asks the directory.
        end_client: ends the client, where that was made for this engine.
    """

    def __init__(self, seat: Seat, directory: Ask, end_client: Callable[[], object] | None = None) -> None:
        self._seat = seat
        self._directory = directory
        self._end_client = end_client
        self._opened = Opened(f"the engine on the Dask cluster at {seat.cluster}")
        self._opening = threading.Lock()
        self._node = seat.node
        self._owner: Owner | None = None
        """This process, for those who have handles of its blocks."""
        self._blocks = Blocks(self._as_owner)
        self._server: CallServer | None = None
        """Of the blocks."""
        self._owners: dict[str, Lines] = {}
        """Owner of blocks -> the connections to it."""
        self._last: dict[str, Standing] = {}
        """Key of an actor -> where it ran when the directory was asked last."""
        if (known := _engines.get(seat.cluster)) is None or not known.is_running:
            _engines[seat.cluster] = self

    def __reduce__(self) -> tuple[Callable[[str], DaskEngine], tuple[str]]:
        return engine_here, (self._seat.cluster,)

    def close(self) -> None:
        """End all connections; its blocks go."""
        if self._opened.close():
            for lines in self._owners.values():
                lines.close()
            if self._server is not None:
                asyncio.run_coroutine_threadsafe(self._server.close(), background_loop()).result(SERVE_S)

    def show(self, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Do nothing: Dask's dashboard has no gauges of actors."""

    def leave(self) -> None:
        """End all connections, and a client that was made for it, with the cluster that this may have started."""
        self.close()
        if self._end_client is not None and not self._opened.inherited:
            end, self._end_client = self._end_client, None
            end()

    # ---- nodes ----------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """List living nodes, this process's own first."""
        found = cast("list[tuple[Node, str]]", self._ask("nodes"))
        if self._seat.node is None:
            self._node = self._node_among(found)
        return sorted((node for node, _ in found), key=lambda node: (node.id != self._node, node.id))

    def this_node(self) -> str:
        """Return the id of this process's node; the first one's where it is on none."""
        if self._node is None:
            nodes = self.nodes()
            if not nodes:
                raise ShardUnavailableError("this node: expected a worker of the Dask cluster; found none")
            return nodes[0].id
        return self._node

    def address(self) -> str:
        """Return the address of this process's machine."""
        return self._seat.address

    # ---- actors ---------------------------------------------------------------------------------------

    def spawn(
        self,
        cls: type,
        name: str,
        arguments: Mapping[str, object],
        node: str | None = None,
        lifetime: Lifetime = SERVICE,
    ) -> DaskActor:
        """Start or find a named actor.

        Raises:
            OptionError: it is to be placed in a bundle, which Dask has not, or on a GPU and a part of another one.
        """
        if lifetime.bundle is not None:
            raise OptionError(f"{name}: bundle: expected None; a Dask cluster has no placement groups")
        if lifetime.gpus > 1.0 and lifetime.gpus != int(lifetime.gpus):
            raise OptionError(f"{name}: gpus: expected a fraction of one GPU, or a whole number; found {lifetime.gpus}")
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        start = cloudpickle.dumps((path, cloudpickle.dumps((cls, dict(arguments)))))
        key, owner = uuid.uuid4().hex, self._seat.owner
        plan = Plan(key, name, start, owner, node, lifetime, module=cls.__module__)
        return _actor(self._ask("spawn", plan))

    def find(self, name: str) -> DaskActor:
        """Find a named actor."""
        return _actor(self._ask("find", name))

    def actors(self) -> dict[str, str | None]:
        """List the named actors."""
        return self._ask("actors")

    def kill(self, name: str) -> None:
        """End a named actor for good; gives back when its process has ended, or its machine has not said so in time."""
        if self.is_running:
            self._ask("kill", name)

    def restarted(self) -> bool:
        """Tell whether this actor was restarted."""
        return self._seat.life > 0

    # ---- what the directory keeps ---------------------------------------------------------------------

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve memory in the directory's books."""
        pauses, deadline = Backoff(0.05, 0.5), Deadline.after(FREED_S if wait else 0.0)
        while not self._ask("reserve", name, node, nbytes, self._seat.owner):
            total = next((known.resources.get("memory", 0.0) for known in self.nodes() if known.id == node), 0.0)
            if nbytes > total or not pauses.wait(deadline):
                return False
        return True

    def unreserve(self, name: str) -> None:
        """Let go of memory."""
        self._ask("unreserve", name)

    def reserved(self, prefix: str) -> dict[str, str | None]:
        """List what is reserved, and where."""
        return self._ask("reserved", prefix)

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep bytes in the scheduler, for as long as it lives."""
        self._ask("keep", name, value)

    def keep_absent(self, name: str, value: bytes) -> bool:
        """Keep bytes in the scheduler, unless the name is kept."""
        return self._ask("keep_absent", name, value)

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept there."""
        return self._ask("kept", prefix)

    # ---- calls ----------------------------------------------------------------------------------------

    def reach(self, actor: object, timeout: float, who: str) -> Sequence[SocketAddress]:
        """Ask the directory for an actor's addresses; one that does not answer has told the last ones before."""
        callee, deadline = cast(DaskActor, actor), Deadline.after(timeout)
        standing = self._standing(callee)
        while standing.state is State.STARTING:
            if not deadline.left():
                raise _late(who, timeout)
            standing = self._standing(callee)
        if standing.error is not None:
            raise pickle.loads(standing.error)  # noqa: S301  of the actor's process
        if standing.reach is None:
            why = standing.why or "it died and is being restarted"
            raise ShardUnavailableError(f"{who}: expected a running actor; {why}")
        self._last[callee.key] = standing
        return standing.reach.addresses(is_near=standing.node == self._node)

    def _standing(self, actor: DaskActor) -> Standing:
        try:
            return cast(Standing, self._ask("where", actor.key))
        except ShardUnavailableError:
            if (known := self._last.get(actor.key)) is None:
                raise
            return known

    # ---- blocks ---------------------------------------------------------------------------------------

    def put(self, block: object) -> Block:
        """Keep a copy of an array in this process."""
        self._check_running("put")
        self._as_owner()
        return self._blocks.put(np.asarray(block))

    def get(self, handles: Sequence[object], timeout: float, who: str) -> list[Any]:
        """Return blocks: those of this process as they are, others as their owners send them."""
        self._check_running(who)
        deadline = Deadline.after(timeout)
        coming = [self._fetch(handle) for handle in cast("Sequence[Block | BlockHandle]", handles)]
        try:
            return [result_of(each, deadline.left(), who) if isinstance(each, Future) else each for each in coming]
        except LostError as exc:
            raise ModelLostError(f"{who}: expected bytes in its memory; they were lost when it died ({exc})") from exc

    def _fetch(self, handle: Block | BlockHandle) -> Future[Any] | np.ndarray:
        if isinstance(handle, Block):
            return handle.array
        if handle.owner == self._owner:
            return self._blocks.find(handle.key)
        return cast("Future[Any]", self._lines(handle.owner).send(GROUP, pack(("block", (handle.key,)))))

    # ---- within ---------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether it can be used: neither it nor its client is closed."""
        return not self._opened.closed and self._seat.is_open()

    def _check_running(self, what: str) -> None:
        self._opened.check_process()
        if not self.is_running:
            raise EngineStoppedError(f"{what}: expected the Dask client of this engine to be open; it was closed")

    def _ask(self, method: str, *arguments: object) -> Any:
        self._check_running(method)
        return outcome_of(self._directory(pickle.dumps((method, arguments), 5)))

    def _node_among(self, nodes: list[tuple[Node, str]]) -> str | None:
        """Return the node of this machine; of several, the one of the same name, else the first that stays."""
        here = self._seat.machine.rpartition("/")[0]
        there = [(node, machine) for node, machine in nodes if machine.rpartition("/")[0] == here]
        ranked = sorted((machine != self._seat.machine, node.leaving, node.id) for node, machine in there)
        return ranked[0][2] if ranked else None

    def _lines(self, owner: Owner) -> Lines:
        with self._opening:
            if owner.id not in self._owners:
                self._owners[owner.id] = Lines(lambda: owner.reach.addresses(is_near=owner.node == self._node))
            return self._owners[owner.id]

    def _as_owner(self) -> Owner:
        """Have this process's blocks served from now on."""
        with self._opening:
            if self._owner is None:
                serving = asyncio.run_coroutine_threadsafe(self._serve_blocks(), background_loop())
                self._owner = Owner(uuid.uuid4().hex, self._node, serving.result(SERVE_S))
            return self._owner

    async def _serve_blocks(self) -> Reach:
        self._server = CallServer({"block": GROUP}, self._give_block, "blocks")
        return Reach(self._server.address, self._server.address_at(self._seat.address))

    async def _give_block(self, method: str, arguments: tuple[object, ...]) -> np.ndarray:
        return self._blocks.find(*cast("tuple[str]", arguments))


_engines: WeakValueDictionary[str, DaskEngine] = WeakValueDictionary()
"""Cluster -> this process's engine of it."""


def engine_here(cluster: str) -> DaskEngine:
    """Return this process's engine of a cluster.

    Raises:
        EngineStoppedError: it has none.
    """
    engine = _engines.get(cluster)
    if engine is None:
        raise EngineStoppedError(f"the Dask cluster at {cluster}: expected an engine of it in this process; found none")
    return engine


def _actor(plan: Plan) -> DaskActor:
    return DaskActor(plan.name, plan.key)


def _late(who: str, timeout: float) -> OperationTimeoutError:
    return OperationTimeoutError(f"{who}: expected it to start within {timeout:.1f} s; it has not")
