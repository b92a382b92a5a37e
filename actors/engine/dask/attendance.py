"""Who is attached to an agent: the nannies and workers of its machine.

Rules
- The agent is needed as long as somebody is attached. When the last one says that it closes, the node leaves, and who
  waits for that is told when it has. When the last one is just gone, another has `ALONE_S` to come.
- Each is attached for one scheduler, and says for which directory. Workers close when theirs has ended, often when the
  next one is there already: those take no node along.
- Only processes of the agent's user are attached, at most `CONNECTIONS`. What they send is checked; a process that
  breaks a rule is disconnected, and at most a few lines a minute say why.
- Of the machine's memory the node offers what was available when the agent started, less what Dask's workers may take,
  but no less than half of it: by default they may take all, and mostly do not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from ....store.bounds.jsontext import mapping
from ....store.errors import CorruptDataError
from ..sockets.framing import credentials
from ..sockets.refusals import Refusals
from .workers.plugins import JOINED, MAY_GO

log = logging.getLogger(__name__)

ALONE_S = 3.0
"""How long an agent lives with nobody attached."""
FIRST_S = 60.0
"""How long the first may take."""
LINE_S = 5.0
"""How long who comes may take to say what it may use."""
LEAST_SHARE = 0.5
"""Of the memory."""
CONNECTIONS = 512
"""More than a machine has workers, and few enough for 1,024 open files."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a process that is attached may use, and for which directory it is attached."""

    memory: int
    resources: Mapping[str, float]
    directory: str


def _told(line: bytes) -> _Told:
    """Check what a process sent first.

    Raises:
        CorruptDataError: it is not what a nanny or worker sends.
    """
    found = mapping(line, "an attached process")
    memory = found.get("memory") or 0
    resources = cast(object, found.get("resources") or {})
    directory = found.get("directory", "")
    if type(memory) is not int or not 0 <= memory < 1 << 63:
        raise CorruptDataError(f"an attached process: memory: expected bytes; found {memory!r:.100}")
    if not isinstance(resources, dict) or not all(map(_is_amount, cast("dict[str, object]", resources).values())):
        raise CorruptDataError(f"an attached process: resources: expected amounts by name; found {resources!r:.100}")
    if not isinstance(directory, str):
        raise CorruptDataError(f"an attached process: directory: expected an id; found {directory!r:.100}")
    return _Told(memory, cast("dict[str, float]", resources), directory)


def _is_amount(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast(float, value) < 1 << 63


class Attendance:
    """Those who are attached to one agent; to be made in its event loop.

    Args:
        changed: called when somebody has come, or closes.
        alone: called when nobody has been attached for a while.
    """

    def __init__(self, changed: Callable[[], None], alone: Callable[[], None]) -> None:
        self._changed = changed
        self._alone = alone
        self._loop = asyncio.get_running_loop()
        self._refusals = Refusals("the agent: its socket")
        self._told: dict[asyncio.StreamWriter, _Told] = {}
        """Who is attached -> what it may use."""
        self._writers: set[asyncio.StreamWriter] = set()
        """Of all connections."""
        self._closing: set[asyncio.StreamWriter] = set()
        self._waiting: set[asyncio.StreamWriter] = set()
        """Of those who close, who has not been told yet that he need not wait."""
        self._last = ""
        """The directory that who closed last was attached for."""
        self.directory = ""
        """The id of the one that this agent's node is in; none yet, if empty."""
        self.somebody = asyncio.Event()
        """Set when the first has come."""
        self.is_closing = False
        """All who were attached close, or have closed, and nobody has come since."""
        self._joined = asyncio.Event()
        self._countdown = self._loop.call_later(FIRST_S, alone)

    @property
    def leaves(self) -> bool:
        """Whether the node leaves: all close, and not for want of a scheduler that has ended."""
        return self.is_closing and self._last == self.directory

    def joined(self) -> None:
        """Tell those who are attached, and who come, that their agent is a node."""
        self._joined.set()

    def let_go(self) -> None:
        """Tell those who close that they need not wait."""
        for writer in self._waiting:
            writer.write(MAY_GO)
        self._waiting.clear()

    async def close(self) -> None:
        """End all connections."""
        self._countdown.cancel()
        for writer in list(self._writers):
            writer.close()
        while self._writers:  # each leaves in one of the loop's next rounds
            await asyncio.sleep(0)

    def memory(self, available: int) -> int:
        """Return what the node offers of the memory that was available."""
        limits = sum(told.memory for told in self._told.values())
        return max(available - limits, int(LEAST_SHARE * available))

    def resources(self) -> dict[str, float]:
        """Return what workers have of Dask's resources, in all."""
        total: Counter[str] = Counter()
        for told in self._told.values():
            total.update(told.resources)
        return dict(total)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a process that attaches, until its connection ends."""
        user = credentials(writer.get_extra_info("socket"))[1]
        if user != os.geteuid():
            self._refusals.note(f"expected a process of user {os.geteuid()}; found one of user {user}")
            writer.close()
            return
        if len(self._writers) == CONNECTIONS:
            self._refusals.note(f"expected at most {CONNECTIONS} attached processes; found one more")
            writer.close()
            return
        self._writers.add(writer)
        try:
            async with asyncio.timeout(LINE_S):
                told = _told(await reader.readline())
            self._countdown.cancel()
            self._told[writer] = told
            self.is_closing = False
            self.somebody.set()
            self._changed()
            async with asyncio.timeout(FIRST_S):
                await self._joined.wait()
            writer.write(JOINED)
            if await reader.readline():
                self._close(writer)
                await reader.read(1)
        except (CorruptDataError, TimeoutError, ValueError) as exc:
            self._refusals.note(str(exc) or "expected a first line in time; the wait timed out")
        except OSError as exc:
            log.info("the connection of an attached process ended: %s", exc)
        finally:
            self._gone(writer)

    def _close(self, writer: asyncio.StreamWriter) -> None:
        """Note that one closes."""
        self._closing.add(writer)
        self._last = self._told[writer].directory
        self.is_closing = len(self._closing) == len(self._told)
        if self.leaves:
            self._waiting.add(writer)
        else:
            writer.write(MAY_GO)
        self._changed()

    def _gone(self, writer: asyncio.StreamWriter) -> None:
        was_attached = self._told.pop(writer, None) is not None
        self._closing.discard(writer)
        self._waiting.discard(writer)
        self._writers.discard(writer)
        writer.close()
        if was_attached and not self._told and not self.is_closing:
            self._countdown = self._loop.call_later(ALONE_S, self._alone)
