"""Processes that are forked from a template: how they end, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import cloudpickle
import psutil
import pytest
from tensorvine.actors.engine.dask.records import Boot, Life, Plan
from tensorvine.actors.engine.dask.template import Template, end_group
from tensorvine.actors.engine.sockets.framing import SocketAddress

from tests.support.dask_cluster import WAIT_S, is_running

pytestmark = pytest.mark.timeout(200)


def boot(made: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes:
    """What a process is told that makes this in place of an actor."""
    start = cloudpickle.dumps((sys.path, cloudpickle.dumps((made, dict(arguments)))))
    plan = Plan("key", "of a test", start, "client")
    return pickle.dumps(Boot(Life(plan, 0, ("7",)), SocketAddress("none", 0, b""), "", "", ""))


ENDS, WAITS = boot(os._exit, {"status": 3}), boot(signal.pause, {})


def play(scene: Callable[[Template], Any]) -> None:
    async def opened() -> None:
        async with template() as one:
            await asyncio.wait_for(scene(one), WAIT_S)

    asyncio.run(opened())


@contextlib.asynccontextmanager
async def template() -> AsyncIterator[Template]:
    made = Template(os.environ)
    try:
        yield made
    finally:
        made.close()


def test_it_is_told_how_each_process_has_ended() -> None:
    async def scene(made: Template) -> None:
        forked = await asyncio.gather(*(made.fork("", ENDS) for _ in range(20)))
        assert len({process.pid for process in forked}) == 20
        assert await asyncio.gather(*(process.ended() for process in forked)) == [3] * 20
        waits = await made.fork("", WAITS)
        end_group(waits.pid)
        assert await waits.ended() == -signal.SIGKILL

    play(scene)


def test_a_process_has_a_group_a_name_and_a_template_that_it_ends_with() -> None:
    async def scene(made: Template) -> None:
        first, second = await asyncio.gather(made.fork("", WAITS), made.fork("", WAITS))
        parent = psutil.Process(first.pid).ppid()
        assert psutil.Process(second.pid).ppid() == parent
        assert [os.getpgid(process.pid) for process in (first, second)] == [first.pid, second.pid]
        while psutil.Process(first.pid).name() != "of a test":  # soon after the fork
            await asyncio.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        assert await asyncio.gather(first.ended(), second.ended()) == [-signal.SIGKILL] * 2
        while is_running(first.pid) or is_running(second.pid):  # the kernel has closed their files already
            await asyncio.sleep(0.001)
        third = await made.fork("", ENDS)
        assert await third.ended() == 3

    play(scene)


def test_it_is_missed_by_a_host_that_has_more_than_a_thousand_files_open() -> None:
    async def scene(made: Template) -> None:
        waits = await made.fork("", WAITS)
        os.kill(psutil.Process(waits.pid).ppid(), signal.SIGKILL)
        assert await waits.ended() == -signal.SIGKILL
        assert await (await made.fork("", ENDS)).ended() == 3

    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        play(scene)


def test_who_orders_while_it_ends_is_told_so_or_gets_his_process_of_the_next_one() -> None:
    async def scene(made: Template) -> None:
        for _ in range(5):
            waits = await made.fork("", WAITS)
            os.kill(psutil.Process(waits.pid).ppid(), signal.SIGKILL)
            ordered = await asyncio.gather(*(made.fork("", ENDS) for _ in range(3)), return_exceptions=True)
            for process in ordered:
                assert isinstance(process, ConnectionResetError) or await process.ended() in (3, -signal.SIGKILL)
            assert await waits.ended() == -signal.SIGKILL

    play(scene)


def test_whoever_gave_up_waiting_leaves_no_process_behind() -> None:
    async def scene(made: Template) -> None:
        first = await made.fork("", WAITS)
        parent = psutil.Process(first.pid)
        given_up = asyncio.create_task(made.fork("", WAITS))
        await asyncio.sleep(0)
        given_up.cancel()
        last = await made.fork("", ENDS)
        assert await last.ended() == 3
        while psutil.Process(parent.ppid()).children() != [parent]:
            await asyncio.sleep(0.01)
        end_group(first.pid)
        await first.ended()

    play(scene)


def test_orders_of_any_size_come_whole_however_many_there_are() -> None:
    def ends(data: bytes) -> None:
        os._exit(len(data) % 251)

    sizes = [0, 5_000_000, 1, 300_001, 3_000_017, 77]

    async def scene(made: Template) -> None:
        forked = await asyncio.gather(*(made.fork("", boot(ends, {"data": bytes(size)})) for size in sizes))
        assert [await process.ended() for process in forked] == [size % 251 for size in sizes]

    play(scene)


def test_where_there_is_no_room_for_another_process_the_others_go_on() -> None:
    async def scene(made: Template) -> None:
        first = await made.fork("", WAITS)
        parent = psutil.Process(psutil.Process(first.pid).ppid())
        soft, hard = parent.rlimit(psutil.RLIMIT_NOFILE)
        used = {int(number) for number in os.listdir(f"/proc/{parent.pid}/fd")}
        parent.rlimit(psutil.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))  # for what is opened next
        with pytest.raises(OSError, match="could not fork"):
            await made.fork("", ENDS)
        assert parent.children() == [psutil.Process(first.pid)]
        parent.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert await (await made.fork("", ENDS)).ended() == 3
        assert is_running(first.pid)
        end_group(first.pid)
        await first.ended()

    play(scene)


def test_it_imports_modules_of_ours_once_and_no_others() -> None:
    def loaded(ours: str, others: str) -> None:
        os._exit((ours in sys.modules) + 2 * (others in sys.modules))

    async def scene(made: Template) -> None:
        ours, others = "tensorvine.planner.curves.curve", "tests.support.dask_probe"
        names = {"ours": ours, "others": others}
        found = [await (await made.fork(module, boot(loaded, names))).ended() for module in ("", others, ours, "")]
        assert found == [0, 0, 1, 1]
        absent = await made.fork("tensorvine.of_another_version", boot(loaded, names))
        assert await absent.ended() == 1

    play(scene)
