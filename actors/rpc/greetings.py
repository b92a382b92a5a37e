"""Whoever connects says first who it is: strangers get no further, and keep nobody waiting.

Rules
- The first message has one length: the credential, which the listener's token makes, and what else the owner of the
  listener wants to know. No other byte is read here, and none is looked at before the credential was compared.
- Whoever calls `attend` hears all at once. A stranger may be silent for so many seconds, and so many may be silent;
  when one more comes, the one that came first goes.
- What has come counts, however late it is read: nobody is sent away without a last look at what it said.
- Where the system gives no connection just now (too many files are open), it is asked again after a pause.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..engine.sockets.refusals import Refusals

log = logging.getLogger(__name__)

SILENT_S = 2.0
"""How long a connection may be silent."""
SILENT = 128
"""How many may be silent at once."""
CREDENTIAL_BYTES = 32
PAUSE_S = 0.1
"""Until the system is asked again for connections."""
_BURST = 1024
"""Connections that are taken before others are heard again."""

Welcome = Callable[[socket.socket, object, bytes], None]
"""(connection, peer's address, what it said behind its credential). The connection is the callee's from then on."""


def credential(token: str) -> bytes:
    """Return what shows that one knows a token.

    >>> len(credential("a token"))
    32
    """
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


@dataclass(slots=True, eq=False)
class _Stranger:
    """A connection that has not said yet who it is."""

    connection: socket.socket
    peer: object
    due: float
    """When it has been silent for too long."""
    said: bytes = b""


class Greetings:
    """Greets those who connect to a listening socket.

    Args:
        listener: the socket; it stays the caller's.
        token: what they must know.
        welcome: gets who does, within `attend`.
        refusals: counts who does not.
        more: bytes of the first message behind the credential.
        refusal: what is sent to who shows another token.
        silent_s: seconds that one may be silent.
        silent: how many may be.
        clock: gives seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        welcome: Welcome,
        refusals: Refusals,
        *,
        more: int = 0,
        refusal: bytes = b"",
        silent_s: float = SILENT_S,
        silent: int = SILENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._credential = credential(token)
        self._welcome = welcome
        self._refusals = refusals
        self._length = CREDENTIAL_BYTES + more
        self._refusal = refusal
        self._silent_s, self._silent = silent_s, silent
        self._clock = clock
        self._strangers: dict[socket.socket, _Stranger] = {}
        """The one that came first is the first."""
        self._resume: float | None = None
        """When connections are to be taken again; None: they are taken."""
        self._selector = selectors.PollSelector()  # has no file, which a forked child would share
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def connections(self) -> list[socket.socket]:
        """Those of the strangers."""
        return list(self._strangers)

    def attend(self, timeout: float = math.inf) -> None:
        """Wait until somebody comes or speaks, and hear all who did; those who were silent for too long go.

        Args:
            timeout: seconds to wait at most; with 0, what has come is heard.

        Raises:
            Exception: what `welcome` raised; the connection is closed, and the others are kept.
        """
        if self._resume is not None and self._clock() >= self._resume:
            self._resume = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        wait = self._wait(timeout)
        for key, _ in self._selector.select(wait if wait < math.inf else None):
            if key.data is None:
                self._accept()
            elif key.data.connection in self._strangers:
                self._is_silent(key.data)
        now = self._clock()
        self._dismiss(lambda first: first.due <= now, f"none within {self._silent_s:g} s")

    def close(self) -> None:
        """End the connections of those who have not been welcomed."""
        for stranger in list(self._strangers.values()):
            self._end(stranger)
        self._selector.close()

    def _wait(self, timeout: float) -> float:
        """Return how long nothing is to be done, at most."""
        now = self._clock()
        first = next(iter(self._strangers.values()), None)
        moments = [self._resume, first.due if first is not None else None]
        return max(min([timeout, *(moment - now for moment in moments if moment is not None)]), 0.0)

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it went while it waited
                continue
            except OSError as exc:
                self._selector.unregister(self._listener)
                if exc.errno != errno.EINVAL:  # which is: its owner has shut it down
                    self._refusals.note(f"expected to accept a connection; found {exc}")
                    self._resume = self._clock() + PAUSE_S
                return
            stranger = _Stranger(connection, peer or "this machine", self._clock() + self._silent_s)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            if self._is_silent(stranger):
                self._dismiss(lambda _: len(self._strangers) > self._silent, f"{self._silent} newer connections")

    def _dismiss(self, must: Callable[[_Stranger], bool], found: str) -> None:
        """Send those who came first away as long as they must go, if a last look finds that they said too little."""
        while self._strangers and must(first := next(iter(self._strangers.values()))):
            if self._is_silent(first):
                self._send_away(first, f"expected a first message of {self._length} bytes; found {found}")

    def _is_silent(self, stranger: _Stranger) -> bool:
        """Hear what a stranger has said, and act on it; tell whether it is still to say all."""
        try:
            while missing := self._length - len(stranger.said):
                part = stranger.connection.recv(missing, socket.MSG_DONTWAIT)
                if not part:
                    raise ConnectionResetError(f"it ended after {len(stranger.said)} bytes")
                stranger.said += part
        except BlockingIOError:
            return True
        except OSError as exc:
            log.debug("a connection of %s ended before it was greeted: %s", stranger.peer, exc)
            self._end(stranger)
            return False
        if hmac.compare_digest(stranger.said[:CREDENTIAL_BYTES], self._credential):
            self._let_in(stranger)
        else:
            self._send_away(stranger, "expected the listener's token; found another", self._refusal)
        return False

    def _let_in(self, stranger: _Stranger) -> None:
        try:
            self._welcome(stranger.connection, stranger.peer, stranger.said[CREDENTIAL_BYTES:])
        except BaseException:
            stranger.connection.close()
            raise
        finally:
            self._forget(stranger)  # last, so that a child that is forked meanwhile finds it somewhere

    def _send_away(self, stranger: _Stranger, reason: str, answer: bytes = b"") -> None:
        self._refusals.note(f"{stranger.peer}: {reason}")
        with contextlib.suppress(OSError):  # it may be gone, or not read
            stranger.connection.send(answer, socket.MSG_DONTWAIT)
        self._end(stranger)

    def _end(self, stranger: _Stranger) -> None:
        stranger.connection.close()
        self._forget(stranger)

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
