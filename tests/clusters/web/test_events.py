"""Snapshots for viewers: made while somebody listens, and none queues for a slow one."""

from __future__ import annotations

import asyncio
import contextlib

from tensorvine.clusters.web.events import Broadcast


def test_texts_are_made_only_while_somebody_listens() -> None:
    made: list[int] = []

    def make() -> str:
        made.append(len(made))
        return str(made[-1])

    async def listen() -> None:
        broadcast = Broadcast(make, 0.001)
        for _ in range(2):
            async with contextlib.aclosing(broadcast.texts()) as one, contextlib.aclosing(broadcast.texts()) as two:
                assert int(await anext(two)) >= int(await anext(one))
            count = len(made)
            await asyncio.sleep(0.05)  # long enough for fifty texts
            assert len(made) == count
        await broadcast.close()

    asyncio.run(listen())


def test_a_slow_listener_gets_the_newest_text() -> None:
    count = 0

    def make() -> str:
        nonlocal count
        count += 1
        return str(count)

    async def listen() -> None:
        broadcast = Broadcast(make, 0.001)
        async with contextlib.aclosing(broadcast.texts()) as quick, contextlib.aclosing(broadcast.texts()) as slow:
            first = int(await anext(slow))
            while int(last := await anext(quick)) < first + 20:
                pass
            assert int(await anext(slow)) >= int(last)

    asyncio.run(listen())
