"""Carrying what is not mapped: which transport each shard's blocks take, and what is here already.

Rules
- `"auto"` takes the transport that is predicted to be the fastest, of those that can be used; what each took is
  measured.
- A transport that cannot be used just now is left for the next one, with one line in the log; one that the caller named
  is not: then the error is the caller's.
- A segment of which somebody here still uses an array is not carried again: an update brings what it changed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....planner.schedules.transfer import TransferSelector
from ....store.counting import Counts
from ....store.errors import ShardUnavailableError
from ....store.metrics import FALLBACKS
from ....store.segments.segment import SegmentId
from ....store.versions.manifest import TensorEntry, sizes_of, slots_of
from ....store.waiting import Deadline
from ...transport.frames import Asked, Received
from ...transport.tcp import check_content
from ..traffic import Meter
from .transports import AUTO, Transport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a load is to be done."""

    what: str
    """Names it in errors."""
    transport: str
    """A transport's name, or `"auto"`."""
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


class Fetcher:
    """Carries blocks for one client.

    Args:
        transports: the preferred one first.
        counts: the client's.
        meter: counts the tensors that move.
    """

    def __init__(self, transports: Sequence[Transport], counts: Counts, meter: Meter) -> None:
        self._counts = counts
        self._meter = meter
        self._transports = {transport.name: transport for transport in transports}
        self._selector = TransferSelector()
        self._here: dict[SegmentId, _Here] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the transports."""
        return list(self._transports)

    @property
    def automatic(self) -> list[str]:
        """Names of those that `"auto"` may take."""
        return [transport.name for transport in self._transports.values() if transport.automatic]

    def carried(
        self, entries: Mapping[str, TensorEntry], where: Mapping[SegmentId, int], wish: Wish
    ) -> tuple[dict[SegmentId, Received], dict[str, int]]:
        """Bring tensors.

        Args:
            entries: name -> what.
            where: segment -> the shard that has it.
            wish: how.

        Returns:
            What has them, and transport -> bytes of those that came by it.

        Raises:
            ShardUnavailableError: no transport can be used.
            CorruptDataError: what came is not what the shard has.
            TensorVineError: see `transports.Transport.blocks`.
        """
        slots = slots_of(entries.values())
        found = {segment: part for segment in slots if (part := self._known(segment, slots[segment], wish)) is not None}
        by_shard: dict[int, dict[str, TensorEntry]] = {}
        for name, entry in entries.items():
            if entry.segment not in found:
                by_shard.setdefault(where[entry.segment], {})[name] = entry
        moved: dict[str, int] = {}
        for shard, missing in by_shard.items():
            nbytes = sum(entry.nbytes for entry in missing.values())
            transport, more = self._bring(shard, sizes_of(missing.values()), nbytes, wish)
            if wish.verify and not transport.checks:
                tensors = ((name, e.segment, e.slot, e.nbytes) for name, e in missing.items())
                check_content(tensors, more, f"{wish.what}: transport {transport.name!r} from shard {shard}")
            found.update(more)
            if transport.exact:
                self._note(more, wish.verify or transport.checks)
            moved[transport.name] = moved.get(transport.name, 0) + nbytes
            self._meter.moved(transport.name, nbytes, len(missing))
        return found, moved

    def close(self) -> None:
        """Let go of what the transports keep open."""
        for transport in self._transports.values():
            transport.close()

    def _bring(self, shard: int, places: Asked, nbytes: int, wish: Wish) -> tuple[Transport, dict[SegmentId, Received]]:
        names = self._usable(shard, wish)
        while True:
            with self._lock:
                name = self._selector.choose(names, nbytes)
            transport, began = self._transports[name], time.monotonic()
            try:
                found = transport.blocks(shard, places, wish.verify, wish.deadline, wish.what)
            except ShardUnavailableError as exc:
                names.remove(name)
                with self._lock:
                    self._selector.failed(name)
                if not names:
                    raise
                self._counts.add(FALLBACKS, 1.0, name)
                log.warning(
                    "%s: transport %r to shard %d failed, trying %s next: %s", wish.what, name, shard, names, str(exc)
                )
                continue
            with self._lock:
                self._selector.measured(name, nbytes, time.monotonic() - began)
            return transport, found

    def _usable(self, shard: int, wish: Wish) -> list[str]:
        named = [self._transports[wish.transport]] if wish.transport in self._transports else []
        transports = (
            [transport for transport in self._transports.values() if transport.automatic]
            if wish.transport == AUTO
            else named
        )
        names = [transport.name for transport in transports if transport.brings(shard, wish.deadline)]
        if not names:
            raise ShardUnavailableError(
                f"{wish.what}: expected transport {wish.transport!r} to reach shard {shard}; this process cannot use it"
            )
        return names

    def _known(self, segment: SegmentId, slots: Sequence[int], wish: Wish) -> Received | None:
        """Return a segment that is here already, with these slots, and checked if that is wished."""
        named = self._transports.get(wish.transport)
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
