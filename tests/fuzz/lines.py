"""Targets: the sockets by which actors of a machine are called, at both ends.

Rules
- The server's loop runs in the thread that reads: what an input starts is over when it was given so many rounds. Then
  another caller is answered, whatever came.
- Where an input begins with `SECRET`, the address's secret stands there. What is pickled is of plain values: who knows
  the secret is trusted with pickles, as the engine trusts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tensorvine.actors.engine.sockets.awaited import AwaitedConnection, connected
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.framing import HEADER, SECRET_BYTES, WELCOME, SocketAddress
from tensorvine.actors.engine.sockets.server import CallServer
from tensorvine.actors.rpc.calls import answers, remote
from tensorvine.actors.rpc.lazy_server import call_server
from tensorvine.store.errors import ModelLostError, ShardUnavailableError

from tests.fuzz.mutations import of_bytes
from tests.fuzz.target import Read, Target
from tests.fuzz.wire import LIMIT_S, answering

SECRET = b"S" * SECRET_BYTES
ROUNDS = 12
"""Of the loop, in which a connection is taken, heard, answered and ended."""


class _Calls:
    @remote("ctl")
    def double(self, value: int) -> int: ...


class _Actor:
    @answers(_Calls.double)
    async def double(self, value: int) -> int:
        return 2 * value


def _calls(folder: Path) -> list[bytes]:
    calls = [pickle.dumps(("double", (value,)), 5) for value in (1, 300, "ab")]
    framed = [HEADER.pack(len(call), number) + call for number, call in enumerate(calls, 1)]
    unknown = pickle.dumps(("close", ()), 5)
    return [SECRET + b"".join(framed), SECRET + HEADER.pack(len(unknown), 1 << 40) + unknown, SECRET]


def _framed_damaged(dice: Random, valid: Sequence[bytes]) -> bytes:
    """Damage the framing; what is pickled is cut off or of another length only, mostly."""
    content = dice.choice(valid)
    if dice.random() < 0.3:
        return of_bytes(dice, content, valid)
    head, body = content[:SECRET_BYTES], content[SECRET_BYTES:]
    if not content.startswith(SECRET):
        head, body = content[:1], content[1:]
    if dice.random() < 0.5:
        return head + of_bytes(dice, body[: HEADER.size], valid) + body[HEADER.size :]
    return head + body[: dice.randrange(len(body) + 1)] + dice.choice((b"", head, body, body * 100, bytes(5000)))


@contextmanager
def _server_reading(folder: Path) -> Iterator[Read]:
    loop = asyncio.new_event_loop()

    async def opened() -> CallServer:
        return call_server(_Actor(), "fuzzed")

    server = loop.run_until_complete(opened())
    other = loop.run_until_complete(connected(server.address))

    def read(content: bytes) -> None:
        if content.startswith(SECRET):
            content = server.address.secret + content[len(SECRET) :]
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            caller.connect(f"\0{server.address.name}")
            with contextlib.suppress(BlockingIOError):
                caller.send(content)
            caller.shutdown(socket.SHUT_WR)
            loop.run_until_complete(_rounds())
        if loop.run_until_complete(_doubled(other)) != 42:
            raise RuntimeError("expected another caller to be answered; it was not")

    try:
        yield read
    finally:
        other.close()
        loop.run_until_complete(server.close())
        loop.close()


async def _doubled(connection: AwaitedConnection) -> int:
    answer = connection.send(_Calls.double(21), "an actor")
    if answer is None:
        raise ShardUnavailableError("it goes by the engine")
    return await asyncio.wait_for(answer, LIMIT_S)


async def _rounds() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def _answers(folder: Path) -> list[bytes]:
    return [_answer(True, [1, "two", {"three": 3.0}])]


def _answer(done: bool, outcome: object) -> bytes:
    said = pickle.dumps((done, outcome), 5)
    return WELCOME + HEADER.pack(len(said), 1) + said


def _damaged_answer(dice: Random, valid: Sequence[bytes]) -> bytes:
    return _framed_damaged(dice, [*valid, _answer(False, ModelLostError("it was lost"))])


def _listening() -> tuple[socket.socket, SocketAddress]:
    listener = socket.socket(socket.AF_UNIX)
    name = f"tensorvine-fuzz-{os.getpid()}-{id(listener)}"
    listener.bind(f"\0{name}")
    listener.listen(8)
    return listener, SocketAddress(name, os.getpid(), SECRET)


@contextmanager
def _blocking_reading(folder: Path) -> Iterator[Read]:
    listener, address = _listening()
    with answering(listener, 1, SECRET_BYTES) as tell:

        def read(content: bytes) -> object:
            tell(content)
            with contextlib.closing(BlockingConnections(address)) as connections:
                answer = connections.send(_Calls.double(1))
                if answer is None:
                    raise ShardUnavailableError("it goes by the engine")
                return answer.result(LIMIT_S, "an actor")

        yield read


@contextmanager
def _awaited_reading(folder: Path) -> Iterator[Read]:
    loop = asyncio.new_event_loop()
    listener, address = _listening()
    with contextlib.closing(loop), answering(listener, 1, SECRET_BYTES) as tell:

        async def call() -> object:
            try:
                connection = await connected(address)
            except OSError as exc:
                raise ShardUnavailableError("it goes by the engine") from exc
            try:
                return await _doubled(connection)
            finally:
                connection.close()
                await _rounds()

        def read(content: bytes) -> object:
            tell(content)
            return loop.run_until_complete(call())

        yield read


LINES = (
    Target("calls", _calls, _server_reading, _framed_damaged, trusted=True),
    Target("answers", _answers, _blocking_reading, _damaged_answer, trusted=True),
    Target("awaited", _answers, _awaited_reading, _damaged_answer, trusted=True),
)
