"""How members on one machine become a group: each must be able to read the others' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from ..backend import Backend, Endpoint, Offer
from ..links import Link
from ..listener import Listener
from ..member import Seat
from .crossmemory import Seal, Sealed, trouble
from .member import SharedGroup


class SharedOffer(Offer):
    """What a member has opened, and the seal of its memory."""

    def __init__(self) -> None:
        self.seal = Seal()
        super().__init__(Listener(), self.seal.endpoint)


class SharedBackend(Backend[SharedOffer, SharedGroup]):
    """Makes groups within this machine."""

    name: ClassVar[str] = "shared"

    def offer(self) -> SharedOffer:
        """Open what the others connect to; see `Backend`."""
        return SharedOffer()

    def _check(self, seat: Seat, offer: SharedOffer, endpoints: Sequence[Endpoint]) -> None:
        found = trouble(seat.label, cast("Sealed", offer.endpoint), cast("Sequence[Sealed]", endpoints))
        if found is not None:
            raise ValueError(f"{seat.label}: expected members that can read each other's memory; {found}")

    def _member(
        self, seat: Seat, timeout: float, links: Mapping[int, Link], offer: SharedOffer, endpoints: Sequence[Endpoint]
    ) -> SharedGroup:
        return SharedGroup(seat, timeout, links, offer.seal, endpoints)
