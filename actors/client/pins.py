"""The pins of one client: taken by saves and prefix queries, kept by matches.

Rules
- Each pin belongs to a numbered request (`requests`) and goes with it.
- Pins that are removed without waiting are queued. The session's thread removes those of `GATHER_S` by one message, and
  again until the catalog has answered.
- A catalog of a new term has no pins, nor has one whose session of this client has run out. The session's thread then
  pins again what still lives, and a match on what was retired meanwhile raises from then on. Both are logged.
- The owner of a pin may become garbage at any moment. The callback is the queue's `put`, which is C code: no exception
  of a signal handler interrupts it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from ...store.errors import ModelNotFoundError
from ...store.holders import Lease
from ...store.refs import ModelRef
from ..engine.opened import Opened
from ..rpc.calls import Request
from ..rpc.catalog_calls import CatalogCalls
from .requests import Numbered, Requests

log = logging.getLogger(__name__)

GATHER_S = 0.005
"""How long pins gather that are removed by one message."""
RETRY_S = 0.5
"""How soon the catalog is asked again that did not answer."""
UNPIN_S = 5.0
"""How long the session's thread waits for it."""

_R = TypeVar("_R")


class Owned(weakref.ref[object]):
    """A reference to the owner of a pin, which is removed when the owner is garbage."""

    __eq__, __hash__ = object.__eq__, object.__hash__
    lease: Lease


class _Asks(Protocol):
    def __call__(self, request: Request[_R], timeout: float = ..., /) -> _R: ...


class Pins:
    """The pins of one client.

    Args:
        client: its id, for the log.
        opened: of its session.
        requests: its requests: a query is over when it has no pin any more.
        ask: asks the catalog, as `Session.ask`.
    """

    def __init__(self, client: str, opened: Opened, requests: Requests, ask: _Asks) -> None:
        self._client = client
        self._opened = opened
        self._requests = requests
        self._ask = ask
        self._held: dict[Lease, tuple[ModelRef, Numbered | None]] = {}
        """What matches and saves have pinned, and the queries of the former."""
        self._lost: dict[Lease, str] = {}
        """Pins that went with a session and could not be made again -> why."""
        self._owned: set[Owned] = set()
        """References that count; it keeps them alive."""
        self._dropped: queue.SimpleQueue[Lease | Owned | None] = queue.SimpleQueue()
        """What is to be unpinned; None: only wakes the thread."""
        self._unsent: list[Lease] = []
        """What the catalog was asked to unpin, and has not answered."""

    def hold(self, lease: Lease, ref: ModelRef, query: Numbered | None = None) -> None:
        """Keep a pin alive until it is removed; then its query is over if it has no other one."""
        if query is not None:
            query.leases.add(lease)
        self._held[lease] = ref, query

    def own(self, owner: object, lease: Lease) -> Owned:
        """Have a pin removed soon after its owner has become garbage."""
        owned = Owned(owner, self._dropped.put)
        owned.lease = lease
        self._owned.add(owned)
        return owned

    def disown(self, owned: Owned) -> None:
        """Undo `own`; a second call is no error."""
        self._owned.discard(owned)

    def is_owned(self, owned: Owned) -> bool:
        """Tell whether `own` is still in force."""
        return owned in self._owned

    def check(self, lease: Lease) -> None:
        """Check that a pin was not lost.

        Raises:
            ModelNotFoundError: it was, and its version does not live any longer.
        """
        if lease in self._lost:
            raise ModelNotFoundError(self._lost[lease])

    # ---- removing -------------------------------------------------------------------------------------

    def forget(self, leases: Iterable[Lease]) -> None:
        """Keep pins alive no longer; a query whose last pin this was is over."""
        for lease in leases:
            self._lost.pop(lease, None)
            _, query = self._held.pop(lease, (None, None))
            if query is not None:
                query.leases.discard(lease)
                if not query.leases:
                    self._requests.end(query)

    def unpin(self, leases: Sequence[Lease]) -> None:
        """Remove pins and wait: what they kept may be freed when this returns. Does nothing once the client is closed.

        Raises:
            TensorVineError: the catalog did not answer; it is asked again until it does.
        """
        if self._opened.closed:
            return
        self.forget(leases)
        try:
            self._ask(CatalogCalls.unpin(list(leases)))
        except BaseException:
            self.unpin_behind(leases)
            raise

    def unpin_behind(self, leases: Iterable[Lease]) -> None:
        """Remove pins soon; does not wait. Does nothing once the client is closed."""
        if self._opened.closed:
            return
        for lease in leases:
            self.forget([lease])
            self._dropped.put(lease)

    # ---- the session's thread -------------------------------------------------------------------------

    def wait(self, timeout: float, closing: threading.Event) -> None:
        """Wait for something to remove, `timeout` seconds at most, and a moment longer for more of it."""
        with contextlib.suppress(queue.Empty):
            self._dropped.put(self._dropped.get(timeout=min(timeout, RETRY_S) if self._unsent else timeout))
            closing.wait(GATHER_S)

    def wake(self) -> None:
        """End `wait`."""
        self._dropped.put(None)

    def tidy(self) -> None:
        """Remove what is queued, and again what the catalog has not answered.

        Raises:
            TensorVineError: it does not answer.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._sort(self._dropped.get(block=False))
        if self._unsent:
            self.forget(self._unsent)
            self._ask(CatalogCalls.unpin(self._unsent), UNPIN_S)
            self._unsent = []

    def _sort(self, dropped: Lease | Owned | None) -> None:
        if isinstance(dropped, Lease):
            self._unsent.append(dropped)
        elif dropped is not None and dropped in self._owned:  # not disowned meanwhile
            self._owned.discard(dropped)
            self._unsent.append(dropped.lease)

    def pin_again(self, timeout: float) -> None:
        """Pin again all that is held, as the catalog has no pins of this client.

        Raises:
            TensorVineError: the catalog did not answer.
        """
        held = {lease: ref for lease, (ref, _) in list(self._held.items())}
        if not held:
            return
        refused = self._ask(CatalogCalls.pin(held), timeout)
        for lease, why in refused.items():
            if lease in self._held:
                self.forget([lease])
                self._lost[lease] = (
                    f"{held[lease]}: expected it to be pinned; its pin went with the catalog's process or the client's "
                    f"session, and cannot be renewed: {why}"
                )
                log.error("client %s: %s", self._client, self._lost[lease])
        kept = held.keys() - refused.keys()
        log.warning("client %s: pinned %d versions again", self._client, len(kept))
        self.unpin_behind(kept - self._held.keys())  # removed meanwhile
