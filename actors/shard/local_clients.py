"""The clients on a shard's own node, each watched by its process: one that dies is known at once.

Rules
- A process is watched by a pidfd: its number may be another's when it is over.
- A process of another namespace of process ids is not watched: its number means another process here, or none.
- The shard's lock guards this; call all methods with it held.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ..memory.memory import process_watch
from ..memory.process import ProcessId, pid_namespace

log = logging.getLogger(__name__)


class LocalClients:
    """The clients on one shard's node."""

    def __init__(self) -> None:
        self._namespace = pid_namespace()
        self._processes: dict[str, tuple[int, Callable[[], bool]]] = {}
        """Client -> pidfd, and what tells whether its process runs."""

    def watch(self, client: str, process: ProcessId) -> None:
        """Watch a client, if that is possible; one that is watched already stays so."""
        if client in self._processes:
            return
        try:
            if process.namespace != self._namespace:
                raise OSError(f"its process {process.pid} is in another namespace of process ids")
            pidfd = os.pidfd_open(process.pid)
            self._processes[client] = (pidfd, process_watch(pidfd))
        except OSError as exc:
            log.warning("client %s cannot be watched, so it cannot write to shared memory: %s", client, exc)

    def watches(self, client: str) -> bool:
        """Tell whether a client is watched: what it leaves behind will be taken back."""
        return client in self._processes

    def died(self) -> list[str]:
        """Name those whose process is over."""
        return [client for client, (_, alive) in self._processes.items() if not alive()]

    def drop(self, client: str) -> None:
        """Stop watching a client."""
        watched = self._processes.pop(client, None)
        if watched is not None:
            os.close(watched[0])
