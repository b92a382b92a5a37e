"""The processes of an agent's actors.

Rules
- Each is forked from a process that has imported what it needs (`template`). It is a process group of its own: when it
  ends, what it started in its group is ended, too.
- What it needs it gets through a socket: nothing is written to a disk or stands in a command line.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .records import Boot, Reach, Report, Start
from .template import Template, end_group


@dataclass(slots=True)
class _Child:
    report: Report
    task: asyncio.Task[None]
    is_ordered: bool = False
    """It has its process, or will have it presently."""
    pid: int | None = None
    began: float = field(default_factory=time.monotonic)
    why: str = "it was killed"
    """Why it ended."""
    killed: bool = False


class Children:
    """The actors' processes; to be used in one event loop.

    Args:
        boot: makes what a process is told.
        died: called with an actor's key, its life, why it ended, and how many seconds it lived.
    """

    def __init__(self, boot: Callable[[Report], Boot], died: Callable[[str, int, str, float], None]) -> None:
        self._boot = boot
        self._died = died
        self._template = Template()
        self._children: dict[tuple[str, int], _Child] = {}

    def reports(self) -> list[Report]:
        """Tell of all lives that have not ended."""
        return [child.report for child in self._children.values()]

    def start(self, order: Start) -> None:
        """Start an actor's process."""
        report = order.report
        task = asyncio.create_task(self._live(report, order.after_s), name=report.plan.name)
        self._children[report.plan.key, report.life] = _Child(report, task)
        task.add_done_callback(lambda _: self._ended(report.plan.key, report.life))  # it may be cancelled unbegun

    def ready(self, key: str, life: int, reach: Reach) -> None:
        """Note where a life can be called."""
        child = self._children.get((key, life))
        if child is not None:
            child.report = replace(child.report, reach=reach)

    def kill(self, key: str, life: int) -> None:
        """End a process; one that has ended is none any more."""
        child = self._children.get((key, life))
        if child is None:
            self._died(key, life, "it was killed", 0.0)
        elif not child.is_ordered:
            child.task.cancel()
        else:
            child.killed = True
            if child.pid is not None:
                end_group(child.pid)

    async def kill_all(self) -> None:
        """End all processes, and wait until they have ended."""
        for key, life in list(self._children):
            self.kill(key, life)
        await asyncio.gather(*(child.task for child in self._children.values()), return_exceptions=True)
        await self._template.close()

    async def _live(self, report: Report, after_s: float) -> None:
        """Have an actor's process run, from the pause before it until its end."""
        child = self._children[report.plan.key, report.life]
        await asyncio.sleep(after_s)
        child.began, child.is_ordered = time.monotonic(), True
        try:
            forked = await self._template.fork(self._boot(report))
        except OSError as exc:
            child.why = f"its process could not be started: {exc}"
            return
        child.pid = forked.pid
        if child.killed:
            end_group(forked.pid)
        code = await forked.ended
        end_group(forked.pid)
        if not child.killed:
            child.why = f"its process ended with {signal.Signals(-code).name if code < 0 else code}"

    def _ended(self, key: str, life: int) -> None:
        child = self._children.pop((key, life))
        self._died(key, life, child.why, time.monotonic() - child.began)
