"""Actors that consist of parts: which answers what, and what a socket and the engine may carry to them."""

from __future__ import annotations

import asyncio

import pytest
from tensorvine.actors.rpc.calls import answers, composed, remote, socket_methods


class MeterCalls:
    @remote("ctl", repeatable=True)
    def read(self, digits: int = 2) -> float: ...

    @remote("data")
    def history(self) -> list[float]: ...

    @remote("ctl")
    def reset(self) -> None: ...


class Reading:
    value = 1.2345

    @answers(MeterCalls.read)
    async def read(self, digits: int = 2) -> float:
        return round(self.value, digits)

    @answers(MeterCalls.history)
    async def history(self) -> list[float]:
        return [self.value]

    async def helper(self) -> None:
        """Answer nothing."""


class Resetting:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @answers(MeterCalls.reset)
    async def reset(self) -> None:
        self._reading.value = 0.0


@composed([Reading, Resetting])
class Meter:
    def __init__(self) -> None:
        reading = Reading()
        self.parts = {Reading: reading, Resetting: Resetting(reading)}


def test_each_call_is_answered_by_its_part() -> None:
    meter = Meter()

    async def scene() -> list[float]:
        before = await meter.read(3)  # type: ignore[attr-defined]
        await meter.reset()  # type: ignore[attr-defined]
        return [before, await meter.read(), *await meter.history()]  # type: ignore[attr-defined]

    assert asyncio.run(scene()) == [1.234, 0.0, 0.0]


def test_what_a_call_may_take_and_where_it_is_carried_out_is_that_of_the_part() -> None:
    assert socket_methods(Meter).keys() == {"read", "reset"}
    groups = {name: getattr(Meter, name).concurrency_group for name in ("read", "history", "reset")}
    assert groups == {"read": "ctl", "history": "data", "reset": "ctl"}
    assert not hasattr(Meter, "helper")
    assert all(asyncio.iscoroutinefunction(getattr(Meter, name)) for name in groups)  # else no asynchronous actor


def test_two_parts_that_answer_the_same_call_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Twice\.history: expected one part that answers it; found another, <class '.*Reading'>"
    ):

        @composed([Reading, Reading])
        class Twice:
            parts: dict[type, object] = {}  # noqa: RUF012
