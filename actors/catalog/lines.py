"""The shards, as the catalog knows them: what they reported, and the orders that they have not acknowledged.

Rules
- A line is to one incarnation of a shard, which has reported to this term. Its orders are numbered from 1.
- Each line has a thread, which sends orders in sequence and repeats them until they are acknowledged: a silent shard
  holds up no other.
- Fields are guarded by the catalog's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...store.catalog.orders import Order
from ...store.catalog.reports import Report, Whole
from ...store.errors import OperationTimeoutError, ShardUnavailableError, TensorVineError
from ...store.segments.segment import SegmentId
from ..rpc.catalog_messages import Located, Term
from ..rpc.shard_channels import ShardChannels
from ..rpc.ticker import Ticker
from ..shard.calls import ShardCalls

log = logging.getLogger(__name__)

SEND_S = 10.0
"""How long a shard may take to acknowledge orders before they are sent again."""
AGAIN_S, IDLE_S = 0.25, 60.0
"""The pause before orders are sent again, and between two looks for some."""
AT_ONCE = 256
"""Orders in one message."""
SILENT_S = 5.0
"""A shard that has not asked for the term for so long is silent: its process may have ended."""


@dataclass(slots=True, eq=False)
class Line:
    """One incarnation of a shard."""

    shard: int
    incarnation: int
    node: str
    address: tuple[str, int, str] | None
    capacity: int
    allocated: int
    reported: int = 0
    """Serial number of its last report that was applied."""
    clients: set[str] = field(default_factory=set[str])
    """Clients that had sessions there when it reported."""
    watched: set[str] = field(default_factory=set[str])
    """Names whose new versions are pushed there."""
    failing: Mapping[SegmentId, str] = field(default_factory=dict[SegmentId, str])
    strangers: dict[SegmentId, tuple[int, ...]] = field(default_factory=dict[SegmentId, "tuple[int, ...]"])
    """Segments that it reported and nothing refers to: to be freed when all shards have reported."""
    orders: deque[Order] = field(default_factory=deque[Order])
    """Not acknowledged."""
    first: int = 1
    """Serial number of the first of them."""
    sender: Ticker | None = None
    heard: float = field(default_factory=time.monotonic)
    """When it last asked for the term."""

    @property
    def is_silent(self) -> bool:
        """Whether its process may have ended."""
        return time.monotonic() - self.heard > SILENT_S

    def report_is_new(self, report: Report) -> bool:
        """Tell whether a report is the next one of this line; an earlier one was applied already.

        Raises:
            ShardUnavailableError: it is of another incarnation, or one before it is missing.
        """
        if report.incarnation != self.incarnation:
            raise ShardUnavailableError(
                f"shard {self.shard}: expected incarnation {self.incarnation}; found {report.incarnation}"
            )
        if report.serial > self.reported + 1:
            raise ShardUnavailableError(
                f"shard {self.shard}: expected report {self.reported + 1}; found {report.serial}"
            )
        return report.serial == self.reported + 1


class Lines:
    """The lines to all shards that have reported to this term.

    Args:
        channels: to the shards.
        term: this one.
        lock: the catalog's.
        acknowledged: called, without the lock, when a shard has acknowledged orders.
    """

    def __init__(
        self, channels: ShardChannels, term: Term, lock: threading.RLock, acknowledged: Callable[[int], None]
    ) -> None:
        self._channels = channels
        self._term = term
        self._lock = lock
        self._acknowledged = acknowledged
        self._lines: dict[int, Line] = {}
        self._watchers: dict[str, set[int]] = {}

    def __contains__(self, shard: int) -> bool:
        return shard in self._lines

    def get(self, shard: int) -> Line | None:
        """Return the line to a shard; None: it has not reported to this term."""
        return self._lines.get(shard)

    def all(self) -> Iterable[Line]:
        """Iterate over the lines."""
        return list(self._lines.values())

    @property
    def nodes(self) -> dict[int, str]:
        """Shard -> its node."""
        return {shard: line.node for shard, line in self._lines.items()}

    def open(self, report: Report, whole: Whole) -> Line:
        """Make the line to an incarnation that reports for the first time; end that to an earlier one.

        Call it with the lock held.
        """
        self.close(report.shard)
        line = Line(
            shard=report.shard,
            incarnation=report.incarnation,
            node=whole.node,
            address=whole.address,
            capacity=whole.capacity,
            allocated=whole.allocated,
            clients=set(whole.clients),
        )
        line.sender = Ticker(
            f"orders-{report.shard}", "catalog", lambda: AGAIN_S if line.orders else IDLE_S, lambda: self._send(line)
        )
        self._lines[report.shard] = line
        return line

    def close(self, shard: int) -> None:
        """End the line to a shard. Call it with the lock held."""
        line = self._lines.pop(shard, None)
        if line is not None:
            for name in line.watched:
                self._watchers.get(name, set[int]()).discard(shard)
            if line.sender is not None:
                line.sender.end()

    def order(self, shard: int, *orders: Order) -> bool:
        """Order something; False: the shard has not reported, and is told nothing. Call it with the lock held."""
        line = self._lines.get(shard)
        if line is None:
            return False
        line.orders.extend(orders)
        if line.sender is not None:
            line.sender.soon()
        return True

    def order_all(self, order: Order) -> None:
        """Order something of all shards. Call it with the lock held."""
        for shard in self._lines:
            self.order(shard, order)

    def all_silent(self, shards: Iterable[int]) -> bool:
        """Return whether each of some shards is silent. Call it with the lock held."""
        return all(line is None or line.is_silent for line in map(self._lines.get, shards))

    def obeyed(self) -> Callable[[], bool | None]:
        """Return a question: have all shards acknowledged the orders that there are now? Ask with the lock held."""
        last = [(line, line.first + len(line.orders)) for line in self._lines.values()]
        return lambda: all(line.first >= end or self._lines.get(line.shard) is not line for line, end in last) or None

    # ---- pushes ---------------------------------------------------------------------------------------

    def watch(self, line: Line, names: Sequence[str]) -> None:
        """Have new versions of these names, and of no others, pushed to a shard. Call it with the lock held."""
        for name in line.watched.difference(names):
            shards = self._watchers.get(name, set[int]())
            shards.discard(line.shard)
            if not shards:
                self._watchers.pop(name, None)
        for name in names:
            self._watchers.setdefault(name, set()).add(line.shard)
        line.watched = set(names)

    def watchers(self, name: str) -> list[int]:
        """Return the shards where somebody waits for a name."""
        return sorted(self._watchers.get(name, ()))

    def push(self, shards: Iterable[int], news: Located) -> None:
        """Send a new version to shards, without waiting. One that is lost comes with the next `watch`."""
        for shard in shards:
            try:
                self._channels[shard].post(ShardCalls.push(self._term, [news]))
            except TensorVineError as exc:
                log.info("catalog: %s could not be pushed to shard %d: %s", news.header.ref, shard, exc)

    # ---- within ---------------------------------------------------------------------------------------

    def _send(self, line: Line) -> None:
        """Send the orders of a line that are not acknowledged."""
        while True:
            with self._lock:
                first, orders = line.first, list(line.orders)[:AT_ONCE]
            if not orders or self._lines.get(line.shard) is not line:
                return
            request = ShardCalls.orders(self._term, line.incarnation, first, orders)
            try:
                applied = self._channels[line.shard].call(request, SEND_S)
            except (ShardUnavailableError, OperationTimeoutError) as exc:
                log.debug("catalog: shard %d has not acknowledged orders: %s", line.shard, exc)
                return
            with self._lock:
                while line.orders and line.first <= applied:
                    line.orders.popleft()
                    line.first += 1
            self._acknowledged(line.shard)
