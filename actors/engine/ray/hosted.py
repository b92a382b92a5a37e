"""The class of an actor as Ray runs it: with our sockets, by which TensorVine calls it, and methods for users' handles.

Rules
- A method runs in the event loop of its concurrency group, whether it is called by a socket or by a Ray handle.
- Of our own calls Ray carries one, `tensorvine_reach`. Its answer arrives when the actor has started, and is the error
  of the constructor if that failed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast

import ray
import ray.util
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR

from ....store.logs import to_stderr
from ..sockets.framing import SocketAddress
from ..sockets.hosting import Host, methods_of

_Method = Callable[..., Coroutine[object, None, object]]


def hosted(cls: type) -> type:
    """Return a subclass of an actor's class that serves calls by sockets."""

    def __init__(self: Any, *arguments: object, **named: object) -> None:  # noqa: N807
        # Ray warns of each `ray.get` in an actor with event loops. Ours are in threads and constructors.
        os.environ.setdefault(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")
        named_by_ray = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
        to_stderr(named_by_ray or cls.__name__)
        cls.__init__(self, *arguments, **named)
        self.tensorvine_host = Host(self, cls.__name__)

    async def tensorvine_reach(self: Any, node: str, user: int) -> SocketAddress:
        host: Host = self.tensorvine_host
        if node == ray.get_runtime_context().get_node_id() and user == os.geteuid():
            return host.address
        return await asyncio.to_thread(host.address_at, cast(str, ray.util.get_node_ip_address()))

    methods = {name: _in_its_loop(getattr(cls, name), group) for name, group in methods_of(cls).items()}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**methods, **named, "__init__": __init__, "tensorvine_reach": tensorvine_reach})


def _in_its_loop(method: _Method, group: str) -> _Method:
    @wraps(method)
    async def forwarded(self: Any, *arguments: object, **named: object) -> object:
        loop = self.tensorvine_host.loop_of(group)
        call = method(self, *arguments, **named)
        if asyncio.get_running_loop() is loop:
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    return forwarded
