"""How a back end makes groups: what a member opens, and how members that have each other's endpoints become a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from ...store.waiting import Deadline
from .group import Group
from .links import Link
from .listener import Listener
from .member import Member, Seat
from .rendezvous import Endpoint


class Offer:
    """What a member has opened for the others.

    Args:
        listener: by which it is reached.
        facts: what else the others are to know.
    """

    def __init__(self, listener: Listener, facts: Endpoint) -> None:
        self.listener = listener
        self.endpoint: dict[str, Any] = {"listener": listener.endpoint, **facts}

    def close(self) -> None:
        """Close what no group has taken over; a second call does nothing."""
        self.listener.close()


OfferT = TypeVar("OfferT", bound=Offer)
MemberT = TypeVar("MemberT", bound=Member[Any])


class Backend(ABC, Generic[OfferT, MemberT]):
    """Makes groups whose bytes it carries."""

    name: ClassVar[str]

    @abstractmethod
    def offer(self) -> OfferT:
        """Open what the others connect to.

        Raises:
            ImportError: what the back end needs is not installed.
            OSError: this system has no such sockets, or the host is no address of this machine.
        """

    def join(
        self,
        offer: OfferT,
        name: str,
        *,
        epoch: int,
        rank: int,
        size: int,
        endpoints: Sequence[Endpoint],
        timeout: float,
    ) -> Group:
        """Connect to all others.

        Args:
            offer: this member's; it is closed.
            name: of the group.
            epoch: of the group.
            rank: this member.
            size: how many there are.
            endpoints: all members', by rank.
            timeout: seconds for this, and later the group's.

        Raises:
            OperationTimeoutError: some did not come in time.
            PeerLostError: one died meanwhile.
            ValueError: these members cannot be a group of this back end; says why.
        """
        seat, deadline = Seat(name, epoch, rank, size), Deadline.after(timeout)
        try:
            self._check(seat, offer, endpoints)
            links = offer.listener.meet(seat.label, rank, [endpoint["listener"] for endpoint in endpoints], deadline)
            group = self._member(seat, timeout, links, offer, endpoints)
            try:
                group.start()
                self._attach(group, offer, endpoints, deadline)
                group.barrier(timeout=max(deadline.left(), 1e-3))  # who returns knows that all do, or fail
            except BaseException:
                group.close()
                raise
        finally:
            offer.close()
        return group

    def _check(self, seat: Seat, offer: OfferT, endpoints: Sequence[Endpoint]) -> None:
        """Refuse members that cannot be a group, with a ValueError."""

    @abstractmethod
    def _member(
        self, seat: Seat, timeout: float, links: Mapping[int, Link], offer: OfferT, endpoints: Sequence[Endpoint]
    ) -> MemberT:
        """Make this member's end of the group."""

    def _attach(self, group: MemberT, offer: OfferT, endpoints: Sequence[Endpoint], deadline: Deadline) -> None:
        """Have a library connect the members, too."""
