"""Runs the application until it is interrupted."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from ...store.errors import OptionError
from .app import Web

LEAVE_S = 2
"""How long requests may take to end after an interrupt."""


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OptionError: if the address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as exc:
        raise OptionError(f"web page: expected a free address; cannot listen at {host} port {port}: {exc}") from exc


def serve(web: Web, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C is pressed or the process is terminated."""
    with contextlib.suppress(KeyboardInterrupt):
        Server(web.application(), web.end).run(sockets=[listener])


class Server(uvicorn.Server):
    """A server that logs no requests: their addresses may hold the token.

    Args:
        application: answers.
        ending: called when the server is about to stop.
    """

    def __init__(self, application: ASGIApp, ending: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=LEAVE_S,
                ws="none",
            )
        )
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections."""
        self._ending()
        await super().shutdown(sockets)
