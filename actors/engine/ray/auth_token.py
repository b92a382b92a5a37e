"""The token of this user's Rays: who does not present it is refused.

Rules
- A Ray without a token runs the code of whoever reaches its ports, and it listens on all interfaces. So every Ray that
  TensorVine starts asks for one; RAY_AUTH_MODE=disabled is the user's own word, and is warned of.
- The token is where Ray looks for it: RAY_AUTH_TOKEN, or the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token.
  Where there is no such file it is made, for this user alone. Ray would make it too, but for all users to read.
- The file appears with its token in it, and once: of two processes that make it at once, both get the same token.
- Ray reads RAY_AUTH_MODE when it is loaded, so that it is told when that is set later. Children inherit it.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from stat import S_IROTH, S_IRWXG, S_IRWXO

from ray._private.authentication import authentication_token_setup

from ....store.errors import StorageError
from ....store.waiting import Backoff, Deadline
from ..warned import warn_once

log = logging.getLogger(__name__)

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105  the name of a variable
PATH = "RAY_AUTH_TOKEN_PATH"
RISK = "anyone who can reach its ports can run code as the user who started it"
"""What a Ray without a token means."""
WRITTEN_S = 2.0
"""How long a file may be empty: Ray opens it before it writes."""


def guard() -> None:
    """Have the Rays that this process starts from now on ask for this user's token, which is made where there is none.

    Raises:
        StorageError: the token's file cannot be made or read.
    """
    mode = os.environ.get(MODE)
    if mode and mode.lower() != "token":
        warn_once(log, f"{MODE}={mode}: a Ray started by this process requires no token; {RISK}")
        return
    if not os.environ.get(TOKEN):
        _ensure(_path())
    authentication_token_setup._enable_token_auth()


def offer() -> None:
    """Present this user's token to the Ray that is joined next, if there is one and RAY_AUTH_MODE says nothing."""
    if not os.environ.get(MODE) and (os.environ.get(TOKEN) or _holds(_path())):
        authentication_token_setup._enable_token_auth()


def presented() -> bool:
    """Whether this process presents a token to the Ray that it joins."""
    return os.environ.get(MODE, "").lower() == "token"


def _path() -> Path:
    """Return the file that Ray reads."""
    named = os.environ.get(PATH)
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def _holds(path: Path) -> bool:
    try:
        return bool(path.read_bytes().strip())
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StorageError(f"{path}: expected this user's token for Ray; {exc}") from exc


def _ensure(path: Path) -> None:
    """Make the file where there is none; see that nobody else reads it."""
    if not path.exists():
        _make(path)
    deadline, pauses = Deadline.after(WRITTEN_S), Backoff(0.01, 0.1)
    while not _holds(path):
        if not pauses.wait(deadline):
            raise StorageError(f"{path}: expected this user's token for Ray; the file is empty: remove it")
    _keep_private(path)


def _make(path: Path) -> None:
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
                file.flush()
                os.fsync(descriptor)
            os.link(made, path)
        finally:
            made.unlink()
    except FileExistsError:
        return  # another process made it meanwhile: its token is the one
    except OSError as exc:
        raise StorageError(
            f"{path}: expected to write a token for Ray there; {exc}: set {TOKEN}, or {PATH} to a file of your own"
        ) from exc
    log.info("made the token of this user's Rays: %s", path)


def _keep_private(path: Path) -> None:
    """Take the file from other users, if it is the one that Ray makes; a file that the user named is left as it is."""
    facts = path.stat()
    if not os.environ.get(PATH) and facts.st_uid == os.geteuid():
        if facts.st_mode & (S_IRWXG | S_IRWXO):
            path.chmod(0o600)
            log.info("%s: other users could read this user's token for Ray; access is now restricted", path)
    elif facts.st_mode & S_IROTH:
        warn_once(log, f"{path}: every user of this machine can read this token and run code with it")
