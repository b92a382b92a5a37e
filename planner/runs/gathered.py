"""What a `Gathering` is asked, and what it decides.

Rules
- Values only: a question, a place in a group, and one class for each thing that whoever drives the gathering has to do.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """A member's question."""

    number: int
    """Tells it from all others."""
    member: str
    places: Hashable
    """What is asked for."""
    holds: frozenset[int] = frozenset()
    """Epochs to which the member is connected."""
    alone: bool = False
    """It has no time to wait for others, or failed with them."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place in an epoch's group; rank 0 is the shard."""

    epoch: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Alone:
    """Serve a member by itself."""

    ask: Ask
    invited: Seat | None
    """Tell it to join this; nobody is told twice."""


@dataclass(frozen=True, slots=True)
class Together:
    """Serve all members of an epoch by a broadcast."""

    epoch: int
    asks: tuple[Ask, ...]
    invited: tuple[Seat | None, ...]
    """What to tell each of them to join, as in `Alone`."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Begin to connect an epoch's group: the members are being invited."""

    epoch: int
    members: tuple[str, ...]
    """By rank, from 1 on."""


@dataclass(frozen=True, slots=True)
class End:
    """Close an epoch's group, or give up connecting it."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Answer a question no more: its member left, or has asked anew."""

    ask: Ask


Step = Alone | Together | Connect | End | Drop
