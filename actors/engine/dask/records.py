"""What the directory, hosts, actors and callers tell each other, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from ..engine import SERVICE, Lifetime
from ..sockets.framing import SocketAddress


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a process answers calls."""

    near: SocketAddress
    """For callers of its node."""
    away: SocketAddress

    def addresses(self, *, is_near: bool) -> list[SocketAddress]:
        """Return the addresses for a caller, the best one first."""
        return [*([self.near] if is_near else []), self.away]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an actor is started from, and how it is to live."""

    key: str
    """Of this actor, among all that ever had its name."""
    name: str
    start: bytes = field(repr=False)
    """Its class and arguments, pickled, for its process alone."""
    owner: str
    """Who started it: a client, or a life of an actor."""
    node: str | None = None
    """Where it is wanted."""
    lifetime: Lifetime = SERVICE
    module: str = ""
    """Of its class."""


@dataclass(frozen=True, slots=True)
class Host:
    """A nanny, or a worker without one, that starts actors. One host of each machine is the machine's node."""

    id: str
    process: str
    """Address of the nanny or worker."""
    address: str
    """Of its machine, as others reach it."""
    machine: str
    """The same for all processes that can call each other by Unix sockets."""
    memory: int
    """Bytes that were available on the machine when the host started."""
    cpus: float
    limit: int = 0
    """Bytes of it that the host's worker may take."""
    gpus: tuple[str, ...] = ()
    """As they stand in CUDA_VISIBLE_DEVICES."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """Those of the host's worker, beside CPU, GPU and memory."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Life:
    """A life of an actor: one process."""

    plan: Plan
    number: int
    """0 is the first."""
    gpus: tuple[str, ...] = ()
    """Those that it sees."""
    reach: Reach | None = None
    """None: it has not started yet."""
    failures: int = 0
    """How often its process ended soon after its start."""

    @property
    def owner(self) -> str:
        """Its name, as an owner."""
        return f"{self.plan.key}/{self.number}"


@dataclass(frozen=True, slots=True)
class Boot:
    """What an actor's process is told by its host."""

    life: Life
    host: SocketAddress
    cluster: str
    """The scheduler's address."""
    node: str
    address: str
    """Of the machine."""


@dataclass(frozen=True, slots=True)
class Start:
    """An order to a host: start an actor's process."""

    life: Life
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """An order to a host: end an actor's process."""

    key: str
    number: int


@dataclass(frozen=True, slots=True)
class End:
    """An order to a host that leaves: it is no longer needed."""


Order: TypeAlias = Start | Kill | End


@dataclass(frozen=True, slots=True)
class DaskActor:
    """What callers have of an actor."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class Seat:
    """Who an engine works for, and where."""

    cluster: str
    """The scheduler's address, as it says it itself."""
    owner: str
    """As which it starts actors."""
    address: str
    """Of this machine, as others reach it."""
    machine: str = ""
    """See `Host`; for clients."""
    node: str | None = None
    """None: it is a client's, and its node is that of its machine, if there is one."""
    life: int = 0
    """Of the actor."""
    is_open: Callable[[], bool] = field(default=lambda: True, repr=False)
    """Whether the client is."""


class State(Enum):
    """What an actor is."""

    STARTING = auto()
    """For the first time, or it waits for a node with room."""
    RUNNING = auto()
    RESTARTING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of an actor."""

    state: State
    node: str | None = None
    reach: Reach | None = None
    why: str = ""
    """Why it ended."""
    error: bytes | None = field(default=None, repr=False)
    """What its constructor raised in its first life, pickled."""
