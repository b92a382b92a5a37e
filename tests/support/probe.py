"""An actor that does what the engine contract is about. A file of its own, so that a worker imports little."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from typing import Any

import numpy as np
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.engine.groups import group
from tensorvine.actors.rpc.channel import Channel

from tests.support.asking import request

PATIENCE_S = 30.0


class Probe:
    """Answers, fails, waits, blocks, dies and keeps blocks as it is told."""

    def __init__(self, engine: Engine, start: int = 0) -> None:
        self._engine = engine
        self._start = start
        self._restarted = engine.restarted()
        self._kept: list[Any] = []
        self._gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._listeners: defaultdict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(list)

    @group("ctl")
    async def start(self) -> int:
        return self._start

    @group("ctl")
    async def pid(self) -> int:
        return os.getpid()

    @group("ctl")
    async def life(self) -> bool:
        return self._restarted

    @group("ctl")
    async def fail(self, error: BaseException) -> None:
        raise error

    @group("ctl")
    async def die(self) -> None:
        os._exit(1)

    @group("ctl")
    async def relay(self, name: str, method: str, arguments: list[Any], timeout: float) -> Any:
        """Call another actor from within this one."""
        actor = self._engine.find(name)
        return await Channel(self._engine, name, actor=actor).ask(request(method, *arguments), timeout)

    @group("watch")
    async def hear(self, topic: str) -> str:
        """Wait for news: a long poll."""
        event = asyncio.Event()
        self._listeners[topic].append((asyncio.get_running_loop(), event))
        await event.wait()
        return topic

    @group("ctl")
    async def listeners(self, topic: str) -> int:
        return len(self._listeners[topic])

    @group("ctl")
    async def tell(self, topic: str) -> None:
        """Answer all who wait for news."""
        for loop, event in self._listeners[topic]:
            loop.call_soon_threadsafe(event.set)

    @group("data")
    async def stall(self, gate: str) -> bool:
        """Block the thread of the group, as no method should, until `release`."""
        return self._gates[gate].wait(PATIENCE_S)

    @group("ctl")
    async def release(self, gate: str) -> None:
        self._gates[gate].set()

    @group("data")
    async def keep(self, block: np.ndarray) -> list[Any]:
        """Copy a block into one of this actor's, as a shard does; its handle travels within the answer."""
        if not isinstance(block, np.ndarray):
            raise TypeError(f"expected a block; found {block!r}")
        self._kept.append(self._engine.put(block))
        return self._kept[-1:]

    @group("data")
    async def keep_then_overwrite(self, size: int) -> list[Any]:
        """Put zeros, and write ones into the array that was put."""
        source = np.zeros(size, np.uint8)
        self._kept.append(self._engine.put(source))
        source[:] = 1
        return self._kept[-1:]

    @group("data")
    async def total(self, handles: list[Any]) -> int:
        """Sum up another actor's block."""
        (block,) = self._engine.get(handles, PATIENCE_S, "keeper")
        return int(block.sum())
