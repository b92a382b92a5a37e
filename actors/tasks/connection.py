"""Connections of a process in which one task follows the other: one per repository, made once."""

from __future__ import annotations

import threading

from ...store.errors import RepositoryNotFoundError
from ..client.repository import Repository

_connections: dict[str, Repository] = {}
_lock = threading.Lock()


def connected(name: str, start: str | None = None) -> Repository:
    """Return this process's client of a repository. The first call connects, and later calls return the same client.

    The client stays connected until the process ends or `disconnect` is called.

    Args:
        name: Name of the repository.
        start: Start id of the repository, from `start_of`. Each start of a repository has a new id. None accepts any
            id.

    Raises:
        RepositoryNotFoundError: if no repository with this name is running, or if the start id of the running
            repository is not `start`.
    """
    with _lock:
        known = _connections.get(name)
        if known is not None and start in (None, start_of(known)):
            return known
        made = Repository.connect(name)
        if start not in (None, start_of(made)):
            made.close()
            raise RepositoryNotFoundError(
                f"repository {name!r}: expected the start of it that was used before; that one has ended or runs "
                "on another cluster, and another repository of that name runs here"
            )
        _connections[name] = made
    if known is not None:  # its repository has ended: names are unique in a cluster
        known.close()
    return made


def disconnect(name: str) -> None:
    """Close this process's client of a repository, if `connected` has created a client.

    The next call of `connected` creates a new client.
    """
    with _lock:
        known = _connections.pop(name, None)
    if known is not None:
        known.close()


def start_of(repository: Repository) -> str:
    """Return the id of a repository's start. Each start of a name has another id."""
    return repository._session.topology.started_by
