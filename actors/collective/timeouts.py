"""How long members of a group wait for each other, where no call says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of time, in seconds."""

    operation: float = 30.0
    """An operation, and a join, of which nothing else is said."""
    hello: float = 5.0
    """A connection that has not said by then who it is is none of ours."""
    grace: float = 1.0
    """How long the connections have to tell who is behind an error."""
    ask: float = 0.5
    """How long the others have to tell how far they are."""
    linger: float = 1.0
    """How long a peer that does not read keeps who leaves."""
    answer: float = 10.0
    """How much longer than a meeting its answer may take."""
    release: float = 1.0
    """How long who leaves waits for threads that a library does not let go."""
    look: float = 0.05
    """Who waits for a library's thread looks this often whether it can still end the operation."""


TIMEOUTS = Timeouts()
