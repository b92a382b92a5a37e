"""The class of an actor as Ray runs it, without a Ray: its methods run in the event loop of their group."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from tensorvine.actors.engine.groups import GROUPS, group
from tensorvine.actors.engine.ray.hosted import hosted
from tensorvine.actors.engine.sockets.hosting import methods_of
from tensorvine.actors.engine.sockets.lines import Lines, result_of
from tensorvine.actors.engine.sockets.packing import pack

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variable that such an actor sets in its process."""
    monkeypatch.setenv(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")


class Grouped:
    """Returns the thread and the arguments of a call."""

    def __init__(self, first: int) -> None:
        self.first = first

    @group("ctl")
    async def ctl(self, second: int, third: int = 3) -> tuple[str, int, int, int]:
        """Return the thread."""
        return threading.current_thread().name, self.first, second, third

    @group("data")
    async def data(self, second: int, third: int = 3) -> tuple[str, int, int, int]:
        return threading.current_thread().name, self.first, second, third

    @group("watch")
    async def watch(self, second: int, third: int = 3) -> tuple[str, int, int, int]:
        return threading.current_thread().name, self.first, second, third

    @group("data")
    async def fail(self) -> None:
        raise ValueError("its own")


def test_the_class_looks_like_the_actor_s() -> None:
    made = hosted(Grouped)
    assert issubclass(made, Grouped)
    assert (made.__name__, made.__module__, made.__doc__) == (Grouped.__name__, Grouped.__module__, Grouped.__doc__)
    assert made.ctl.__doc__ == "Return the thread."
    assert methods_of(made) == {**methods_of(Grouped), "tensorvine_reach": "ctl"}


def test_methods_run_in_the_loop_of_their_group_however_they_are_called() -> None:
    actor = hosted(Grouped)(1)
    host = actor.tensorvine_host

    async def called() -> list[object]:  # as by a Ray handle, in a loop of Ray's
        return [await getattr(actor, name)(2, third=4) for name in GROUPS]

    assert asyncio.run(called()) == [(f"group-{name}", 1, 2, 4) for name in GROUPS]
    assert host.run("data", called()) == [(f"group-{name}", 1, 2, 4) for name in GROUPS]
    lines = Lines(lambda: [host.address])
    for name in GROUPS:
        answer = lines.send(name, pack((name, (2,))))
        assert isinstance(answer, Future)
        assert result_of(answer, WAIT_S, "an actor") == (f"group-{name}", 1, 2, 3)
    lines.close()
    host.close()


def test_errors_of_methods_are_raised() -> None:
    actor = hosted(Grouped)(1)

    async def failed() -> str:
        try:
            await actor.fail()
        except ValueError as exc:
            return str(exc)
        return "no error"

    assert asyncio.run(failed()) == "its own"
    actor.tensorvine_host.close()
