"""The difference between two versions: `Repository.diff`.

Rules
- Shards compare; a caller gets numbers. Tensors that share their bytes are equal without a look at these.
- Both versions are pinned meanwhile, so neither a retirement nor a clean-up takes a tensor away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...store.errors import ModelLostError, MovedError, OptionError, ShardUnavailableError
from ...store.patches.comparing import TensorDiff
from ...store.refs import ModelRef
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import TensorEntry
from ...store.waiting import Backoff, Deadline
from ..rpc.redis_keys import Address
from ..shard.calls import ShardCalls
from ..shard.calls.patches import Pair
from .catalog import Catalog
from .fetch.transports import AUTO
from .pinned import Pinned
from .reader import AGAIN_S, Reader
from .session import Session

MOST_BINS = 10_000
OTHER = TensorDiff(share=1.0, norm=math.nan)
"""Of tensors with another dtype or shape."""
Table = Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The difference between two versions, returned by `Repository.diff`."""

    a: ModelRef
    """The first version."""
    b: ModelRef
    """The second version."""
    equal: tuple[str, ...]
    """Names of the tensors that are the same in both versions, bit by bit."""
    changed: Mapping[str, TensorDiff]
    """Mapping of the names of tensors that differ to the differences, `b` minus `a`."""
    new: tuple[str, ...]
    """Names of the tensors that only `b` has."""
    gone: tuple[str, ...]
    """Names of the tensors that only `a` has."""


class Differ:
    """Compares versions for one client."""

    def __init__(self, session: Session, catalog: Catalog, reader: Reader) -> None:
        self._session = session
        self._catalog = catalog
        self._reader = reader

    def diff(self, a: ModelRef, b: ModelRef, bins: int | None, timeout: float) -> Diff:
        """Compare two versions; see `Repository.diff`."""
        if bins is not None and (type(bins) is not int or not 1 <= bins <= MOST_BINS):
            raise OptionError(f"diff: histogram: expected a number of bins from 1 to {MOST_BINS}; found {bins!r}")
        deadline = Deadline.after(timeout)
        with Pinned(self._session, a), Pinned(self._session, b):
            before, after = self._catalog.table(a, None), self._catalog.table(b, None)
            found = {name: OTHER for name in before.keys() & after.keys() if _differ(before[name], after[name])}
            found |= self._compared((a, b), _pairs(before, after), bins or 0, deadline)
        changed = {name: found[name] for name in after if name in found and found[name].share > 0}
        return Diff(
            a=a,
            b=b,
            equal=tuple(name for name in after if name in before and name not in changed),
            changed=changed,
            new=tuple(name for name in after if name not in before),
            gone=tuple(name for name in before if name not in after),
        )

    def _compared(
        self, refs: Sequence[ModelRef], pairs: Mapping[str, Pair], bins: int, deadline: Deadline
    ) -> dict[str, TensorDiff]:
        """Compare the tensors that have equal dtypes and shapes, but do not share their bytes."""
        pauses = Backoff(*AGAIN_S)
        while True:
            where = self._where(refs, deadline)
            if missing := {slot[0] for pair in pairs.values() for slot in (pair.tensor, pair.base)} - where.keys():
                raise ModelLostError(f"diff: expected the places of all segments; found none of {sorted(missing)}")
            try:
                return self._asked(pairs, where, bins, deadline)
            except (ModelLostError, MovedError):  # they are elsewhere by now
                if not pauses.wait(deadline):
                    raise

    def _where(self, refs: Sequence[ModelRef], deadline: Deadline) -> dict[SegmentId, int]:
        """Return which shard answers for each segment of some versions."""
        found = [self._reader.located(ref, AUTO, deadline).places for ref in refs]
        return {segment: place[0] for places in found for segment, place in places.items()}

    def _asked(
        self, pairs: Mapping[str, Pair], where: Mapping[SegmentId, int], bins: int, deadline: Deadline
    ) -> dict[str, TensorDiff]:
        shards: dict[int, dict[str, Pair]] = {}
        for name, pair in pairs.items():
            shards.setdefault(where[pair.tensor[0]], {})[name] = pair
        left = deadline.left_for("diff")
        requests = {
            shard: ShardCalls.compare(list(part.values()), self._elsewhere(shard, part, where, deadline), bins, left)
            for shard, part in shards.items()
        }
        answers = self._session.call_each(requests, left)
        return {
            name: found
            for part, answer in zip(shards.values(), answers, strict=True)
            for name, found in zip(part, answer, strict=True)
        }

    def _elsewhere(
        self, shard: int, part: Mapping[str, Pair], where: Mapping[SegmentId, int], deadline: Deadline
    ) -> dict[SegmentId, Address]:
        """Return where a shard reads bases that other shards hold."""
        segments = {pair.base[0] for pair in part.values()}
        holders = {segment: where[segment] for segment in segments}
        return {segment: self._address(other, deadline) for segment, other in holders.items() if other != shard}

    def _address(self, shard: int, deadline: Deadline) -> Address:
        address = self._session.connection(shard, deadline).hello.tcp_address
        if address is None:
            raise ShardUnavailableError(f"diff: expected a TCP server in shard {shard}; found none")
        return address


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    return (one.dtype, one.shape) != (other.dtype, other.shape)


def _pairs(before: Table, after: Table) -> dict[str, Pair]:
    both = ((name, before[name], entry) for name, entry in after.items() if name in before)
    return {
        name: Pair((new.segment, new.slot), (old.segment, old.slot), new.dtype, new.shape)
        for name, old, new in both
        if not _differ(old, new) and (old.segment, old.slot) != (new.segment, new.slot)
    }
