"""Connections of one member to all others: who tells what, who died, who left.

Rules
- Each two members have one connection for the life of the group. It ends when the process does, so that its end says
  who died; a member that leaves says so first.
- Who posts a frame never waits. One thread receives and tells; whoever is told must not wait for what only it could
  tell.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Literal

from .links import LEAVING, Frame, Link

log = logging.getLogger(__name__)

Loss = Literal["died", "left"]
Told = Callable[[int, Frame], None]
"""Is given a rank and its frame."""
Lost = Callable[[int, Loss], None]
"""Is given a rank and how it was lost, once; after that no frame of it comes."""

_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Connections:
    """The connections of one member.

    Args:
        links: by rank, from `Listener.meet`.
        told: gets the frames.
        lost: hears of members that died or left.
    """

    def __init__(self, links: Mapping[int, Link], told: Told, lost: Lost) -> None:
        self._links = dict(links)
        self._told, self._lost = told, lost
        self._closing = False
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for peer, link in self._links.items():
            self._selector.register(link.socket, selectors.EVENT_READ, (peer, link))
            if link.exit is not None:
                self._selector.register(link.exit, selectors.EVENT_READ, (peer, link))
        self._thread = threading.Thread(target=self._run, name="collective-connections", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        if self._links:
            self._thread.start()

    def post(self, peer: int, frame: Frame) -> None:
        """Send a member a frame; one that is gone gets none."""
        if not self._links[peer].send(frame):
            self._nudge()

    def post_all(self, frame: Frame) -> None:
        """Send all members a frame."""
        for peer in self._links:
            self.post(peer, frame)

    def close(self) -> None:
        """Say that this member leaves, and disconnect; called once, and not by the thread that tells."""
        self.post_all(Frame(LEAVING))
        self._closing = True
        self._nudge()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for link in self._links.values():
            link.close()
        self._wake.close()
        self._woken.close()

    def _nudge(self) -> None:
        """Let the thread look for what has changed; a full pipe says so already, a closed one too late."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select():
                if key.data is None:
                    self._woken.recv(64)
                    self._watch_writes()
                    continue
                peer, link = key.data
                try:
                    self._attend(peer, link, key, events)
                except Exception:  # the group breaks, instead of waiting for a thread that has ended
                    log.exception("the connection to member %d failed; the member counts as lost", peer)
                    self._gone(peer, link, "died")

    def _attend(self, peer: int, link: Link, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj == link.exit:
            self._exited(peer, link)
            return
        if events & selectors.EVENT_READ:
            self._read(peer, link)
        if events & selectors.EVENT_WRITE and not link.gone and link.flush():
            self._selector.modify(link.socket, selectors.EVENT_READ, key.data)

    def _watch_writes(self) -> None:
        for peer, link in self._links.items():
            if not link.gone and not link.flush():
                self._selector.modify(link.socket, _BOTH, (peer, link))

    def _read(self, peer: int, link: Link) -> bool:
        """Take what has come; tell whether there may be more."""
        if link.gone:
            return False
        try:
            frames = link.receive()
        except BlockingIOError:
            return False
        except ConnectionResetError:  # said once, and ahead of what was sent before
            return True
        except (OSError, EOFError):
            return self._gone(peer, link, "died")
        for frame in frames:
            if frame.kind == LEAVING:
                return self._gone(peer, link, "left")
            self._told(peer, frame)
        return True

    def _exited(self, peer: int, link: Link) -> None:
        while self._read(peer, link):
            continue
        self._gone(peer, link, "died")

    def _gone(self, peer: int, link: Link, loss: Loss) -> bool:
        if not link.gone:
            link.gone = True
            self._selector.unregister(link.socket)
            if link.exit is not None:
                self._selector.unregister(link.exit)
            self._lost(peer, loss)
        return False
