"""What a soak does, drawn from its seed: rounds, their modes, the faults of a round, the operations of a client.

Rules
- Everything here follows from the seed and from numbers: the same seed gives the same plan.
- The modes come in shuffled decks: each has its turn before any comes again.
- A fault waits for progress, by count of the clients' operations and not by time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

MIB = 1 << 20
CLIENTS = 4

OPERATIONS: dict[str, int] = {
    "save": 18,
    "save_async": 8,
    "derive": 10,
    "load_name": 14,
    "load_version": 14,
    "load_part": 10,
    "load_into": 4,
    "pin": 5,
    "retire": 18,
    "hold": 8,
    "hold_name": 5,
    "drop": 8,
    "fork": 3,
    "pool": 1,
    "ask": 4,
}
"""Kind of operation -> its weight."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a round is set up, and what goes wrong in it."""

    name: str
    faults: tuple[str, ...]
    """Kinds, each as likely; see `FAULTS`."""
    path: bool = False
    replicas: int = 1
    shards: int = 2
    store_bytes: int = 96 * MIB
    """Capacity of each shard."""
    raylets: int = 1
    session_s: float | None = None
    """How long a client's session lasts without a sign of life; None: as the repository has it."""
    extra: dict[str, int] = field(default_factory=dict[str, int])
    """Operations -> weight, beside or in place of the usual ones."""

    @property
    def text(self) -> str:
        """What findings say of it."""
        where = "path" if self.path else "memory"
        return f"{self.name} ({where}, replicas {self.replicas}, {self.shards} shards, {self.store_bytes // MIB} MiB)"


FULL = {"large": 14, "retire": 12, "hold": 14}
DURABLE = {"durable": 10, "flush": 3}
MODES: tuple[Mode, ...] = (
    Mode("clients", ("kill client", "stop client", "kill clients"), path=True, extra=DURABLE),
    Mode("clients", ("kill client", "stop client", "kill clients"), session_s=4.0),
    Mode("shards", ("kill shard", "stop shard", "kill shard+catalog", "kill shards"), path=True, extra=DURABLE),
    Mode("shards", ("kill shard", "stop shards", "kill shard+client", "stop shard+client")),
    Mode("planner", ("kill planner", "stop planner", "kill shard+planner")),
    Mode("catalog", ("kill catalog", "stop catalog", "kill shard+catalog", "stop shard+catalog")),
    Mode("catalog", ("kill catalog", "kill catalog+client", "kill shard+catalog"), path=True, extra=DURABLE),
    Mode("scale", ("scale", "scale", "kill client", "stop shard"), path=True, extra=DURABLE),
    Mode("scale", ("scale",), shards=3),
    Mode("scale and deaths", ("scale", "kill shard", "kill shard+catalog"), path=True, extra=DURABLE),
    Mode(
        "deaths in scale",
        ("kill shard in scale", "kill catalog in scale", "kill shard+planner in scale"),
        path=True,
        extra=DURABLE,
    ),
    Mode("deaths in scale", ("kill planner in scale", "kill catalog in scale", "kill shard in scale"), shards=3),
    Mode("busy", ("busy machine", "kill shard when busy"), path=True, extra=DURABLE),
    Mode("busy", ("busy machine", "kill client"), replicas=2, shards=3, raylets=3),
    Mode("memory full", ("slow disk", "stop client"), path=True, store_bytes=40 * MIB, extra=FULL | DURABLE),
    Mode("memory full", ("kill client", "stop client"), store_bytes=32 * MIB, extra=FULL),
    Mode("disk", ("slow disk", "full disk", "failing disk"), path=True, extra=DURABLE),
    Mode(
        "disk and deaths",
        ("failing disk", "full disk", "kill shard in trouble", "kill catalog in trouble"),
        path=True,
        extra=DURABLE,
    ),
    Mode("replicas", ("kill shard", "kill catalog", "stop shard"), replicas=2, shards=3, raylets=3),
    Mode("replicas", ("kill shard", "slow disk"), path=True, replicas=2, shards=3, raylets=3, extra=DURABLE),
    Mode("nodes", ("kill node", "kill client"), replicas=2, shards=3, raylets=3),
)
DISK_FAULTS = ("slow disk", "full disk", "failing disk", "kill shard in trouble", "kill catalog in trouble")
"""Faults that need the shim of `disk`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    after: int
    """How many operations of all clients come between the one before and this."""
    seconds: float
    """How long a stop, or trouble with the disk, lasts."""
    draw: int
    """Says which of several processes, or how many shards."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round's plan."""

    seed: int
    number: int
    mode: Mode

    @property
    def where(self) -> str:
        """What findings say of it."""
        return f"seed {self.seed}, round {self.number}, {self.mode.text}"

    def faults(self) -> Iterator[Fault]:
        """Draw faults without end."""
        rng = Random(f"{self.seed}/{self.number}/faults")
        while True:
            kind = rng.choice(self.mode.faults)
            yield Fault(kind, rng.randint(8, 40), rng.choice((0.2, 1.0, 2.5, 6.0)), rng.getrandbits(30))

    def operations(self, client: int, life: int) -> Iterator[tuple[str, Random]]:
        """Draw a client's operations, each with dice of its own, without end."""
        rng = Random(f"{self.seed}/{self.number}/{client}/{life}")
        weights = OPERATIONS | self.mode.extra
        while True:
            kind = rng.choices(list(weights), list(weights.values()))[0]
            yield kind, Random(rng.getrandbits(64))


def round_of(seed: int, number: int, faults_at_disk: bool = True) -> Round:
    """Return a round, from 0.

    Args:
        seed: of the soak.
        number: of the round.
        faults_at_disk: whether the machine allows faults at the disk's calls; without, those are left out.

    >>> round_of(7, 3) == round_of(7, 3), len({round_of(7, n).mode.text for n in range(len(MODES))}) == len(MODES)
    (True, True)
    """
    deck, place = divmod(number, len(MODES))
    modes = list(MODES)
    Random(f"{seed}/deck {deck}").shuffle(modes)
    mode = modes[place]
    if not faults_at_disk:
        left = tuple(fault for fault in mode.faults if fault not in DISK_FAULTS)
        mode = replace(mode, faults=left or ("kill client",))
    return Round(seed, number, mode)


def seconds_of(text: str) -> float:
    """Read a duration.

    Raises:
        ValueError: it is none.

    >>> seconds_of("90s"), seconds_of("10m"), seconds_of("1h")
    (90.0, 600.0, 3600.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or not float(found[1]):
        raise ValueError(f"duration: expected such as 90s, 10m or 1h; found {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
