"""Joining a group: members meet, agree on what carries the bytes, and connect.

Rules
- All members give the same name, epoch, size and back end. Each opens what it is reached by before it meets the others.
- "auto" takes shared memory if all members are on one machine and can read each other's memory, otherwise Gloo; all
  take the same. Why it is not shared memory is logged, by rank 0.
- A join that fails closes what it opened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, cast

from ...store.waiting import Deadline
from ..engine.choice import engine_for
from .backend import Backend, Offer
from .group import Group
from .member import Seat
from .rendezvous import ActorRendezvous, Endpoint, Endpoints, Rendezvous
from .standing import label_of
from .timeouts import TIMEOUTS

log = logging.getLogger(__name__)

AUTO = "auto"
BACKENDS = ("shared", "gloo", "nccl")


def connect(
    name: str,
    rank: int,
    size: int,
    *,
    epoch: int = 0,
    backend: str = AUTO,
    timeout: float = TIMEOUTS.operation,
    rendezvous: Rendezvous | None = None,
) -> Group:
    """Join a group; returns when all its members have.

    Args:
        name: of the group.
        rank: this member, 0 to size - 1.
        size: how many members there are.
        epoch: counts up when members join or leave, or after a failure.
        backend: "auto", "shared", "gloo" or "nccl".
        timeout: seconds until all must have come; later, what an operation waits where nothing else is said.
        rendezvous: where the members meet; None: that of the running Ray.

    Raises:
        OperationTimeoutError: not all came in time; names who did not.
        PeerLostError: a member died or left meanwhile.
        ValueError: a wrong argument, another member's differs, or somebody came as this rank; or the members of a
            "shared" group cannot read each other's memory.
        ImportError: what the back end needs is not installed.

    >>> from tensorvine.actors.collective.rendezvous import LocalRendezvous
    >>> with connect("alone", 0, 1, backend="shared", rendezvous=LocalRendezvous()) as group:
    ...     group.barrier()
    ...     group.rank, group.size
    (0, 1)
    """
    where = label_of(name, epoch)
    if not 0 <= rank < size:
        raise ValueError(f"{where}: expected a rank from 0 to size - 1; found rank {rank} of {size}")
    if backend not in (AUTO, *BACKENDS):
        raise ValueError(f"{where}: backend: expected {AUTO}, {', '.join(BACKENDS)}; found {backend!r}")
    if not 0 < timeout < threading.TIMEOUT_MAX or epoch < 0:
        expected = "expected a time above 0 that ends, and an epoch from 0"
        raise ValueError(f"{where}: {expected}; found {timeout} s, epoch {epoch}")
    place = rendezvous if rendezvous is not None else ActorRendezvous(engine_for())
    return _Joining(Seat(name, epoch, rank, size), place, timeout).join(backend)


def renew(
    group: Group, rank: int, size: int, *, timeout: float | None = None, rendezvous: Rendezvous | None = None
) -> Group:
    """Leave a group and join its next epoch, in which others have joined or left.

    Args:
        group: the group as it is; it is closed.
        rank: this member in the next epoch.
        size: how many members that has.
        timeout: seconds; None: the group's.
        rendezvous: as in `connect`.

    Raises:
        As `connect` does.
    """
    group.close()
    return connect(
        group.name,
        rank,
        size,
        epoch=group.epoch + 1,
        backend=group.backend,
        timeout=group.timeout if timeout is None else timeout,
        rendezvous=rendezvous,
    )


class _Joining:
    """One member's way into a group."""

    def __init__(self, seat: Seat, place: Rendezvous, timeout: float) -> None:
        self._seat, self._label = seat, seat.label
        self._place = place
        self._timeout, self._deadline = timeout, Deadline.after(timeout)

    def join(self, wanted: str) -> Group:
        """Join; errors as in `connect`."""
        backend = backend_of("shared" if wanted == AUTO else wanted)
        offer = backend.offer()
        try:
            endpoints = self._met("", {"wanted": wanted, "endpoint": offer.endpoint})
            others = [rank for rank, endpoint in enumerate(endpoints) if endpoint["wanted"] != wanted]
            if others:
                found = f"{endpoints[others[0]]['wanted']!r} of rank {others[0]}"
                raise ValueError(f"{self._label}: expected back end {wanted!r} of all ranks; found {found}")
            theirs = [endpoint["endpoint"] for endpoint in endpoints]
            if wanted != AUTO or self._readable(offer, theirs):
                return self._connected(backend, offer, theirs)
        finally:
            offer.close()
        backend = backend_of("gloo")
        offer = backend.offer()
        try:
            return self._connected(backend, offer, self._met(": gloo", offer.endpoint))
        finally:
            offer.close()

    def _readable(self, offer: Offer, endpoints: Sequence[Endpoint]) -> bool:
        """Find out whether all can read each other's memory: each tries, and all hear of each one's trouble."""
        from .shared.crossmemory import Sealed, trouble

        own, all_of_them = cast("Sealed", offer.endpoint), cast("Sequence[Sealed]", endpoints)
        found = self._met(": agree", {"trouble": trouble(self._label, own, all_of_them)})
        troubles = [f"rank {rank}: {endpoint['trouble']}" for rank, endpoint in enumerate(found) if endpoint["trouble"]]
        if troubles and self._seat.rank == 0:
            log.warning("%s: Gloo carries it, not shared memory: %s", self._label, troubles[0])
        return not troubles

    def _met(self, what: str, endpoint: Endpoint) -> Endpoints:
        seat = self._seat
        return self._place.exchange(f"{self._label}{what}", seat.rank, seat.size, endpoint, self._left())

    def _connected(self, backend: Backend[Any, Any], offer: Offer, endpoints: Sequence[Endpoint]) -> Group:
        seat = self._seat
        group = backend.join(
            offer,
            seat.name,
            epoch=seat.epoch,
            rank=seat.rank,
            size=seat.size,
            endpoints=endpoints,
            timeout=self._left(),
        )
        group.timeout = self._timeout
        return group

    def _left(self) -> float:
        return max(self._deadline.left(), 1e-3)


def backend_of(name: str) -> Backend[Any, Any]:
    """Make the back end of a name.

    Raises:
        ImportError: what it needs is not installed.
    """
    if name == "shared":
        from .shared.backend import SharedBackend

        return SharedBackend()
    if name == "gloo":
        from .gloo.backend import GlooBackend

        return GlooBackend()
    from .nccl.backend import NcclBackend

    return NcclBackend()
