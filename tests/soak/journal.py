"""What a process of a soak says: one JSON line per event, which survives whatever ends the process.

Rules
- Each line is one `write` on a file opened for appending: whole or not at all, beside the lines of forked children.
- Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Journal:
    """Writes one process's events.

    Args:
        path: of the file; it may be another process's, too.
        who: stands in each line.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._who = who
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(self, event: str, **facts: Any) -> None:
        """Write an event now; it is of another time where `at` is given."""
        line = json.dumps({"event": event, "who": self._who, "at": time.monotonic(), **facts})
        os.write(self._file, line.encode() + b"\n")


def read(paths: list[Path]) -> list[Entry]:
    """Read journals: their events, by time. A last line that was cut is left out."""
    return sorted((entry for path in paths for entry in _lines(path)), key=lambda entry: entry["at"])


def _lines(path: Path) -> Iterator[Entry]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
