"""An actor for what is the Dask engine's own."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

import numpy as np
import psutil
from tensorvine.actors.engine.engine import Engine, Lifetime
from tensorvine.actors.engine.groups import group


class DaskProbe:
    """Says what its process is, takes bytes, and starts others."""

    def __init__(self, engine: Engine, error: Exception | None = None, ends: bool = False) -> None:
        if error is not None:
            raise error
        if ends:
            os._exit(3)
        self._engine = engine
        self._held: list[Any] = []
        self._going = self._most = 0
        self._open = asyncio.Event()

    @group("ctl")
    async def facts(self) -> dict[str, Any]:
        loaded = [name for name in ("ray", "distributed") if name in sys.modules]
        return {
            "pid": os.getpid(), "template": os.getppid(), "host": psutil.Process(os.getppid()).ppid(),
            "node": self._engine.this_node(), "loaded": loaded,
            "restarted": self._engine.restarted(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "trimming": os.environ.get("MALLOC_TRIM_THRESHOLD_"),
            "loop": type(asyncio.get_running_loop()).__module__,
        }  # fmt: skip

    @group("ctl")
    async def draw(self) -> tuple[float, float]:
        return random.random(), float(np.random.random())  # noqa: S311  none of them is secret

    @group("data")
    async def echo(self, value: Any) -> Any:
        return value

    @group("data")
    async def total(self, array: np.ndarray) -> tuple[int, bool]:
        return int(array.sum()), array.flags.writeable

    @group("data")
    async def hold(self, array: np.ndarray) -> Any:
        self._held.append(self._engine.put(array))
        return self._held[-1:]

    @group("data")
    async def pass_gate(self) -> None:
        self._going += 1
        self._most = max(self._most, self._going)
        await self._open.wait()
        self._going -= 1

    @group("data")
    async def nothing(self) -> None: ...

    @group("ctl")
    async def going(self) -> tuple[int, int]:
        return self._going, self._most

    @group("ctl")
    async def reserve(self, name: str, node: str, nbytes: int) -> bool:
        return self._engine.reserve(name, node, nbytes)

    @group("ctl")
    async def start(self, name: str) -> Any:
        """Start another one, which ends with this one."""
        return self._engine.spawn(DaskProbe, name, {"engine": self._engine}, lifetime=Lifetime(outlives=False))

    @group("ctl")
    async def die(self) -> None:
        os._exit(1)
