"""Connections of a process in which one candidate follows the other: one per repository, made once."""

from __future__ import annotations

import threading

from ..client.repository import Repository

_connections: dict[str, Repository] = {}
_lock = threading.Lock()


def connected(name: str) -> Repository:
    """Return this process's connection to a repository, which lasts as long as the process, or until `disconnect`.

    Raises:
        RepositoryNotFoundError: no repository of that name runs.
    """
    with _lock:
        if name not in _connections:
            _connections[name] = Repository.connect(name)
        return _connections[name]


def disconnect(name: str) -> None:
    """Close this process's connection, if there is one: the next `connected` finds who runs under that name then."""
    with _lock:
        known = _connections.pop(name, None)
    if known is not None:
        known.close()
