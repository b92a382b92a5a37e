"""Threads that work for a shard.

Rules
- What a call raised is kept by its future, and by whoever keeps that. So it keeps nothing of the call itself: neither
  its variables nor its arguments, which may be views that lock the shard's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from ...store.errors import without_frames

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Workers(ThreadPoolExecutor):
    """A pool of threads whose failures hold no memory.

    >>> with Workers(1) as workers:
    ...     str(workers.submit(int, "many").exception())
    "invalid literal for int() with base 10: 'many'"
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a call in one of the threads."""
        return super().submit(_run, [fn, args, kwargs])

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Run something long in one of the threads, without stopping this loop."""
        return await asyncio.get_running_loop().run_in_executor(self, fn, *args)


def _run(call: list[Any]) -> Any:
    """Run what is taken out of `call`, so that no frame outside has it."""
    kwargs, args, fn = call.pop(), call.pop(), call.pop()
    try:
        return fn(*args, **kwargs)
    except BaseException as exc:  # noqa: BLE001 - it goes to the caller of the future
        del fn, args, kwargs
        raise without_frames(exc)  # noqa: B904 - it is the same
