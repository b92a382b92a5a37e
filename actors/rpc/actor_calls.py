"""What every actor can be asked that answers by a socket."""

from __future__ import annotations

from ..engine.sockets.framing import SocketAddress
from .calls import remote


class ActorCalls:
    """Calls of an actor that has a `LazyServer`."""

    @remote("ctl", by_socket=False, repeatable=True)
    def socket_address(self, node: str) -> SocketAddress | None:
        """Return where callers of a node reach this actor past the engine; None: there is no such way for them."""
        ...
