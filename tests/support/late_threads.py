"""An actor whose threads begin late: as on a machine that is busy, each in the moment in which it was started."""

from __future__ import annotations

import threading
import time
from types import FrameType
from typing import Any

from tensorvine.actors.engine.engine import group

LATE_S = 0.05


class LateThreads:
    """Says in which group it was called."""

    def __new__(cls) -> LateThreads:
        threading.setprofile(late)
        return object.__new__(cls)

    @group("ctl")
    async def ctl(self) -> str:
        return "ctl"

    @group("data")
    async def data(self) -> str:
        return "data"

    @group("watch")
    async def watch(self) -> str:
        return "watch"


def late(frame: FrameType, event: str, _: Any) -> None:
    """Hold up a thread as it begins; who started it has gone on."""
    if event == "call" and frame.f_code is threading.Thread.run.__code__:
        time.sleep(LATE_S)
