"""Declarations of calls, and actors that consist of parts."""

from __future__ import annotations

import asyncio

import pytest
from tensorvine.actors.engine.sockets.hosting import methods_of
from tensorvine.actors.rpc.calls import answers, composed, remote


def test_a_request_is_made_of_positions_names_and_defaults() -> None:
    class Calls:
        @remote("ctl")
        def add(self, number: int, times: int = 2, *, sign: str = "+") -> int: ...

    assert Calls.add(1).arguments == (1,)
    assert repr(Calls.add(1, times=3)) == "add(1, 3)"
    with pytest.raises(TypeError, match="missing a required argument: 'number'"):
        Calls.add(times=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tmies'"):
        Calls.add(1, tmies=3)  # type: ignore[call-arg]


def test_a_method_has_the_group_and_the_docstring_of_its_declaration() -> None:
    class Calls:
        @remote("watch")
        def slow(self) -> None:
            """Take long."""

        @remote("data")
        def much(self) -> None: ...

    class Actor:
        @answers(Calls.slow)
        async def slow(self) -> None: ...

        @answers(Calls.much, group="ctl")
        async def much(self) -> None:
            """Take much."""

    assert methods_of(Actor) == {"slow": "watch", "much": "ctl"}
    assert (Actor.slow.__doc__, Actor.much.__doc__) == ("Take long.", "Take much.")


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


def test_an_actor_can_be_called_as_its_parts_declare_and_in_no_other_way() -> None:
    assert methods_of(Meter) == {"read": "ctl", "history": "data", "reset": "ctl"}
    assert not hasattr(Meter, "helper")


def test_two_parts_that_answer_the_same_call_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Twice\.history: expected one part that answers it; found another, <class '.*Reading'>"
    ):

        @composed([Reading, Reading])
        class Twice:
            parts: dict[type, object] = {}  # noqa: RUF012
