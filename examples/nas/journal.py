"""The journal of a search: what was asked and told, in order, so that a search that was killed goes on where it was.

Rules
- One JSON object per line: the plan, then `ask` and `tell` as they happen.
- A last line that was cut short was never told: it is taken off when the search is resumed.
- Times are seconds of the search; the time between a stop and a resume does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .evolution import Asked
from .plan import Plan
from .worker import Outcome


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a candidate, and when."""

    at: float
    """Seconds since the search began."""
    outcome: Outcome
    space_bytes: int
    """What was in store when it was told."""


class Journal:
    """A journal that is written to. A context manager: it closes the file.

    Args:
        path: of the file. Where it exists, it is gone on with: its events are in `events`.
        plan: of the search.

    Raises:
        ValueError: the file is of another plan, or is no journal.
        FileExistsError: `resume` is false and there is one.
    """

    def __init__(self, path: Path, plan: Plan, *, resume: bool = False) -> None:
        if path.exists() and not resume:
            raise FileExistsError(f"{path}: expected no journal of an earlier search; use --resume to go on with it")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = list(_lines(path)) if path.exists() else []
        self.plan = plan
        self.events: list[Asked | Told] = []
        """What an earlier life of the search wrote."""
        if lines:
            found, self.events = _parsed(lines, path)
            found.expect_same(plan)
            with path.open("rb+") as file:
                file.truncate(sum(len(line) for line in lines))
        self._file = path.open("ab")
        if not lines:
            self._write({"plan": plan.to_json()})
            self.sync()

    def ask(self, asked: Asked) -> None:
        """Note that a candidate was asked for, or is evaluated once more."""
        self._write({"ask": [asked.number, list(asked.candidate), asked.parent]})

    def tell(self, told: Told) -> None:
        """Note what became of a candidate; it is on disk after the next `sync`."""
        self._write({"tell": asdict(told.outcome), "at": told.at, "space_bytes": told.space_bytes})

    def sync(self) -> None:
        """Wait until all that was noted is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def read(path: Path) -> tuple[Plan, list[Asked | Told]]:
    """Read the journal of a search that may still run.

    Raises:
        ValueError: it is no journal.
    """
    return _parsed(list(_lines(path)), path)


def _lines(path: Path) -> Iterator[bytes]:
    """Return the lines that are whole."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _parsed(lines: list[bytes], path: Path) -> tuple[Plan, list[Asked | Told]]:
    try:
        first, *events = (json.loads(line) for line in lines)
        return Plan.from_json(first["plan"]), [_event(event) for event in events]
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{path}: expected the journal of a search; found {type(exc).__name__}: {exc}") from exc


def _event(event: dict[str, Any]) -> Asked | Told:
    if "tell" in event:
        return Told(event["at"], Outcome(**event["tell"]), event["space_bytes"])
    number, candidate, parent = event["ask"]
    return Asked(number, tuple(candidate), parent)
