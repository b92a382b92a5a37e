"""Sends the newest snapshot to all viewers.

Rules
- One task makes snapshots while there are viewers.
- A viewer that reads slowly misses snapshots: nothing queues for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.concurrency import run_in_threadpool


class Broadcast:
    """Makes texts while there are listeners, and gives each listener the newest text.

    Args:
        make: makes a text; called in a thread.
        every_s: seconds between two texts.
    """

    def __init__(self, make: Callable[[], str], every_s: float) -> None:
        self._make = make
        self._every_s = every_s
        self._text = ""
        self._serial = 0
        self._changed = asyncio.Event()
        self._listeners = 0
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    async def texts(self) -> AsyncGenerator[str]:
        """Yield the newest text, each text at most once."""
        self._listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            seen = 0
            while not self._ended:
                if seen == self._serial:
                    await self._changed.wait()
                    continue
                seen = self._serial
                yield self._text
        finally:
            self._listeners -= 1
            if not self._listeners:
                await self.close()

    def end(self) -> None:
        """End all listeners."""
        self._ended = True
        self._changed.set()

    async def close(self) -> None:
        """Stop the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._serial = 0

    async def _run(self) -> None:
        while True:
            self._text = await run_in_threadpool(self._make)
            self._serial += 1
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(self._every_s)
