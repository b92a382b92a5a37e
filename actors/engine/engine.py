"""The engine seam: what TensorVine needs from the system that runs its actors.

Rules
- An engine starts, finds and ends actors, and says where they can be called. Calls themselves travel by our own sockets
  (`sockets`).
- Nothing outside an engine's own file calls Ray or Dask; a second engine is a folder of its own, as `ray` and `dask`.
- Every wait has a timeout. What an engine raises leaves here as an error of the one tree.
- A block that `put` stored belongs to the process that put it: shards put, clients only borrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from .sockets.framing import SocketAddress

Actor: TypeAlias = object
"""What an engine calls a running actor."""
Handle: TypeAlias = object
"""What an engine calls a stored block."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as the engine sees it."""

    id: str
    memory_free: int
    """Bytes of its memory that nobody has reserved."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """What it has of each resource, used or not."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    leaving: bool = False
    """It was told to drain: it ends soon, and takes nothing new."""
    address: str = ""
    """Of its machine, as the others of the cluster reach it."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long an actor lives, and on what."""

    outlives: bool = True
    """It stays when its starter has ended."""
    restarts: bool = True
    """It is started again when its process dies."""
    gpus: float = 0.0
    """GPUs that it takes; a part of one may be shared."""
    cpus: float = 0.0
    """CPU slots that it takes."""
    bundle: tuple[Any, int] | None = None
    """A placement group of the engine's, and the number of the bundle in it where the actor is placed."""
    spread: bool = False
    """Where no bundle and no node is named: over the nodes, as evenly as can be; False: as the engine likes it."""


SERVICE = Lifetime()


@runtime_checkable
class Engine(Protocol):
    """What runs actors and stores blocks. `ray.engine.RayEngine` is the first."""

    def nodes(self) -> list[Node]:
        """List the living nodes; the first is the one that clients without a node of their own count as theirs."""
        ...

    def this_node(self) -> str:
        """Return the id of the node that this process runs on."""
        ...

    def address(self) -> str:
        """Return the address of this process's machine, as the others of the cluster reach it."""
        ...

    def spawn(
        self,
        cls: type,
        name: str,
        arguments: Mapping[str, object],
        node: str | None = None,
        lifetime: Lifetime = SERVICE,
    ) -> Actor:
        """Start an actor, by default one that outlives its starter, or find the running one of that name."""
        ...

    def find(self, name: str) -> Actor:
        """Find a running actor by name.

        Raises:
            LookupError: there is none.
            ShardUnavailableError: who knows the actors does not answer; `nodes`, `spawn` and `kill` raise it, too.
        """
        ...

    def actors(self) -> dict[str, str | None]:
        """Return the names of all actors -> the node; None: it is not running, but being started.

        Raises:
            ShardUnavailableError: as `find`.
        """
        ...

    def kill(self, name: str) -> None:
        """End an actor for good; a missing one is no error."""
        ...

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        """Set some of a node's memory aside under a name, so that nobody else is promised it.

        It stays so until `unreserve`, and no longer than the actor, or the program, that reserved it. A name that is
        taken is an error of the caller.

        Args:
            name: names it.
            node: the node's id.
            nbytes: bytes.
            wait: what was just let go may take some seconds until it is known to be free: wait for it.

        Returns:
            False where the node has not so much that nobody has reserved.
        """
        ...

    def unreserve(self, name: str) -> None:
        """Let go of what was reserved under a name; nothing is no error."""
        ...

    def reserved(self, prefix: str) -> dict[str, str | None]:
        """Return what is reserved under names that begin so -> the node; None: that node is no more."""
        ...

    def restarted(self) -> bool:
        """Tell whether the actor that this code runs in had an earlier lifetime."""
        ...

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep some bytes for as long as the cluster lives, whatever actors die; None lets go of them.

        Raises:
            ShardUnavailableError: it cannot be said whether they are kept.
        """
        ...

    def keep_absent(self, name: str, value: bytes) -> bool:
        """Keep some bytes unless the name is kept; of several callers at once one gets True. Errors as in `keep`.

        False may also mean that this call itself has kept them, and was repeated: `kept` tells.
        """
        ...

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept under names that begin so; errors as in `keep`."""
        ...

    def reach(self, actor: Actor, timeout: float, who: str) -> Sequence[SocketAddress]:
        """Return the addresses where this process can call an actor, the best one first. Waits while it starts.

        Raises:
            OperationTimeoutError: it did not start within `timeout` seconds; names `who`.
            ShardUnavailableError: it died or is being restarted; names `who`.
            Exception: what its constructor raised.
        """
        ...

    def put(self, block: object) -> Handle:
        """Store a copy of a block in this node's shared memory, owned by this process."""
        ...

    def get(self, handles: Sequence[Handle], timeout: float, who: str) -> list[Any]:
        """Map blocks, read-only, without a copy where they lie on this node.

        Raises:
            OperationTimeoutError: they did not arrive within `timeout` seconds; names `who`.
            ModelLostError: a block's owner has died.
        """
        ...

    def show(self, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Show gauges of this actor in the engine's own dashboard, if it has one that shows gauges.

        Args:
            gauges: name -> value; always the same names.
            labels: label -> value, of all of these gauges.
        """
        ...

    def leave(self) -> None:
        """Leave the cluster; one that was started in this process ends. What is called after that is refused."""
        ...
