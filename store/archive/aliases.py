"""The file `aliases.json` of a repository's path: the aliases of all names. It is written before an alias moves."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..errors import CorruptDataError, StorageError
from .directory import Directory

FILE = "aliases.json"
Aliases = Mapping[str, Mapping[str, int]]
"""Name -> alias -> version."""


def write_aliases(directory: Directory, aliases: Aliases) -> None:
    """Replace the file; errors as in `Directory.write`.

    >>> import tempfile; from .opening import open_directory
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     directory = open_directory(folder)
    ...     write_aliases(directory, {"m": {"prod": 3}})
    ...     read_aliases(directory)
    {'m': {'prod': 3}}
    """
    content = msgspec.json.format(msgspec.json.encode(aliases))
    directory.write(FILE, lambda sink: sink.write(content))


def read_aliases(directory: Directory) -> dict[str, dict[str, int]] | None:
    """Read the file; None: there is none.

    Raises:
        StorageError: it cannot be read.
        CorruptDataError: it is damaged.
    """
    try:
        content = directory.read(FILE).to_pybytes()
    except StorageError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return None
        raise
    try:
        return msgspec.json.decode(content, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as exc:
        raise CorruptDataError(
            f"{directory.uri}/{FILE}: expected versions by name and alias; found {exc}; repair or remove the file"
        ) from exc
