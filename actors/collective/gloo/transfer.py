"""What is under way in Gloo, and who keeps it: a group does, whether or not somebody waits.

Rules
- Only a wait makes Gloo tell how a message ended. So whoever waits for the operation waits for Gloo, one at a time.
- Gloo gives up a message whose handle is forgotten. So handles stay until somebody has waited for them, or for a later
  message of the same direction between the same ranks; those of collectives until Gloo says that they have ended.
- A collective has no handles before all members are known to bring the same to it, which the connections tell (of two
  members it may have), and does not end before; one of small arrays ends with that, as a small message does when it is
  taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ....store.errors import TensorVineError
from ....store.waiting import Deadline
from ..member import TimedOutError
from ..operation import Operation, Owner
from ..standing import Standing
from . import library as gloo_library
from .library import Handle

FEW = 16
"""So many that have ended may be kept, without their memory where somebody waited for them."""


class TransferOwner(Owner, Protocol):
    """The member whose transfer it is."""

    standing: Standing


class Transfer(Operation):
    """Something under way in Gloo.

    Args:
        member: as in `Operation`.
        what: as in `Operation`.
        peers: as in `Operation`.
        seconds: as in `Operation`.
        number: as in `Operation`.
        then: what is to be done when it has ended well.
        agreed: what the others bring need not be waited for, as nobody would be met who brings something else.
    """

    def __init__(
        self,
        member: TransferOwner,
        what: str,
        peers: Sequence[int],
        seconds: float,
        number: int | None = None,
        then: Callable[[], None] | None = None,
        *,
        agreed: bool = False,
    ) -> None:
        super().__init__(member, what, peers, seconds, number)
        self._owner = member
        self.handles: Sequence[Handle] | None = None
        """PyTorch's ends of all its parts; None: Gloo has not begun it."""
        self.agreed = agreed
        """Whether what the others bring need not be waited for."""
        self.trouble: Exception | None = None
        """Why Gloo could not begin it."""
        self._then = then
        self._waiting = threading.Lock()
        self._asked = threading.Lock()
        """Taken for good by the first who asks a question that only a wait can answer."""

    def done(self) -> bool:
        """Tell whether it has ended. Where only a wait can tell, a thread waits from the first question on."""
        self._member.check_process()
        over = self.over
        if not over and self._asked.acquire(blocking=False):
            waiting = threading.Thread(
                target=self._finished, args=(self.deadline,), name="collective-wait", daemon=True
            )
            waiting.start()
        return over

    @property
    def over(self) -> bool:
        """Whether nothing of it can be under way."""
        # What a message's handle tells is of no use until it was waited for.
        return self.ended or (self.handles is not None and all(handle.is_completed() for handle in self.handles))

    def _finished(self, deadline: Deadline) -> bool:
        if not self._waiting.acquire(timeout=deadline.left()):
            self._give_up()
            return True
        try:
            if not self.ended:
                self._settle(deadline)
        finally:
            self._waiting.release()
        return True

    def _settle(self, deadline: Deadline) -> None:
        """Let it end, well or not."""
        try:
            if not self.agreed:
                self._await_agreement(deadline)
            for handle in self.handles or ():
                gloo_library.wait(handle, deadline)
            if self._then is not None and not self.ended:
                self._then()
        except TimedOutError:
            self._give_up()
        except (RuntimeError, TensorVineError) as exc:
            self._member.fail(self, exc)
        else:
            self._member.finish(self)
            self.handles, self._then = (), None  # which keep the memory

    def _await_agreement(self, deadline: Deadline) -> None:
        """Wait until all members bring the same, or it has ended."""
        standing = self._owner.standing
        with standing.changed:
            standing.changed.wait_for(
                lambda: self.agreed or self.ended or standing.reason is not None or standing.lacks(self.peers),
                deadline.left(),
            )
            if not self.agreed and not self.ended:
                standing.check()
                raise standing.blame(self.what, self.peers) or TimedOutError
        if self.trouble is not None:
            raise self.trouble

    def _give_up(self) -> None:
        self._member.late(self)
        self._member.finish(self)


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
