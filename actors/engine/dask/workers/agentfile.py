"""The file in which an agent writes the name of its socket, for the workers of its user and machine.

Rules
- Names of sockets in Linux' abstract namespace belong to the first process that binds them, of any user. So an agent
  chooses a random name, and the file says which. Only its user can read or write the file.
- The file lies in the home directory of the user, or in the temporary directory where the user has no home directory
  that he can write to. There another user can create it first; then opening it fails, and the error says so.
- A process locks the file while it starts an agent. It is deleted under the same lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

_NAME_BYTES = 107
"""Of a socket, at most."""


@dataclass(frozen=True, slots=True)
class AgentFile:
    """The file of one agent.

    Args:
        path: where it lies.
    """

    path: Path

    def read(self) -> str:
        """Return the name of the agent's socket, or "" if no agent has written one.

        Raises:
            PermissionError: other users can write the file.
            OSError: the file cannot be opened.
        """
        with self._opened() as file:
            return os.pread(file, _NAME_BYTES, 0).decode("ascii", "replace")

    def write(self, name: str) -> None:
        """Replace the name; for an agent whose starter has locked the file. Errors as of `read`."""
        with self._opened() as file:
            os.ftruncate(file, 0)
            os.pwrite(file, name.encode("ascii"), 0)

    def delete(self, name: str) -> None:
        """Delete the file if it has this name and no process starts another agent."""
        with contextlib.suppress(OSError), self.locked() as mine:
            if mine and self.read() == name:
                self.path.unlink()

    @contextlib.contextmanager
    def locked(self) -> Generator[bool]:
        """Lock the file without waiting, and yield whether this succeeded. Errors as of `read`."""
        with self._opened() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = os.fstat(file).st_nlink > 0  # else its agent has deleted it meanwhile
            except BlockingIOError:
                mine = False
            yield mine

    @contextlib.contextmanager
    def _opened(self) -> Generator[int]:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(
                    f"{self.path}: expected a file of user {os.geteuid()} with mode 0600; found one of user "
                    f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: delete it"
                )
            yield file
        finally:
            os.close(file)


def agent_file(name: str) -> AgentFile:
    """Return the file of the agent with this name: the same path in all processes of this user."""
    user = os.geteuid()
    with contextlib.suppress(KeyError, OSError):  # no such user, or no home directory that can be written to
        folder = Path(pwd.getpwuid(user).pw_dir, ".tensorvine")
        folder.mkdir(mode=0o700, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return AgentFile(folder / f"agent-{name}")
    return AgentFile(Path(tempfile.gettempdir(), f"tensorvine-{user}-agent-{name}"))
