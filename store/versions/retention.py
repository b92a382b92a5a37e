"""Retention: which versions of a name stay in memory when all of them are on disk.

Rules
- A policy is a pure question about the versions of one name: it names those to keep, and somebody else lets the
  others go. So it has no state, asks no clock, and the order of the versions that it is given does not matter.
- The newer of two versions is the one with the higher number: clocks may be set back, numbers only count up.
- A policy that raises, or gives no set of references, lets nothing go.
- Policies join with `|`: a version stays if any of them keeps it. A policy of one's own derives from `Retention`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from ..refs import ModelRef


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live version, as a policy sees it."""

    ref: ModelRef
    quality: float | None
    """Higher is better; None or NaN: unknown."""
    created_ns: int
    """UTC, nanoseconds since 1970."""
    nbytes: int
    """Bytes that this version wrote; inherited ones are not among them."""


class Retention(ABC):
    """A policy that selects which versions of a model stay in memory after they are on disk.

    Combine policies with `|`: a version stays if at least one of the policies keeps it. Subclasses implement `keep`.

    >>> versions = [Candidate(ModelRef("m", n), quality=1 / n, created_ns=n, nbytes=10) for n in range(1, 8)]
    >>> policy = KeepLast(2) | KeepBest(1) | KeepEvery(3)
    >>> sorted(ref.version for ref in policy.keep(versions))
    [1, 3, 6, 7]
    """

    # An empty one in each base, so that the policies have no dictionary either.
    __slots__ = ()

    @abstractmethod
    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Return the references of the versions to keep in memory.

        Args:
            versions: Live versions of one model, in any order. Versions that an earlier call did not keep are left out.
        """

    def __or__(self, other: Retention) -> Retention:
        """Return a policy that keeps each version that at least one of the two policies keeps."""
        if not isinstance(other, Retention):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return KeepAny((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class KeepAny(Retention):
    """Keep the versions that at least one of several policies keeps; what `|` gives."""

    policies: tuple[Retention, ...]

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Ask all of them."""
        return set[ModelRef]().union(*(policy.keep(versions) for policy in self.policies))


@dataclass(frozen=True, slots=True)
class KeepLast(Retention):
    """A policy that keeps the `n` newest versions.

    Args:
        n: Number of versions to keep, at least 1.

    Raises:
        ValueError: if `n` is not an integer of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        _check(self, "n", self.n, 1)

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Return the references of the `n` versions with the highest version numbers."""
        return {version.ref for version in _newest_first(versions)[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepBest(Retention):
    """A policy that keeps the `n` versions with the highest quality.

    If qualities are equal, the newer version is preferred. Versions whose quality is None or NaN are not kept.

    Args:
        n: Number of versions to keep, at least 1.

    Raises:
        ValueError: if `n` is not an integer of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        _check(self, "n", self.n, 1)

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Return the references of the `n` versions with the highest quality."""
        known = ((v.quality, v.ref) for v in versions if v.quality is not None and not math.isnan(v.quality))
        return {ref for _, ref in sorted(known, reverse=True)[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepEvery(Retention):
    """A policy that keeps the versions whose version number is divisible by `n`.

    Args:
        n: Divisor of the version numbers, at least 1.

    Raises:
        ValueError: if `n` is not an integer of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        _check(self, "n", self.n, 1)

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Return the references of the versions whose version number is divisible by `n`."""
        return {version.ref for version in versions if version.ref.version % self.n == 0}


@dataclass(frozen=True, slots=True)
class KeepBytes(Retention):
    """A policy that keeps the newest versions up to a limit on the total size.

    The size of a version is the size of its own tensors, without inherited tensors. The newest version is always kept.

    Args:
        nbytes: Limit in bytes, at least 0.

    Raises:
        ValueError: if `nbytes` is not an integer of at least 0.
    """

    nbytes: int

    def __post_init__(self) -> None:
        _check(self, "nbytes", self.nbytes, 0)

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        """Return the references of the newest versions whose total size is at most `nbytes`.

        The newest version is always included, even if it is larger than `nbytes`.
        """
        kept: set[ModelRef] = set()
        total = 0
        for version in _newest_first(versions):
            total += version.nbytes
            if kept and total > self.nbytes:
                break
            kept.add(version.ref)
        return kept


def kept_by(policy: Retention, versions: Sequence[Candidate]) -> Set[ModelRef]:
    """Ask a policy, which may be of the user's own, and look at what it gives.

    Raises:
        TypeError: it is no set of references: taken at its word, all versions would go.
    """
    kept = cast("object", policy.keep(versions))
    if isinstance(kept, Set) and all(isinstance(ref, ModelRef) for ref in cast("Set[object]", kept)):
        return cast("Set[ModelRef]", kept)
    raise TypeError(f"{type(policy).__name__}.keep: expected a set of ModelRef; found {kept!r:.200}")


def _parts(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def _newest_first(versions: Sequence[Candidate]) -> list[Candidate]:
    return sorted(versions, key=attrgetter("ref"), reverse=True)


def _check(policy: Retention, field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{type(policy).__name__}: {field}: expected an integer of at least {least}; found {value!r}")
