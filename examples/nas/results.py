"""What a search came to, from its journal alone: qualities over time, who descends from whom, time and space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .evolution import Asked
from .journal import Told
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Results:
    """A search that has ended."""

    plan: Plan
    told: Sequence[Told]
    """What became of each candidate, in order."""
    deaths: int = 0
    """Workers that died."""

    @property
    def seconds(self) -> float:
        """From the first candidate to the last."""
        return self.told[-1].at if self.told else 0.0

    @property
    def failed(self) -> int:
        """Candidates that failed."""
        return sum(one.outcome.quality is None for one in self.told)

    @property
    def frozen(self) -> float:
        """Mean share of the tensors that a candidate took over, of those that were evaluated in the second half."""
        shares = [one.outcome.taken / one.outcome.tensors for one in self.later if one.outcome.tensors]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def later(self) -> Sequence[Told]:
        """The candidates of the second half."""
        return self.told[len(self.told) // 2 :]

    @property
    def share(self) -> float:
        """Share of the workers' time that went into the repository or the files."""
        stored = sum(one.outcome.stored_s for one in self.told)
        return stored / max(sum(one.outcome.ended - one.outcome.began for one in self.told), 1e-9)

    @property
    def bytes_written(self) -> int:
        """Bytes of all that was saved: what would be stored if nothing had been retired."""
        return sum(one.outcome.bytes_written for one in self.told)

    @property
    def bytes_most(self) -> int:
        """The most that was stored at any time."""
        return max((one.space_bytes for one in self.told), default=0)

    def climb(self) -> tuple[list[float], list[float]]:
        """Return when the best quality rose, in seconds, and to what."""
        at: list[float] = []
        best: list[float] = []
        for one in self.told:
            quality = one.outcome.quality
            if quality is not None and (not best or quality > best[-1]):
                at.append(one.at)
                best.append(quality)
        return at, best

    def time_to(self, target: float) -> float | None:
        """Return when a candidate first reached a quality, in seconds; None: none did."""
        return next((at for at, quality in zip(*self.climb(), strict=True) if quality >= target), None)

    def best(self, count: int) -> list[Told]:
        """Return the best candidates, the best first; of equals, the one found earlier."""
        done = [one for one in self.told if one.outcome.quality is not None]
        return sorted(done, key=lambda one: (-(one.outcome.quality or 0.0), one.at))[:count]

    def lineage(self, told: Told) -> list[Told]:
        """Return a candidate, whom it inherited from, and so on; other searches' candidates are not known here."""
        known = {one.outcome.ref: one for one in self.told if one.outcome.ref is not None}
        chain = [told]
        while (parent := known.get(chain[-1].outcome.ancestor or "")) is not None:
            chain.append(parent)
        return chain


def results_of(plan: Plan, events: Sequence[Asked | Told], deaths: int = 0) -> Results:
    """Return the results of what a journal holds."""
    return Results(plan, [event for event in events if isinstance(event, Told)], deaths)
