"""Targets: both ends of the sockets over which actors of a machine are called.

Rules
- The server's event loop runs in the reading thread. An input gets `ROUNDS` rounds of the loop. Then another caller
  must be answered.
- `SECRET` at the beginning of an input is replaced by the secret of the address. Pickles contain plain values
  and buffers: a peer that knows the secret is trusted with pickles.
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

from tensorvine.actors.engine.sockets.awaited import AwaitedConnection, ConnectionEndedError, connected
from tensorvine.actors.engine.sockets.blocking import BlockingConnections
from tensorvine.actors.engine.sockets.framing import HEADER, SECRET_BYTES, WELCOME, SocketAddress
from tensorvine.actors.engine.sockets.packing import APART_BYTES, Packed, pack
from tensorvine.actors.engine.sockets.server import CallServer
from tensorvine.store.errors import ModelLostError, ShardUnavailableError

from tests.fuzz.mutations import of_bytes
from tests.fuzz.target import Read, Target
from tests.fuzz.wire import LIMIT_S, answering
from tests.support.call_targets import call_server

SECRET = b"S" * SECRET_BYTES
ROUNDS = 12
"""Rounds of the event loop in which a connection is accepted, read, answered and ended."""
BUFFER = pickle.PickleBuffer(bytes(range(256)) * (APART_BYTES // 256))
"""Is sent after the pickle."""


class _Actor:
    async def double(self, value: int) -> int:
        return 2 * value


def _call(value: object) -> Packed:
    return pack(("double", (value,)))


def _framed(number: int, message: Packed) -> bytes:
    return b"".join(message.parts(number))


def _calls(folder: Path) -> list[bytes]:
    framed = [_framed(number, _call(value)) for number, value in enumerate((1, 300, "ab"), 1)]
    buffers = _framed(1, _call([BUFFER, BUFFER])) + _framed(2, _call(BUFFER))
    return [SECRET + b"".join(framed), SECRET + _framed(1 << 40, pack(("close", ()))), SECRET + buffers, SECRET]


def _framed_damaged(dice: Random, valid: Sequence[bytes]) -> bytes:
    """Damage headers; mostly, pickles are only cut off or extended."""
    content = dice.choice(valid)
    if dice.random() < 0.3:
        return of_bytes(dice, content, valid)
    head, body = content[:SECRET_BYTES], content[SECRET_BYTES:]
    if not content.startswith(SECRET):
        head, body = content[:1], content[1:]
    if dice.random() < 0.5:
        end = dice.choice((1, 3)) * HEADER.size  # 3: with announced sizes
        return head + of_bytes(dice, body[:end], valid) + body[end:]
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


async def _doubled(connection: AwaitedConnection) -> object:
    try:
        return await asyncio.wait_for(connection.send(_call(21)), LIMIT_S)
    except ConnectionEndedError as exc:
        raise ShardUnavailableError(str(exc)) from exc


async def _rounds() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def _answers(folder: Path) -> list[bytes]:
    return [_answer(True, [1, "two", {"three": 3.0}]), _answer(True, [BUFFER, BUFFER])]


def _answer(done: bool, outcome: object) -> bytes:
    return WELCOME + _framed(1, pack((done, outcome)))


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
                answer = connections.send(_call(1))
                if answer is None:
                    raise ShardUnavailableError("the call was not sent")
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
                raise ShardUnavailableError("no connection") from exc
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
