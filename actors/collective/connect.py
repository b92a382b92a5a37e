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
    """Join a collective group, and return a `Group` when all members have joined.

    Args:
        name: Name of the group.
        rank: Number of this member, 0 to size - 1.
        size: Number of members.
        epoch: Epoch of the group: a number of at least 0, equal on all members. Increase it to form the group again,
            with different members or after a failure.
        backend: `"shared"` (within one machine, from memory to memory), `"gloo"` (TCP, needs PyTorch) or `"nccl"`
            (between GPUs, needs CuPy). `"auto"` uses shared memory if all members can read each other's memory, and
            otherwise Gloo.
        timeout: Seconds to wait for all members. This value is also the default timeout of the group's operations.
        rendezvous: Meeting point where the members exchange addresses. None means the meeting point of the running
            engine.

    Raises:
        OperationTimeoutError: if not all members join in time. The message names the missing ranks.
        PeerLostError: if a member dies or leaves during the call.
        ValueError: if an argument is invalid, if `size` or `backend` differs between members, if another member has
            the same rank, or if the members of a `"shared"` group cannot read each other's memory.
        ImportError: if a package that the back end needs is not installed.

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
        expected = "expected a finite timeout above 0 and an epoch of at least 0"
        raise ValueError(f"{where}: {expected}; found {timeout} s, epoch {epoch}")
    place = rendezvous if rendezvous is not None else ActorRendezvous(engine_for())
    return _Joining(Seat(name, epoch, rank, size), place, timeout).join(backend)


def renew(
    group: Group, rank: int, size: int, *, timeout: float | None = None, rendezvous: Rendezvous | None = None
) -> Group:
    """Leave a group, join its next epoch, and return the new `Group`. The new group can have different members.

    Args:
        group: The current group. The call closes this group.
        rank: Number of this member in the next epoch.
        size: Number of members in the next epoch.
        timeout: Seconds to wait for all members, as in `connect`. None means the group's timeout.
        rendezvous: Meeting point where the members exchange addresses, as in `connect`.

    Raises:
        OperationTimeoutError, PeerLostError, ValueError, ImportError: as in `connect`.
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
                found = f"{endpoints[others[0]]['wanted']!r} on rank {others[0]}"
                raise ValueError(f"{self._label}: expected back end {wanted!r} on all ranks; found {found}")
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
            log.warning("%s: using Gloo instead of shared memory: %s", self._label, troubles[0])
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
