"""Who may use the files of a repository.

Rules
- A file that is made is its owner's alone (0600), and so is a folder (0700), whatever the process's umask says.
- Who wants to share them makes the folder that they come into beforehand, with the set-group-ID bit (`chmod g+rwxs`).
  What is made in such a folder has its group, as the kernel has it, and gives this group what the folder gives it; a
  folder that is made there passes that on. Others get nothing.
- Only what is new gets rights, and before anything is in it. What is there stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def open_file(name: str, flags: int, folder: int) -> int:
    """Open a file, and give one that is made here its rights.

    Args:
        name: the file's, in the folder.
        flags: as of `os.open`.
        folder: descriptor of its folder.

    Raises:
        OSError: as of `os.open`.
    """
    if not flags & os.O_EXCL:
        with contextlib.suppress(FileNotFoundError):
            return os.open(name, flags & ~os.O_CREAT, dir_fd=folder)
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        asked = _asked(folder) & 0o060
        if asked and os.fstat(descriptor).st_uid == os.geteuid():  # another one of the group may have made it just now
            os.fchmod(descriptor, 0o600 | asked)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: Path | str, folder: int | None = None) -> None:
    """Make a folder with its rights; one that is there stays as it is.

    Args:
        path: of the new folder; its name if `folder` is given.
        folder: descriptor of the folder in which to make it.

    Raises:
        OSError: as of `os.mkdir`.
    """
    try:
        os.mkdir(path, 0o700, dir_fd=folder)
    except FileExistsError:
        return
    asked = _asked(folder if folder is not None else os.path.dirname(path) or ".")
    if asked:
        made = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            os.fchmod(made, stat.S_ISGID | 0o700 | asked)
        finally:
            os.close(made)


def _asked(folder: int | str) -> int:
    """Return what a folder gives its group, if it is shared."""
    mode = os.stat(folder).st_mode
    return mode & 0o070 if mode & stat.S_ISGID else 0
