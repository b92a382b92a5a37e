"""Transports by which blocks travel from a shard to a reader (docs/design/online.md).

Rules
- All transports give the same bytes; they differ in what they need and in what they cost.
- A transport moves bytes and nothing else: what a model is, and where its tensors lie, the reader has learned before.
- A further transport is one more object of this interface in the list that a reader is given.
- A transport that cannot be used just now raises `ShardUnavailableError`: the reader takes another.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ....store.errors import ModelLostError, RepositoryNotFoundError, ShardUnavailableError
from ....store.segments.blockheader import header_of
from ....store.segments.segment import Block, SegmentId, layout
from ....store.waiting import Deadline
from ...memory.buffers import Buffers
from ...memory.copying import copy_all
from ...rpc.channel import Answer
from ...rpc.redis_keys import Address
from ...shard.calls import ShardCalls
from ...transport.backends import BACKENDS
from ...transport.files_transport import FilesTransport
from ...transport.frames import Asked, Digests, Received
from ...transport.targets import NewMemory
from ...transport.tcp import TcpClient
from ..session import Session
from .group_transport import GroupTransport

AUTO = "auto"
SHARED = "shared"
REACH_S = 10.0
"""How long a shard may take to start again; then the catalog may know another one that has the bytes."""


class Transport(Protocol):
    """Brings blocks of one shard's segments to this process."""

    name: str
    """What `transport=` calls it."""
    checks: bool
    """It holds contents against checksums itself."""
    exact: bool
    """It gives the values that the shard has, not what a lossy codec made of them."""

    @property
    def automatic(self) -> bool:
        """Whether `transport="auto"` may take it."""
        ...

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether it can be used for a shard from here; who must ask the shard waits until `deadline`."""
        ...

    def blocks(
        self, shard: int, places: Asked, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Bring slots of segments of a shard.

        Args:
            shard: its index.
            places: segment -> slots, mapped to their bytes.
            digests: tell the content hashes, too; a transport that `checks` need not.
            deadline: until when.
            what: names the read in errors.

        Raises:
            ShardUnavailableError: it cannot be used just now.
            ModelLostError: a segment is not there any more.
            OperationTimeoutError: it took longer.
        """
        ...

    def close(self) -> None:
        """Let go of what it keeps open."""
        ...


def far_transports(session: Session) -> list[Transport]:
    """Return the transports to a shard whose memory is not mapped, the preferred one first."""
    groups = [GroupTransport(session, backend) for backend in BACKENDS]
    return [
        SocketTransport(session),
        ObjectStoreTransport(session),
        *groups,
        FilesTransport(session.path),
    ]


class SharedMemoryTransport:
    """The shard's memory, mapped: nothing travels. Of one node only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mapped: weakref.WeakValueDictionary[tuple[SegmentId, int], np.ndarray] = weakref.WeakValueDictionary()

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether the memory is mapped."""
        return self._session.connection(shard, deadline).view is not None

    def lock(self, segment: SegmentId, block: Block) -> np.ndarray | None:
        """Return a block's bytes, locked in place where they lie; None when it is not, or no longer, there.

        No message is sent: a shard to which there is no connection has nothing here.
        """
        if isinstance(block.handle, bytes):
            return np.frombuffer(block.handle, np.uint8)
        key = (segment, block.generation)
        mapped = self._mapped.get(key)
        if mapped is None:
            connection = self._session.connections.present(block.shard)
            view = connection.view if connection is not None else None
            mapped = view.read(block.handle, header_of(segment, block.generation)) if view is not None else None
            if mapped is not None:
                self._mapped[key] = mapped
        return mapped


class SocketTransport:
    """TCP, straight from the shard's memory into this process's."""

    name = "socket"
    checks = False
    exact = True
    automatic = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._target = NewMemory(Buffers())
        self._clients: dict[int, tuple[Address, TcpClient]] = {}
        self._lock = threading.Lock()

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Tell whether the shard has a TCP server."""
        return self._session.connection(shard, deadline.sooner(REACH_S)).hello.tcp_address is not None

    def blocks(
        self, shard: int, places: Asked, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Read over TCP; once more where the shard has started again and listens elsewhere."""
        address = self._address(shard, deadline, what)
        try:
            return self._client(shard, address).read(places, deadline.left_for(what), what, digests)
        except ShardUnavailableError:
            self._session.connections.drop(shard)
            again = self._address(shard, deadline, what)
            if again == address:
                raise
        return self._client(shard, again).read(places, deadline.left_for(what), what, digests)

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            clients = [client for _, client in self._clients.values()]
            self._clients.clear()
        for client in clients:
            client.close()

    def _address(self, shard: int, deadline: Deadline, what: str) -> Address:
        tcp_address = self._session.connection(shard, deadline.sooner(REACH_S)).hello.tcp_address
        if tcp_address is None:
            raise ShardUnavailableError(f"{what}: expected a TCP server in shard {shard}; found none")
        return tcp_address

    def _client(self, shard: int, address: Address) -> TcpClient:
        with self._lock:
            known = self._clients.get(shard)
            if known is not None and known[0] == address:
                return known[1]
            host, port, token = address
            client = TcpClient((host, port), token, target=self._target)
            self._clients[shard] = (address, client)
        if known is not None:
            known[1].close()
        return client


class ObjectStoreTransport:
    """The engine's object store, which keeps one copy per node for all who read there.

    What is asked for is copied out of it. Only the process that got an object keeps the store from using its memory
    again: a child that it forks, and that outlives its arrays, would read what comes next.
    """

    name = "object_store"
    checks = False
    exact = True
    automatic = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buffers = Buffers()

    def brings(self, shard: int, deadline: Deadline) -> bool:
        """Any shard's blocks come by this transport."""
        return True

    def blocks(
        self, shard: int, places: Asked, digests: bool, deadline: Deadline, what: str
    ) -> dict[SegmentId, Received]:
        """Have the shard put blocks into the store, and copy what is asked for out of it.

        A shard that dies before they have come is asked again: its next life has them, or says what is lost.
        """
        while True:
            blocks = self._session.call(shard, ShardCalls.carried(_listed(places)), deadline.left_for(what))
            # content hashes are answered beside the bytes
            asked = self._session.send(shard, ShardCalls.digests(list(places))) if digests else None
            far = {s: block for s, block in blocks.items() if not isinstance(block.handle, bytes)}
            with contextlib.suppress(ModelLostError):
                came = self._come([block.handle for block in far.values()], deadline, what)
                break
        hashes: Digests = self._digests(asked, shard, blocks.keys(), deadline, what) if asked is not None else {}
        found: dict[SegmentId, Received] = {}
        for segment, block in blocks.items():
            if segment not in far:
                array = np.frombuffer(block.handle, np.uint8)
                found[segment] = _received(block, places[segment], array, hashes.get(segment))
        with ThreadPoolExecutor(1, thread_name_prefix="tensorvine-copy") as helper:  # a thread only for many bytes
            for segment, array in zip(far, came, strict=True):
                seen = _received(far[segment], places[segment], array, hashes.get(segment))
                found[segment] = self._copied(seen, far[segment], helper)
        return found

    def close(self) -> None:
        """Do nothing: the engine owns the store."""

    def _come(self, handles: Sequence[object], deadline: Deadline, what: str) -> list[np.ndarray]:
        return self._session.engine.get(handles, deadline.left_for(what), what) if handles else []

    def _digests(
        self, asked: Answer[Digests], shard: int, blocks: AbstractSet[SegmentId], deadline: Deadline, what: str
    ) -> Digests:
        """Wait for the content hashes that were asked for; a shard that died meanwhile is asked again."""
        try:
            hashes = asked.result(deadline.left_for(what))
        except (ShardUnavailableError, RepositoryNotFoundError):
            left = deadline.left_for(what)
            hashes = self._session.call(shard, ShardCalls.digests(list(blocks)), left)
        lost = sorted(blocks - hashes.keys())
        if lost:
            raise ModelLostError(f"{what}: expected content hashes of segments {lost}; the segments were released")
        return hashes

    def _copied(self, seen: Received, block: Block, helper: Executor) -> Received:
        """Copy slots into this process's own memory, each up to where the block's next slot starts."""
        starts = sorted({at for at in block.offsets if isinstance(at, int)})
        ends = dict(zip(starts, [*starts[1:], seen.block.nbytes], strict=True))
        spans = [seen.block[at : ends[at]] for at in seen.offsets.values()]
        offsets, length = layout([span.nbytes for span in spans])
        memory = self._buffers.take(length)
        target = np.frombuffer(memory, np.uint8)
        places = (target[offset : offset + span.nbytes] for span, offset in zip(spans, offsets, strict=True))
        copy_all(zip(places, spans, strict=True), helper)
        return Received(dict(zip(seen.offsets, offsets, strict=True)), self._buffers.block(memory), seen.digests)


def _listed(places: Asked) -> dict[SegmentId, list[int]]:
    return {segment: list(slots) for segment, slots in places.items()}


def _received(
    block: Block, slots: Collection[int], array: np.ndarray, hashes: Sequence[str] | Mapping[int, str] | None = None
) -> Received:
    offsets = {slot: at for slot in slots if isinstance(at := block.offsets[slot], int)}
    if len(offsets) < len(set(slots)):
        gone = sorted(set(slots) - offsets.keys())
        raise ModelLostError(f"expected slots {list(slots)} of a block; {gone} no longer exist")
    digests = {slot: hashes[slot] for slot in slots} if hashes is not None else None
    return Received(offsets, array, digests)
