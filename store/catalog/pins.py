"""Pins: what clients keep from being freed. They belong to numbered requests, and are not in the journal.

Rules
- A request that is repeated finds its pin (`Pins.of`), and pins once.
- A pin goes when it is removed, or with its request or its client. Whether a request is over says `store.requests`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..holders import Lease, Request
from ..refs import ModelRef
from ..versions.version import Match


class Pins:
    """The pins of all clients.

    >>> pins, lease = Pins(), Lease(Request("client", 1))
    >>> pins.add(lease, ModelRef("m", 1))
    >>> pins.holds(ModelRef("m", 1)), pins.holds(ModelRef("m", 1), "other")
    (True, False)
    >>> pins.remove([lease])
    [ModelRef('m@1')]
    """

    def __init__(self) -> None:
        self._refs: dict[Lease, ModelRef] = {}
        self._of_version: dict[ModelRef, dict[Lease, None]] = {}
        self._of_client: dict[str, dict[Request, dict[Lease, None]]] = {}
        self.matches: dict[Lease, Match] = {}
        """What a query was answered, for as long as its pin is here."""

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, lease: Lease, ref: ModelRef) -> None:
        """Pin a version. What the lease pinned before is not pinned by it any more."""
        if self._refs.get(lease, ref) != ref:
            self.remove([lease])
        self._refs[lease] = ref
        self._of_version.setdefault(ref, {})[lease] = None
        self._of_client.setdefault(lease.client, {}).setdefault(lease.request, {})[lease] = None

    def of(self, lease: Lease) -> ModelRef | None:
        """Return the version that a lease pins."""
        return self._refs.get(lease)

    def holds(self, ref: ModelRef, client: str | None = None) -> bool:
        """Tell whether a version is pinned, by any client or by one."""
        leases = self._of_version.get(ref, {})
        return bool(leases) if client is None else any(lease.client == client for lease in leases)

    def remove(self, leases: Iterable[Lease]) -> list[ModelRef]:
        """Remove pins, and return the versions that have none any more. Unknown pins are no error."""
        free: list[ModelRef] = []
        for lease in leases:
            ref = self._refs.pop(lease, None)
            if ref is None:
                continue
            self.matches.pop(lease, None)
            left = self._of_version[ref]
            del left[lease]
            if not left:
                del self._of_version[ref]
                free.append(ref)
            requests = self._of_client[lease.client]
            del requests[lease.request][lease]
            if not requests[lease.request]:
                del requests[lease.request]
            if not requests:
                del self._of_client[lease.client]
        return free

    def requests(self, client: str) -> list[Request]:
        """List the requests of a client that have pins."""
        return list(self._of_client.get(client, ()))

    def leases(self, request: Request) -> list[Lease]:
        """List the pins of a request."""
        return list(self._of_client.get(request.client, {}).get(request, ()))

    def clients(self) -> list[str]:
        """List the clients that have pins."""
        return list(self._of_client)
