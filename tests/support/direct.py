"""Calls without sockets: a stand-in engine answers them itself, in the thread of the caller.

Rules
- `reach` of such an engine returns one `Answering` in place of addresses.
- Arguments are packed and unpacked as for sockets. Answers are passed on as they are.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import pytest
from tensorvine.actors.engine.sockets.packing import Packed
from tensorvine.actors.rpc import channel
from tensorvine.store.errors import OperationTimeoutError, TensorVineError

Answering: TypeAlias = Callable[..., Future[Any]]
"""Called with the name of a method and its arguments; returns the answer, which may arrive later."""


class DirectLines:
    """Stands in for `Lines`.

    Args:
        locate: returns one `Answering`.
    """

    def __init__(self, locate: Callable[[], Sequence[Any]]) -> None:
        self._locate = locate

    def send(self, group: str, message: Packed) -> Future[Any]:
        try:
            (answering,) = self._locate()
        except TensorVineError as exc:
            return answered(error=exc)
        method, arguments = pickle.loads(message.pickled, buffers=message.buffers)  # noqa: S301  packed just now
        return answering(method, *arguments)

    def ask(self, group: str, message: Packed) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.send(group, message))

    def post(self, group: str, message: Packed) -> None:
        self.send(group, message)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass


def answered(value: Any = None, error: Exception | None = None) -> Future[Any]:
    """Return an answer that has arrived."""
    answer: Future[Any] = Future()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)
    return answer


def call_directly(monkeypatch: pytest.MonkeyPatch, *, waits: bool = True) -> None:
    """Have channels that are made from now on call without sockets.

    Args:
        monkeypatch: ends it.
        waits: if False, an answer that has not arrived when it is needed has timed out.
    """
    monkeypatch.setattr(channel, "Lines", DirectLines)
    if not waits:
        monkeypatch.setattr(channel, "result_of", _arrived)


def _arrived(answer: Future[Any], timeout: float, who: str) -> Any:
    if not answer.done():
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out")
    return answer.result()
