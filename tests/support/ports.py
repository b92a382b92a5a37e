"""Ports for servers that are told theirs."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port that nobody has, and that nobody gets meanwhile who asks for any: Linux gives those from 32768 on,
    and Ray's workers take those from 10002 to 19999."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("expected a free port; found none in 100 tries")
