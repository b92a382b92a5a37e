"""Memory of nodes that is set aside, by name."""

from __future__ import annotations

from dataclasses import dataclass

from .....store.errors import OptionError


@dataclass(frozen=True, slots=True)
class _Reservation:
    node: str
    nbytes: int
    owner: str


class Reservations:
    """What is reserved, and by whom.

    >>> reservations = Reservations()
    >>> [reservations.take(name, "node", 60, "client", memory=100) for name in ("a", "b")]
    [True, False]
    """

    def __init__(self) -> None:
        self._reserved: dict[str, _Reservation] = {}

    def take(self, name: str, node: str, nbytes: int, owner: str, memory: int) -> bool:
        """Set memory of a node that has `memory` bytes aside; False: there is not so much.

        Raises:
            OptionError: the name is taken.
        """
        if name in self._reserved:
            raise OptionError(f"reserve {name!r}: expected an unused name; memory is already reserved under it")
        if nbytes > memory - self.on(node):
            return False
        self._reserved[name] = _Reservation(node, nbytes, owner)
        return True

    def drop(self, name: str) -> None:
        """Let go of what was reserved under a name; nothing is no error."""
        self._reserved.pop(name, None)

    def drop_of(self, owner: str) -> None:
        """Let go of what somebody reserved."""
        for name in [name for name, found in self._reserved.items() if found.owner == owner]:
            del self._reserved[name]

    def on(self, node: str) -> int:
        """Return the bytes that are reserved on a node."""
        return sum(found.nbytes for found in self._reserved.values() if found.node == node)

    def nodes(self, prefix: str) -> dict[str, str]:
        """Return what is reserved under names that begin so -> the node."""
        return {name: found.node for name, found in self._reserved.items() if name.startswith(prefix)}
