"""On which node an actor starts, and which GPUs it sees.

Rules
- An actor that wants a node gets it while that lives, is not leaving, and has what the actor takes; else, as an actor
  that wants none, the node with the fewest actors that has it. None: it waits.
- CPU slots and GPUs are counted. Whole GPUs are free ones; a part of one is of that which is in use most and has room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..engine import Lifetime
from .records import Host

_ROUNDING = 1e-9


class Load:
    """What actors take of one node."""

    def __init__(self) -> None:
        self.actors = 0
        self.cpus = 0.0
        self.gpus: defaultdict[str, float] = defaultdict(float)
        """GPU -> the share of it."""

    def add(self, lifetime: Lifetime, gpus: tuple[str, ...]) -> None:
        """Count an actor in."""
        self.actors += 1
        self.cpus += lifetime.cpus
        for gpu in gpus:
            self.gpus[gpu] += min(lifetime.gpus, 1.0)


def gpus_for(host: Host, load: Load, lifetime: Lifetime) -> tuple[str, ...] | None:
    """Return the GPUs that an actor would get of a node; None: it has not what the actor takes.

    >>> host, load = Host("a", "", "", "", 0, cpus=2.0, gpus=("0", "1")), Load()
    >>> load.add(Lifetime(gpus=0.5), ("1",))
    >>> gpus_for(host, load, Lifetime(gpus=0.5)), gpus_for(host, load, Lifetime(gpus=1.0))
    (('1',), ('0',))
    >>> gpus_for(host, load, Lifetime(gpus=2.0)), gpus_for(host, load, Lifetime(cpus=2.5))
    (None, None)
    """
    if lifetime.cpus > host.cpus - load.cpus + _ROUNDING:
        return None
    if not lifetime.gpus:
        return ()
    if lifetime.gpus < 1.0:
        fitting = [gpu for gpu in host.gpus if load.gpus[gpu] + lifetime.gpus <= 1.0 + _ROUNDING]
        return (max(fitting, key=lambda gpu: load.gpus[gpu]),) if fitting else None
    free = [gpu for gpu in host.gpus if load.gpus[gpu] < _ROUNDING]
    count = round(lifetime.gpus)
    return tuple(free[:count]) if count <= len(free) else None


def choose(
    hosts: Iterable[Host], loads: defaultdict[str, Load], lifetime: Lifetime, wanted: str | None
) -> tuple[str, tuple[str, ...]] | None:
    """Return a node and the GPUs of an actor on it; None: there is no room now.

    Args:
        hosts: those that take new actors.
        loads: what actors take of each node.
        lifetime: says what the actor takes.
        wanted: a node that is preferred.
    """
    ranked = sorted(hosts, key=lambda host: (host.id != wanted, loads[host.id].actors, host.id))
    for host in ranked:
        gpus = gpus_for(host, loads[host.id], lifetime)
        if gpus is not None:
            return host.id, gpus
    return None
