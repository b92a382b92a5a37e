"""How members become a group over NCCL: each has a GPU of its own, the one that is current in its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..backend import Backend, Endpoint, Offer
from ..links import Link
from ..listener import Listener, address
from ..member import Seat
from .cuda import Cuda
from .device import Device
from .member import NcclGroup


class NcclBackend(Backend[Offer, NcclGroup]):
    """Makes groups over NCCL.

    Args:
        host: address of this machine, as the others reach it; None: that of its default route.
        cuda: the device's calls; None: CuPy's.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL.
        RuntimeError: there is no GPU.
    """

    name: ClassVar[str] = "nccl"

    def __init__(self, host: str | None = None, cuda: Device | None = None) -> None:
        self._host = host
        self._cuda: Device = cuda if cuda is not None else Cuda()

    def offer(self) -> Offer:
        """Open what the others connect to; see `Backend`."""
        return Offer(Listener(self._host or address()), {"device": self._cuda.identity()})

    def _check(self, seat: Seat, offer: Offer, endpoints: Sequence[Endpoint]) -> None:
        """Refuse two ranks on one GPU, on which NCCL would fail or wait for ever."""
        first: dict[str, int] = {}
        for rank, endpoint in enumerate(endpoints):
            device = str(endpoint["device"])
            if device in first:
                found = f"ranks {first[device]} and {rank} on the same one ({device})"
                raise ValueError(f"{seat.label}: expected a GPU for each rank; found {found}")
            first[device] = rank

    def _member(
        self, seat: Seat, timeout: float, links: Mapping[int, Link], offer: Offer, endpoints: Sequence[Endpoint]
    ) -> NcclGroup:
        return NcclGroup(seat, timeout, links, self._cuda)
