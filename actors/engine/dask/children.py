"""The processes of an agent's actors.

Rules
- Each is a process of its own session, which the kernel ends when the agent ends (`actor_process`). When it ends, what
  it started in its session is ended, too.
- What it needs it gets through a pipe: nothing is written to a disk or stands in its command line but its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..sockets.framing import SocketAddress
from .records import Reach, Report, Start

ACTOR = "tensorvine.actors.engine.dask.actor_process"


@dataclass(frozen=True, slots=True)
class Boot:
    """What an actor's process is told by its agent."""

    report: Report
    agent: SocketAddress
    agent_pid: int
    cluster: str
    """The scheduler's address."""
    node: str
    address: str
    """Of the machine."""


@dataclass(slots=True)
class _Child:
    report: Report
    task: asyncio.Task[None]
    process: asyncio.subprocess.Process | None = None
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
        elif child.process is None:
            child.task.cancel()
        else:
            child.killed = True
            _end_group(child.process.pid)

    async def kill_all(self) -> None:
        """End all processes, and wait until they have ended."""
        for key, life in list(self._children):
            self.kill(key, life)
        await asyncio.gather(*(child.task for child in self._children.values()), return_exceptions=True)

    async def _live(self, report: Report, after_s: float) -> None:
        """Have an actor's process run, from the pause before it until its end."""
        child = self._children[report.plan.key, report.life]
        await asyncio.sleep(after_s)
        child.began = time.monotonic()
        try:
            child.process = process = await self._started(report)
            await self._tell(process, report)
            code = await process.wait()
        except OSError as exc:
            child.why = f"its process could not be started: {exc}"
            return
        _end_group(process.pid)
        if not child.killed:
            child.why = f"its process ended with {signal.Signals(-code).name if code < 0 else code}"

    def _ended(self, key: str, life: int) -> None:
        child = self._children.pop((key, life))
        self._died(key, life, child.why, time.monotonic() - child.began)

    async def _started(self, report: Report) -> asyncio.subprocess.Process:
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(report.gpus)}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", ACTOR, report.plan.name, # a name, for who lists processes
            stdin=asyncio.subprocess.PIPE, env={**os.environ, **shown}, process_group=0,
        )  # fmt: skip

    async def _tell(self, process: asyncio.subprocess.Process, report: Report) -> None:
        if process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.write(pickle.dumps(self._boot(report), 5))
            await process.stdin.drain()
        process.stdin.close()


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
