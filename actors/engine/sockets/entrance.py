"""Accepts an actor's connections and authenticates them with the secret of its address.

Rules
- Of an unauthenticated connection only the bytes of the credential are read, and they are only compared.
- A connection that is not authenticated yet, or was refused and is about to be closed, takes one of `VISITORS` places.
  When all are taken and another connection comes, a refused one is closed first, then the one that is silent longest.
- So no number of silent connections locks a caller out. On its own machine a caller sends the secret with its first
  bytes. From another machine it sends the response to a challenge, for which the server keeps nothing: if the
  connection was closed before the response arrived, the caller sends it with the first bytes of the next one.
- A challenge is accepted for `VALID_S` and once. Used ones are kept for so long, and only callers that know the secret
  use any.
- Refusals are noted in `Refusals`. A refused connection is not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from .framing import AGAIN, CALLER, SECRET_BYTES, SERVER, WELCOME, SocketAddress, credentials, proof, watch
from .refusals import Refusals

GREETING_S = 5.0
"""Within which a visitor shows the secret."""
VISITORS = 32
BACKLOG = 128
AWAY_BACKLOG = 1024
"""Of a port: anybody can connect while the loop is busy."""
AT_ONCE = 8
"""How many are let come before those who came are read."""
VALID_S = 30.0
"""How long a challenge is accepted."""
_STAMP = struct.Struct(">dQ")
"""The first half of a challenge: when it was made, and a random number. The second half authenticates it."""
REST_S = 0.5
"""How long nobody comes after the machine had no descriptor for a visitor."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """What is known of who has not shown the secret yet."""

    ends: asyncio.TimerHandle
    shown: bytearray = field(default_factory=bytearray)


class Entrance:
    """Opens a socket in the event loop in which it is made.

    Args:
        admit: takes the socket of who has shown the secret, and what to say to it first; called in the loop.
        refusals: where those who are not let in are noted.
        host: the address of an interface of this machine, for callers of others; None: for callers of this machine.

    Raises:
        OSError: no socket can be had.
    """

    def __init__(
        self, admit: Callable[[socket.socket, bytes], None], refusals: Refusals, host: str | None = None
    ) -> None:
        self._listener, name, place = _listening() if host is None else _listening_at(host)
        self.address = SocketAddress(name, os.getpid(), secrets.token_bytes(SECRET_BYTES), place)
        self._admit = admit
        self._away = place is not None
        self._length = 2 * SECRET_BYTES if self._away else SECRET_BYTES
        """Of what is to be shown: the secret, or a challenge and its proof."""
        self._key = secrets.token_bytes(SECRET_BYTES)
        """Authenticates this server's challenges."""
        self._used: dict[bytes, float] = {}
        """Challenges that callers have used -> when; the oldest is the first."""
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._silent: dict[socket.socket, _Visit] = {}
        """Who has not shown the secret yet, as they came."""
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}
        """Who was refused -> the end of the pause."""
        self._resting: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Let nobody in any more; may be repeated. To be called in the loop."""
        if self._listener.fileno() < 0:
            return
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for visitor in list(self._silent):
            self._forget(visitor)
            visitor.close()
        for visitor in list(self._refused):
            self._see_off(visitor)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                visitor, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:  # such as: too many open files; who waits is there still
                self._refusals.note(f"expected to accept a connection; found {exc}")
                self._loop.remove_reader(self._listener)
                self._resting = self._loop.call_later(REST_S, self._loop.add_reader, self._listener, self._accept)
                return
            visitor.setblocking(False)
            try:
                self._receive(visitor)
            except OSError:  # it has gone
                visitor.close()

    def _receive(self, visitor: socket.socket) -> None:
        if self._away:
            visitor.send(self._challenge())  # there is room for so few bytes
        elif (user := credentials(visitor)[1]) != os.geteuid():
            self._refuse(visitor, f"expected a process of user {os.geteuid()}; found one of user {user}")
            if self._is_full:
                self._see_off(visitor)
            return
        while self._is_full:
            self._make_room()
        self._silent[visitor] = _Visit(self._loop.call_later(GREETING_S, self._give_up, visitor))
        self._loop.add_reader(visitor, self._read, visitor)
        self._read(visitor)  # most have sent it by now

    def _challenge(self) -> bytes:
        stamp = _STAMP.pack(self._loop.time(), secrets.randbits(64))
        return stamp + self._seal(stamp)

    def _seal(self, stamp: bytes) -> bytes:
        return hmac.digest(self._key, stamp, "sha256")[: SECRET_BYTES - _STAMP.size]

    def _welcome(self, shown: bytes) -> bytes | None:
        """Return what to say to a connection that has shown this, or None if it is refused."""
        secret = self.address.secret
        if not self._away:
            return WELCOME if hmac.compare_digest(shown, secret) else None
        challenge, proven = shown[:SECRET_BYTES], shown[SECRET_BYTES:]
        stamp, now = challenge[: _STAMP.size], self._loop.time()
        if not hmac.compare_digest(challenge[_STAMP.size :], self._seal(stamp)):
            return None
        if not hmac.compare_digest(proven, proof(secret, challenge, CALLER)):
            return None
        while self._used and next(iter(self._used.values())) < now - VALID_S:
            del self._used[next(iter(self._used))]
        if challenge in self._used or _STAMP.unpack(stamp)[0] < now - VALID_S:
            return None
        self._used[challenge] = now
        return WELCOME + proof(secret, challenge, SERVER)

    @property
    def _is_full(self) -> bool:
        return len(self._silent) + len(self._refused) >= VISITORS

    def _make_room(self) -> None:
        if self._refused:
            self._see_off(next(iter(self._refused)))
            return
        longest = next(iter(self._silent))
        self._read(longest)
        if longest in self._silent:  # else it got in, or was refused
            self._forget(longest)
            if self._away:
                with contextlib.suppress(OSError):
                    longest.send(AGAIN)
            longest.close()
            self._refusals.note(f"{VISITORS} connections had not sent the secret when another one arrived")

    def _read(self, visitor: socket.socket) -> None:
        visit = self._silent[visitor]
        try:
            data = visitor.recv(self._length - len(visit.shown))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        visit.shown.extend(data)
        if data and len(visit.shown) < self._length:
            return
        self._forget(visitor)
        if not data:  # it has gone
            visitor.close()
        elif (welcome := self._welcome(bytes(visit.shown))) is not None:
            try:
                if self._away:
                    watch(visitor)
                self._admit(visitor, welcome)
            except OSError:  # it has gone
                visitor.close()
        else:
            self._refuse(visitor, "expected the secret of this socket's address; found something else")

    def _give_up(self, visitor: socket.socket) -> None:
        self._read(visitor)  # what came in time counts, however long the loop was busy
        if visitor not in self._silent:
            return
        came = len(self._silent[visitor].shown)
        self._forget(visitor)
        self._refuse(visitor, f"expected {self._length} bytes of a secret within {GREETING_S:.0f} s; found {came}")

    def _refuse(self, visitor: socket.socket, reason: str) -> None:
        self._refused[visitor] = self._loop.call_later(self._refusals.note(reason), self._see_off, visitor)

    def _see_off(self, visitor: socket.socket) -> None:
        self._refused.pop(visitor).cancel()
        visitor.close()

    def _forget(self, visitor: socket.socket) -> None:
        self._loop.remove_reader(visitor)
        self._silent.pop(visitor).ends.cancel()


def _listening_at(host: str) -> tuple[socket.socket, str, tuple[str, int]]:
    """Listen on a free port of an interface; gives the socket, its name and its place."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=AWAY_BACKLOG)
    listener.setblocking(False)
    place = host, int(listener.getsockname()[1])
    return listener, f"{host}:{place[1]}", place


def _listening() -> tuple[socket.socket, str, None]:
    """Listen on a socket of this machine that needs no file; gives the socket and its name."""
    name = f"tensorvine-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, name, None
