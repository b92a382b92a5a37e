"""Connections of a process in which one task follows the other: one per repository, made once."""

from __future__ import annotations

import threading

from ...store.errors import RepositoryNotFoundError
from ..client.repository import Repository

_connections: dict[str, Repository] = {}
_lock = threading.Lock()


def connected(name: str, start: str | None = None) -> Repository:
    """Return this process's connection to a repository, which lasts as long as the process, or until `disconnect`.

    Args:
        name: the repository's.
        start: which start of it, as `start_of` tells; None: the one that runs, or ran when it was connected to.

    Raises:
        RepositoryNotFoundError: no repository of that name runs, or another start of it.
    """
    with _lock:
        known = _connections.get(name)
        if known is not None and start in (None, start_of(known)):
            return known
        made = Repository.connect(name)
        if start not in (None, start_of(made)):
            made.close()
            raise RepositoryNotFoundError(
                f"repository {name!r}: expected the one that was asked before; it has ended, or runs on another "
                "cluster, and another one of that name runs here"
            )
        _connections[name] = made
    if known is not None:  # its repository has ended: names are unique in a cluster
        known.close()
    return made


def disconnect(name: str) -> None:
    """Close this process's connection, if there is one: the next `connected` finds who runs under that name then."""
    with _lock:
        known = _connections.pop(name, None)
    if known is not None:
        known.close()


def start_of(repository: Repository) -> str:
    """Return what tells one start of a repository from all others of its name."""
    return repository._session.topology.started_by
