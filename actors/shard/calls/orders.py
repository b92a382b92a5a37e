"""What the catalog, and other shards, have a shard do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....store.catalog.orders import Order, Slots
from ....store.holders import Request
from ....store.segments.segment import SegmentId
from ...rpc.calls import remote
from ...rpc.catalog_messages import Located, Term
from .copies import Address, Original


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy of a stream of the catalog's journal, as a shard has it."""

    term: int
    number: int
    """Of the stream in its term: a snapshot begins each."""
    length: int
    """Bytes."""


class OrderCalls:
    """Answered by `shard.parts.orders`, `shard.parts.copies` and `shard.parts.journal`."""

    @remote("ctl", repeatable=True)
    def orders(self, term: Term, incarnation: int, first: int, orders: Sequence[Order]) -> int:
        """Apply orders in sequence, those that were not applied yet; return the serial number of the last one applied.

        Args:
            term: of the catalog. The first orders of a new term begin with serial number 1.
            incarnation: of this shard, which has reported to that term.
            first: serial number of the first of `orders`.
            orders: without a gap.

        Raises:
            ShardUnavailableError: the term is over, or another token has it; or this is another incarnation.
        """
        ...

    @remote("ctl", repeatable=True)
    def push(self, term: Term, news: Sequence[Located]) -> None:
        """Take new versions that clients here wait for, and wake these; errors as in `orders`."""
        ...

    @remote("watch", repeatable=True)
    def wait_newer(self, name: str, after: int, timeout: float) -> Located | None:
        """Wait until `name` has a version above `after`, and return it with its table; None: none in time."""
        ...

    # ---- copies of segments ---------------------------------------------------------------------------

    @remote("data", repeatable=True)
    def keep_copies(
        self,
        source: int,
        save: Request,
        originals: Mapping[SegmentId, Original],
        address: Address | None,
        timeout: float,
    ) -> int:
        """Keep copies of segments of a save that another shard is about to propose (`replicas=`).

        If nothing is heard of its commit, the catalog is asked what became of it (`Report.kept`).

        Returns:
            The incarnation of this shard that has them.

        Raises:
            ShardUnavailableError: this process has no lease: another one may be the shard.
            StoreFullError: there is no room.
            CorruptDataError: what came has another digest.
            TensorVineError: they could not be fetched.
        """
        ...

    @remote("ctl", repeatable=True)
    def drop_copies(self, save: Request, needed: Sequence[SegmentId]) -> None:
        """Drop the copies that came for a save, but for those that its version needs."""
        ...

    @remote("ctl", repeatable=True)
    def originals(self, slots: Slots) -> tuple[dict[SegmentId, Original], Address | None]:
        """Describe slots of this shard's segments, for another shard that copies them, and say where their bytes are.

        Segments and slots that are not here are not in the answer.
        """
        ...

    # ---- copies of the journal ------------------------------------------------------------------------

    @remote("data", repeatable=True)
    def append_journal(self, term: Term, number: int, offset: int, content: bytes) -> int:
        """Keep bytes of a stream of the journal, from an offset on; return the length that is kept now.

        A length below `offset` says that bytes in between are missing. An offset below the length replaces nothing:
        the bytes are the same. A stream of a higher term or number replaces the others when its snapshot is whole
        (`store.catalog.journal.whole`).

        Raises:
            ShardUnavailableError: the term is over, or another token has it.
        """
        ...

    @remote("data", repeatable=True)
    def journals(self) -> list[Kept]:
        """List the streams of the journal that are kept here, the newest last."""
        ...

    @remote("data", repeatable=True)
    def read_journal(self, term: int, number: int, offset: int, nbytes: int) -> bytes:
        """Read some bytes of a stream; fewer at its end.

        Raises:
            LookupError: it is not here any more.
        """
        ...
