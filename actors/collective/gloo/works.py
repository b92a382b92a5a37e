"""What is under way in Gloo, and who keeps it: a group does, whether or not somebody waits.

Rules
- Gloo gives up a message whose handle is forgotten. So handles stay until somebody has waited for them, or for a later
  message of the same direction between the same ranks; those of collectives until Gloo says that they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..member import Member, Operation
from . import library as gloo_library
from .library import Handle

FEW = 16
"""So many that have ended may be kept, without their memory where somebody waited for them."""


class Transfer(Operation):
    """Something under way in Gloo.

    Args:
        member: as in `Operation`.
        what: as in `Operation`.
        peers: as in `Operation`.
        seconds: as in `Operation`.
        begun: as in `Operation`.
        handles: of all its parts.
        then: what is to be done when they have ended well.
    """

    def __init__(
        self,
        member: Member,
        what: str,
        peers: Collection[int],
        seconds: float,
        begun: int | None,
        handles: Sequence[Handle],
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(member, what, peers, seconds, begun)
        self._handles = handles
        self._then = then

    def _finish(self, deadline: float) -> None:
        for handle in self._handles:
            gloo_library.wait(handle, deadline)
        if self._then is not None:
            self._then()
        self._handles, self._then = (), None  # which keep the memory

    def _complete(self) -> bool | None:
        # What a message's handle tells is of no use until it was waited for.
        return True if all(handle.is_completed() for handle in self._handles) else None

    @property
    def over(self) -> bool:
        """Whether nothing of it can be under way."""
        return self._ended.is_set() or bool(self._complete())


class Kept:
    """What may be under way. What has ended is forgotten when the number of all has doubled, which costs little.

    Args:
        ordered: they end in the order in which they began, as messages between two ranks do.
    """

    def __init__(self, *, ordered: bool) -> None:
        self.number = 0
        """How many have begun."""
        self._ordered = ordered
        self._open: list[Transfer] = []
        self._most = FEW

    def add(self, transfer: Transfer) -> None:
        """Keep one that has begun."""
        if len(self._open) >= self._most:
            over = [place for place, one in enumerate(self._open) if one.over]
            if self._ordered:
                over = range(over[-1] + 1) if over else ()
            gone = set(over)
            self._open = [one for place, one in enumerate(self._open) if place not in gone]
            self._most = max(FEW, 2 * len(self._open))
        self.number += 1
        self._open.append(transfer)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()
