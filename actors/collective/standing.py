"""How a group stands, as one member knows: who died, who left, who gave up, and why the group broke.

Rules
- The first failure is the reason of all that comes later.
- Who died is to blame before who gave up, with the reason of its own, and that before who left.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from ...store.errors import OperationTimeoutError, PeerLostError, TensorMismatchError, TensorVineError
from .connections import Loss

_TOLD = {kind.__name__: kind for kind in (OperationTimeoutError, PeerLostError, TensorMismatchError)}


class Standing:
    """How a group stands; all but `reason` is used with `changed` held.

    Args:
        label: names the group in errors.

    >>> standing = Standing("group 'g', epoch 0")
    >>> with standing.changed:
    ...     standing.lose(2, "left")
    >>> standing.lacks([0, 2]), str(standing.blame("barrier", [0, 2]))
    (True, "group 'g', epoch 0: barrier: rank 2 left")
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.changed = threading.Condition(threading.Lock())
        """Guards what the threads of a member share; held for moments only, and told of all news."""
        self.reason: TensorVineError | None = None
        """Why the group is broken; the first reason stays."""
        self.left = False
        """Whether this member has."""
        self._lost: dict[int, Loss] = {}
        self._gave_up: dict[int, TensorVineError] = {}

    def lose(self, peer: int, loss: Loss) -> None:
        """Take note of who died or left."""
        self._lost[peer] = loss
        self.changed.notify_all()

    def give_up(self, peer: int, told: bytes) -> None:
        """Take note of whose group is broken, and why; see `told`."""
        kind, _, text = told.decode(errors="replace").partition(" ")
        self._gave_up.setdefault(peer, _TOLD.get(kind, PeerLostError)(text))
        self.changed.notify_all()

    def lacks(self, peers: Collection[int]) -> bool:
        """Tell whether one of these died, left or gave up."""
        if not self._lost and not self._gave_up:
            return False
        return any(peer in self._lost or peer in self._gave_up for peer in peers)

    def check(self) -> None:
        """Refuse what is asked of a broken group, with the reason."""
        if self.reason is not None:
            raise again(self.reason)

    def blame(self, what: str, peers: Collection[int]) -> TensorVineError | None:
        """Say who is behind the failure of an operation that needs these; None: nobody, as far as is known."""
        if not self.lacks(peers):
            return None
        found = [peer for peer in self._lost if peer in peers and peer not in self._gave_up]
        died = [peer for peer in found if self._lost[peer] == "died"]
        gave_up = [peer for peer in self._gave_up if peer in peers]
        if gave_up and not died:
            theirs = self._gave_up[gave_up[0]]
            text = str(theirs)
            return type(theirs)(text if "(reported by" in text else f"{text} (reported by rank {gave_up[0]})")
        peer = (died or found)[0]
        return PeerLostError(f"{self.label}: {what}: rank {peer} {self._lost[peer]}")


def label_of(name: str, epoch: int) -> str:
    """Write a group's name for messages."""
    return f"group {name!r}, epoch {epoch}"


def told(error: TensorVineError) -> bytes:
    """Write a reason for the others."""
    return f"{type(error).__name__} {error}".encode()


def again(error: TensorVineError) -> TensorVineError:
    """Return an error that can be raised once more; raised twice, one would show the traces of both."""
    return type(error)(str(error))


def ranks(numbers: Iterable[int]) -> str:
    """Write ranks for messages.

    >>> ranks([2]), ranks([0, 2])
    ('rank 2', 'ranks 0, 2')
    """
    names = [str(rank) for rank in numbers]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
