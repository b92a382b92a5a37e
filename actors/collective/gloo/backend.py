"""How members become a group over Gloo: one `ProcessGroupGloo` per (name, epoch), so that groups may overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ....store.waiting import Deadline
from ..backend import Backend, Endpoint, Offer
from ..links import Link
from ..listener import Listener, address
from ..member import Seat
from . import library as gloo_library
from .member import GlooGroup


class GlooOffer(Offer):
    """What a member has opened.

    Args:
        host: address of this machine.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(Listener(host), {})


class GlooBackend(Backend[GlooOffer, GlooGroup]):
    """Makes groups over Gloo.

    Args:
        host: address of this machine, as the others reach it; None: that of its default route.
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, host: str | None = None) -> None:
        self._host = host

    def offer(self) -> GlooOffer:
        """Open what the others connect to; see `Backend`."""
        gloo_library.load()
        return GlooOffer(self._host or address())

    def _member(
        self, seat: Seat, timeout: float, links: Mapping[int, Link], offer: GlooOffer, endpoints: Sequence[Endpoint]
    ) -> GlooGroup:
        return GlooGroup(seat, timeout, links)

    def _attach(self, group: GlooGroup, offer: GlooOffer, endpoints: Sequence[Endpoint], deadline: Deadline) -> None:
        group.attach(offer.host, deadline)
