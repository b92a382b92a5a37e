"""An actor with a few calls, served by sockets of this process or of another one."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tensorvine.actors.engine.sockets.blocking import BlockingConnections, SocketAnswer
from tensorvine.actors.engine.sockets.framing import SocketAddress
from tensorvine.actors.engine.sockets.hosting import methods_of
from tensorvine.actors.engine.sockets.packing import Packed, pack
from tensorvine.actors.engine.sockets.server import CallServer
from tensorvine.actors.rpc.calls import Request, answers, remote

WAIT_S = 30.0


class TargetCalls:
    """Calls of each concurrency group."""

    @remote("ctl", repeatable=True)
    def note(self, value: Any) -> Any: ...

    @remote("ctl")
    def fail(self, error: Exception) -> None: ...

    @remote("watch")
    def wait(self, gate: str) -> str: ...

    @remote("ctl")
    def waits(self) -> int: ...

    @remote("ctl")
    def open(self, gate: str) -> None: ...

    @remote("ctl")
    def odd(self) -> Any: ...

    @remote("data")
    def bytes(self) -> None: ...


class Target:
    """An actor that answers the calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting = 0
        """Number of calls of `wait`."""

    @answers(TargetCalls.note)
    async def note(self, value: Any) -> Any:
        self.seen.append(value)
        return value

    @answers(TargetCalls.fail)
    async def fail(self, error: Exception) -> None:
        raise error

    @answers(TargetCalls.wait)
    async def wait(self, gate: str) -> str:
        self.waiting += 1
        await self.gates.setdefault(gate, asyncio.Event()).wait()
        return gate

    @answers(TargetCalls.waits)
    async def waits(self) -> int:
        return self.waiting

    @answers(TargetCalls.open)
    async def open(self, gate: str) -> None:
        self.gates.setdefault(gate, asyncio.Event()).set()

    @answers(TargetCalls.odd)
    async def odd(self) -> Any:
        return threading.Lock()

    @answers(TargetCalls.bytes)
    async def bytes(self) -> None: ...


R = TypeVar("R")
METHODS = {
    "note": "ctl",
    "fail": "ctl",
    "wait": "watch",
    "waits": "ctl",
    "open": "ctl",
    "odd": "ctl",
    "bytes": "data",
}


def call_server(actor: Any, who: str) -> CallServer:
    """Serve an actor in the running event loop."""
    return CallServer(methods_of(type(actor)), lambda method, given: getattr(actor, method)(*given), who)


async def at_rest() -> None:
    """Cancel the other tasks of this loop, and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Loop:
    """An event loop in a thread."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.run(at_rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Serving(Loop):
    """A target that is served."""

    def __init__(
        self,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        host: str | None = None,
    ) -> None:
        super().__init__(new_loop)
        self.target = Target()

        async def start() -> CallServer:
            return call_server(self.target, "an actor")

        self.server = self.run(start())
        self.address: SocketAddress = self.server.address if host is None else self.run(self._address_at(host))

    async def _address_at(self, host: str) -> SocketAddress:
        return self.server.address_at(host)

    def close(self) -> None:
        self.run(self.server.close())
        super().close()


def packed(request: Request[object]) -> Packed:
    """Return a call as a message."""
    return pack((request.remote.name, request.arguments))


def sent(caller: BlockingConnections, request: Request[object]) -> SocketAnswer:
    """Send a call from this thread."""
    answer = caller.send(packed(request))
    assert answer is not None, "the call was not sent"
    return answer


def called(caller: BlockingConnections, request: Request[R]) -> R:
    """Send a call from this thread, and return its answer."""
    return sent(caller, request).result(WAIT_S, "an actor")


SCRIPT = """
import asyncio, pickle, sys
from tests.support.call_targets import Target, call_server

async def serve():
    server = call_server(Target(), "an actor")
    address = server.address_at(sys.argv[1]) if sys.argv[1:] else server.address
    print(pickle.dumps(address).hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class Away:
    """A target that is served by another process.

    Args:
        host: address of the interface for callers of other machines. Without it, a Unix socket is served.
    """

    def __init__(self, *host: str) -> None:
        root, command = Path(__file__).parents[2], [sys.executable, "-c", SCRIPT, *host]
        self.process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address: SocketAddress = pickle.loads(bytes.fromhex(self.process.stdout.readline()))  # noqa: S301  its own

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)
