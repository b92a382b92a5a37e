"""What the directory, agents, actors and callers tell each other, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from ..engine import SERVICE, Lifetime, Node
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
class Agent:
    """An agent, which is a node."""

    id: str
    address: str
    """Of its machine, as others reach it."""
    machine: str
    """The same for all processes that can call each other by Unix sockets."""
    memory: int
    """Bytes that may be reserved in all."""
    cpus: float
    gpus: tuple[str, ...] = ()
    """As they stand in CUDA_VISIBLE_DEVICES."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """Those of the machine's workers, beside CPU, GPU and memory."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def node(self, reserved: int, leaving: bool) -> Node:
        """Return it as the engine's users see it, with so many bytes of its memory reserved."""
        told = {"CPU": self.cpus, "GPU": float(len(self.gpus)), "memory": float(self.memory)}
        resources = {name: value for name, value in {**self.resources, **told}.items() if value}
        return Node(self.id, self.memory - reserved, resources, self.labels, leaving, self.address)


@dataclass(frozen=True, slots=True)
class Report:
    """A life of an actor, as its agent tells of it."""

    plan: Plan
    life: int
    """0 is the first."""
    gpus: tuple[str, ...] = ()
    """Those that it sees."""
    reach: Reach | None = None
    """None: it has not started yet."""
    failures: int = 0
    """How often its process ended soon after its start."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What an actor's process is told by its agent."""

    report: Report
    agent: SocketAddress
    cluster: str
    """The scheduler's address."""
    node: str
    address: str
    """Of the machine."""


@dataclass(frozen=True, slots=True)
class Start:
    """An order to an agent: start an actor's process."""

    report: Report
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """An order to an agent: end an actor's process."""

    key: str
    life: int


@dataclass(frozen=True, slots=True)
class End:
    """An order to an agent that leaves: nobody needs it any more."""


@dataclass(frozen=True, slots=True)
class Keep:
    """An order to an agent: a change of what is kept, for its copy; None: it is let go of."""

    number: int
    name: str
    value: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Copy:
    """All that is kept, as of one change; as an order to an agent: this is its copy now."""

    origin: str = ""
    """The directory that it was last changed in."""
    number: int = 0
    facts: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)

    def after(self, change: Keep) -> Copy:
        """Return it after a change."""
        facts = {name: value for name, value in self.facts.items() if name != change.name}
        if change.value is not None:
            facts[change.name] = change.value
        return Copy(self.origin, change.number, facts)


Order: TypeAlias = Start | Kill | End | Keep | Copy


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
    machine: str
    """See `Agent`."""
    node: str | None = None
    """None: it is a client's, and its node is the agent's of its machine, if there is one."""
    life: int = 0
    """Of the actor."""
    is_open: Callable[[], bool] = field(default=lambda: True, repr=False)
    """Whether the client is."""

    def node_among(self, agents: Sequence[Agent]) -> str | None:
        """Return the node of this machine; of several, the one of the same name, else the first."""
        here = self.machine.rpartition("/")[0]
        there = [agent for agent in agents if agent.machine.rpartition("/")[0] == here]
        return min(((agent.machine != self.machine, agent.id) for agent in there), default=(False, None))[1]


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
    life: int = 0
    node: str | None = None
    reach: Reach | None = None
    why: str = ""
    """Why it ended."""
    error: bytes | None = field(default=None, repr=False)
    """What its constructor raised in its first life, pickled."""


def life_of(key: str, life: int) -> str:
    """Name a life of an actor, as an owner."""
    return f"{key}/{life}"
