"""Carrying what is not mapped: which way each shard's blocks take, and what is here already.

Rules
- `"auto"` takes the way that is predicted to be the fastest, of those that can be used; what each took is measured.
- A way that cannot be used just now is left for the next one, with one line in the log; one that the caller named is
  not: then the error is the caller's.
- A segment of which somebody here still uses an array is not carried again: an update brings what it changed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....planner.schedules.transfer import TransferSelector
from ....store.errors import ShardUnavailableError
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import TensorEntry, slots_of
from ....store.waiting import Deadline
from ...transport.frames import Received, Slots
from ...transport.wire import check_content
from .ways import AUTO, Way

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a load is to be done."""

    what: str
    """Names it in errors."""
    transport: str
    """A way's name, or `"auto"`."""
    verify: bool
    """What travels is held against content hashes."""
    deadline: Deadline
    """Of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class _Here:
    """A segment that was carried, as long as an array on it lives."""

    block: weakref.ref[np.ndarray]
    offsets: Mapping[int, int]
    checked: bool
    """Against content hashes."""


class Carrier:
    """Carries blocks for one client.

    Args:
        ways: the preferred one first.
        where: segment -> the shard that holds it.
    """

    def __init__(self, ways: Sequence[Way], where: Callable[[SegmentId], int]) -> None:
        self._where = where
        self._ways = {way.name: way for way in ways}
        self._selector = TransferSelector()
        self._here: dict[SegmentId, _Here] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the ways."""
        return list(self._ways)

    @property
    def automatic(self) -> list[str]:
        """Names of those that `"auto"` may take."""
        return [way.name for way in self._ways.values() if way.automatic]

    def carried(
        self, entries: Mapping[str, TensorEntry], wish: Wish
    ) -> tuple[dict[SegmentId, Received], dict[str, int]]:
        """Bring tensors.

        Args:
            entries: name -> where it is.
            wish: how.

        Returns:
            What has them, and way -> bytes of those that came by it.

        Raises:
            ShardUnavailableError: no way can be used.
            CorruptDataError: what came is not what the shard has.
            TensorVineError: see `ways.Way.blocks`.
        """
        slots = slots_of(entries.values())
        found = {segment: part for segment in slots if (part := self._known(segment, slots[segment], wish)) is not None}
        by_shard: dict[int, dict[str, TensorEntry]] = {}
        for name, entry in entries.items():
            if entry.segment not in found:
                by_shard.setdefault(self._where(entry.segment), {})[name] = entry
        moved: dict[str, int] = {}
        for shard, missing in by_shard.items():
            nbytes = sum(entry.nbytes for entry in missing.values())
            way, more = self._bring(shard, slots_of(missing.values()), nbytes, wish)
            if wish.verify and not way.checks:
                tensors = ((name, e.segment, e.slot, e.nbytes) for name, e in missing.items())
                check_content(tensors, more, f"{wish.what}: way {way.name!r}")
            found.update(more)
            if way.exact:
                self._note(more, wish.verify or way.checks)
            moved[way.name] = moved.get(way.name, 0) + nbytes
        return found, moved

    def close(self) -> None:
        """Let go of what the ways keep open."""
        for way in self._ways.values():
            way.close()

    def _bring(self, shard: int, places: Slots, nbytes: int, wish: Wish) -> tuple[Way, dict[SegmentId, Received]]:
        names = self._usable(shard, wish)
        while True:
            with self._lock:
                name = self._selector.choose(names, nbytes)
            way, began = self._ways[name], time.monotonic()
            try:
                found = way.blocks(shard, places, wish.verify, wish.deadline, wish.what)
            except ShardUnavailableError as exc:
                names.remove(name)
                with self._lock:
                    self._selector.failed(name)
                if not names:
                    raise
                log.warning("%s: way %r to shard %d failed, %s comes next: %s", wish.what, name, shard, names, str(exc))
                continue
            with self._lock:
                self._selector.measured(name, nbytes, time.monotonic() - began)
            return way, found

    def _usable(self, shard: int, wish: Wish) -> list[str]:
        named = [self._ways[wish.transport]] if wish.transport in self._ways else []
        ways = [way for way in self._ways.values() if way.automatic] if wish.transport == AUTO else named
        names = [way.name for way in ways if way.brings(shard, wish.deadline)]
        if not names:
            raise ShardUnavailableError(
                f"{wish.what}: expected a way to shard {shard} by transport={wish.transport!r}; from here there is none"
            )
        return names

    def _known(self, segment: SegmentId, slots: Sequence[int], wish: Wish) -> Received | None:
        """Return a segment that is here already, with these slots, and checked if that is wished."""
        named = self._ways.get(wish.transport)
        if wish.transport != AUTO and (named is None or not named.exact):
            return None  # what is here may have other values than it gives
        here = self._here.get(segment)
        block = here.block() if here is not None else None
        if here is None or block is None or (wish.verify and not here.checked):
            return None
        return Received(here.offsets, block) if here.offsets.keys() >= set(slots) else None

    def _note(self, received: Mapping[SegmentId, Received], checked: bool) -> None:
        for segment, part in received.items():
            here = _Here(weakref.ref(part.block), part.offsets, checked)
            self._here[segment] = here
            weakref.finalize(part.block, self._drop, segment, here).atexit = False

    def _drop(self, segment: SegmentId, here: _Here) -> None:
        if self._here.get(segment) is here:
            self._here.pop(segment, None)
