"""An actor's server of short calls: what it `answers` by socket may be called."""

from __future__ import annotations

import logging

from ..engine.sockets.framing import SocketAddress
from ..engine.sockets.server import CallServer
from .calls import socket_methods

log = logging.getLogger(__name__)


def call_server(actor: object, who: str) -> CallServer:
    """Serve an actor's short calls in the running event loop.

    Args:
        actor: whose.
        who: names the actor in the log.

    Raises:
        OSError: no socket can be had.

    >>> import asyncio
    >>> from ..engine.sockets.blocking import BlockingConnections
    >>> from .calls import answers, remote
    >>> class DoublingCalls:
    ...     @remote("ctl")
    ...     def double(self, value: int) -> int: ...
    >>> class Doubling:
    ...     @answers(DoublingCalls.double)
    ...     async def double(self, value: int) -> int:
    ...         return 2 * value
    >>> async def scene() -> int:
    ...     server = call_server(Doubling(), "an example")
    ...     caller = BlockingConnections(server.address)
    ...     answer = await asyncio.to_thread(lambda: caller.send(DoublingCalls.double(21)).result(10.0, "an example"))
    ...     caller.close()
    ...     await server.close()
    ...     return answer
    >>> asyncio.run(scene())
    42
    """
    return CallServer(socket_methods(type(actor)), lambda method, given: getattr(actor, method)(*given), who)


class LazyServer:
    """Opens an actor's server when somebody asks for it first.

    Args:
        actor: whose; what it `answers` by socket may be called.
        who: names the actor in the log.
    """

    def __init__(self, actor: object, who: str) -> None:
        self._actor = actor
        self._who = who
        self._server: CallServer | None = None
        self._refused = set[str | None]()
        """Hosts at which no socket could be had; None stands for this machine."""
        self._closed = False

    def address(self, host: str | None = None) -> SocketAddress | None:
        """Return where it is; None where there can be none. To be called in the loop of the group `ctl`.

        Args:
            host: this machine's address, as other machines reach it, for callers there; None: for callers of this one.
        """
        if self._closed or host in self._refused:
            return None
        try:
            if self._server is None:
                self._server = call_server(self._actor, self._who)
            return self._server.address if host is None else self._server.address_at(host)
        except OSError as exc:
            whose = "all calls" if host is None else "calls from other machines"
            log.warning("%s: no socket, %s are sent by the engine: %s", self._who, whose, exc)
            self._refused.add(host)
            return None

    async def close(self) -> None:
        """End all connections, for good. To be called in the loop of the group `ctl`."""
        server, self._server, self._closed = self._server, None, True
        if server is not None:
            await server.close()
