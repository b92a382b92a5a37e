"""The connection of the server to its repository.

Rules
- It connects on demand, and disconnects after `IDLE_S` without a question.
- A repository that was stopped is connected to again when it is back, however long that takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ...actors.client.repository import Repository
from ...actors.engine.engine import Engine
from ...store.errors import ClosedError, RepositoryNotFoundError, TensorVineError

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds after which an unused connection is closed."""

_R = TypeVar("_R")


class Source:
    """A repository that may come and go.

    Args:
        engine: of the cluster.
        name: of the repository. None means the default one, unless another user owns it.
    """

    def __init__(self, engine: Engine, name: str | None) -> None:
        self.engine = engine
        self.name = name or "default"
        self._given = name
        self._lock = threading.Lock()
        self._repository: Repository | None = None
        self._used = 0.0

    def ask(self, question: Callable[[Repository], _R]) -> _R:
        """Ask the repository, from any thread.

        Raises:
            TensorVineError: the errors of the question.
            RepositoryNotFoundError: if the repository does not run.
        """
        repository = self._connected()
        try:
            return question(repository)
        except (RepositoryNotFoundError, ClosedError) as exc:
            self.forget(repository)
            raise RepositoryNotFoundError(f"repository {self.name!r}: expected it to run; {exc}") from exc

    def forget(self, repository: Repository | None = None) -> None:
        """Disconnect; the next question connects again. With `repository`, only if it is still the one in use."""
        with self._lock:
            if repository is not None and repository is not self._repository:
                return
            gone, self._repository = self._repository, None
        if gone is not None:
            try:
                gone.close()
            except TensorVineError as exc:
                log.info("web page: closing the connection to %r: %s", self.name, exc)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._repository is not None

    def rest(self, idle_s: float = IDLE_S) -> None:
        """Disconnect if the last question was at least `idle_s` seconds ago."""
        with self._lock:
            idle = time.monotonic() - self._used >= idle_s
        if idle:
            self.forget()

    def _connected(self) -> Repository:
        with self._lock:
            self._used = time.monotonic()
            if self._repository is None:
                self._repository = Repository.connect(self._given, engine=self.engine)
            return self._repository
