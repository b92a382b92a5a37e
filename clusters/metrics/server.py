"""The server of `tensorvine metrics`: it answers each scrape with the metrics of a repository.

Rules
- It has one client. A repository that is stopped is reported as down. The next scrape connects again, so that the
  server survives a restart of the repository.
- Scrapes at the same time are answered one after the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...store.errors import OptionError, TensorVineError
from .exposition import registry_of
from .readings import Readings, read

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ...actors.client.repository import Repository

DOWN: Readings = {"up": {("planner",): [0.0]}}
"""The readings of a repository that does not run."""
END_S = 5.0


class MetricsServer:
    """Serves the metrics of a repository over HTTP until it is closed.

    Args:
        connect: returns a new client; raises if no repository runs.
        port: 0 chooses a free one.
        host: the address to listen on.

    Raises:
        CodecUnavailableError: if prometheus-client is not installed.
        OptionError: if the port cannot be used.
    """

    def __init__(self, connect: Callable[[], Repository], port: int, host: str = "127.0.0.1") -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._repo: Repository | None = None
        registry = registry_of(self._read)
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as exc:
            raise OptionError(f"metrics: expected a free port; {host}:{port} cannot be used: {exc}") from exc
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def _read(self) -> Readings:
        with self._lock:
            try:
                self._repo = self._repo or self._connect()
                found = read(self._repo)
            except TensorVineError:
                self._leave()
                return DOWN
            if self._repo._session.stopped or not any(value == [1.0] for value in found["up"].values()):
                self._leave()
            return found

    def _leave(self) -> None:
        repo, self._repo = self._repo, None
        if repo is not None:
            repo.close(END_S)

    def close(self) -> None:
        """Stop answering, and disconnect."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(END_S)
        with self._lock:
            self._leave()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
