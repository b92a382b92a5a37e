"""What an actor can be asked: declared once, for those who ask and for the actor.

Rules
- A class such as `ShardCalls` declares the calls of one actor. Calling a declaration makes a `Request`, a value, which
  a `Channel` carries; the type checker knows its arguments and its answer.
- The actor's method is marked by `answers(declaration)`, and checked against it. It has no marks of its own.
- An actor of many methods is `composed` of parts: each has the methods of one matter, and the actor hands calls on.
- A declaration says what every caller must know: the concurrency group in which the call runs, and whether the call
  may be repeated.

>>> class CounterCalls:
...     @remote("ctl", repeatable=True)
...     def add(self, number: int, times: int = 1) -> int:
...         "Add a number, and return the sum."
...         ...
>>> class Counter:
...     @answers(CounterCalls.add)
...     async def add(self, number: int, times: int = 1) -> int:
...         return number * times
>>> CounterCalls.add(2, times=3)
add(2, 3)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property, wraps
from typing import Concatenate, Generic, Never, ParamSpec, Protocol, TypeVar

from ..engine.groups import group as engine_group

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)
_Self = TypeVar("_Self")
_Method = Callable[..., Coroutine[object, Never, object]]


class Declaration(Generic[_P, _R_co]):
    """The declaration of one call.

    Args:
        declared: a method without a body, whose docstring says what the call does.
        group: the concurrency group of the actor in which it is carried out; see `engine.GROUPS`.
        repeatable: it changes nothing, or not twice: it may be sent again where it is not known what became of it.
    """

    def __init__(self, declared: Callable[Concatenate[Never, _P], _R_co], group: str, repeatable: bool) -> None:
        self.name = declared.__name__
        self.group = group
        self.repeatable = repeatable
        self.__doc__ = declared.__doc__
        self._declared = declared

    def __call__(self, *arguments: _P.args, **named: _P.kwargs) -> Request[_R_co]:
        """Return the request to make this call with these arguments."""
        if named:
            bound = self._signature.bind(None, *arguments, **named)
            bound.apply_defaults()
            return Request(self, bound.args[1:])
        return Request(self, arguments)

    def __repr__(self) -> str:
        return f"<call {self.name}>"

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._declared)


class Request(Generic[_R_co]):
    """A call with its arguments. It names itself in messages as Python would write it."""

    __slots__ = ("arguments", "remote")

    def __init__(self, remote: Declaration[..., _R_co], arguments: tuple[object, ...]) -> None:
        self.remote = remote
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"{self.remote.name}({', '.join(map(repr, self.arguments))})"


def remote(
    group: str, *, repeatable: bool = False
) -> Callable[[Callable[Concatenate[Never, _P], _R]], Declaration[_P, _R]]:
    """Declare a call; see `Declaration` for the arguments."""

    def declare(declared: Callable[Concatenate[Never, _P], _R]) -> Declaration[_P, _R]:
        return Declaration(declared, group, repeatable)

    return declare


def answers(
    call: Declaration[_P, _R], *, group: str | None = None
) -> Callable[
    [Callable[Concatenate[_Self, _P], Coroutine[object, Never, _R]]],
    Callable[Concatenate[_Self, _P], Coroutine[object, Never, _R]],
]:
    """Mark the method of an actor that answers a declared call; its docstring is the declaration's.

    Args:
        call: the declaration.
        group: the concurrency group in which this actor carries it out; None: the declaration's.
    """

    def mark(
        method: Callable[Concatenate[_Self, _P], Coroutine[object, Never, _R]],
    ) -> Callable[Concatenate[_Self, _P], Coroutine[object, Never, _R]]:
        method.__doc__ = method.__doc__ or call.__doc__
        method.answers = call  # pyright: ignore[reportFunctionMemberAccess]
        return engine_group(group or call.group)(method)

    return mark


class Composed(Protocol):
    """An actor that consists of parts."""

    parts: Mapping[type, object]


_Actor = TypeVar("_Actor", bound=Composed)


def composed(parts: Sequence[type]) -> Callable[[type[_Actor]], type[_Actor]]:
    """Give an actor's class the methods by which its parts answer; each hands the call on to the part.

    Args:
        parts: the parts' types, by which the actor finds them in its `parts`.

    Raises:
        TypeError: two of them, or one and the actor itself, answer the same call.

    >>> class CounterCalls:
    ...     @remote("ctl")
    ...     def add(self, number: int) -> int: ...
    >>> class Sum:
    ...     @answers(CounterCalls.add)
    ...     async def add(self, number: int) -> int:
    ...         return 40 + number
    >>> @composed([Sum])
    ... class Counter:
    ...     def __init__(self) -> None:
    ...         self.parts = {Sum: Sum()}
    >>> import asyncio
    >>> asyncio.run(Counter().add(2))
    42
    """

    def compose(actor: type[_Actor]) -> type[_Actor]:
        for part in parts:
            for name, method in _answering(part).items():
                if hasattr(actor, name):
                    raise TypeError(
                        f"{actor.__name__}.{name}: expected one part that answers it; found another, {part}"
                    )
                setattr(actor, name, _handed_on(part, method))
        return actor

    return compose


def _answering(cls: type) -> dict[str, _Method]:
    """Return the methods of a class that answer calls."""
    return {name: method for name in dir(cls) if hasattr(method := getattr(cls, name), "answers")}


def _handed_on(part: type, method: _Method) -> _Method:
    name = method.__name__

    @wraps(method)
    async def hand_on(self: Composed, *arguments: object) -> object:
        return await getattr(self.parts[part], name)(*arguments)

    return hand_on
