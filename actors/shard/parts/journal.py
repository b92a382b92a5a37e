"""Copies of the catalog's journal: streams of bytes that nobody reads here.

Rules
- A term that is over appends nothing; the first bytes of a new one make this shard go by it.
- Streams before one whose snapshot is whole are dropped (`store.catalog.journal`).
"""

from __future__ import annotations

from ....store.catalog.journal import Scan, Stream
from ...rpc.calls import answers
from ...rpc.catalog_messages import Term
from ..calls.orders import Kept, OrderCalls
from ..context import ShardContext
from ..reporting import Reporting


class Journal:
    """The copies of streams that one shard keeps.

    Args:
        context: the shard's.
        reporting: reports to new terms.
    """

    def __init__(self, context: ShardContext, reporting: Reporting) -> None:
        self._index = context.index
        self._state = context.state
        self._lock = context.lock
        self._reporting = reporting
        self._streams: dict[Stream, tuple[bytearray, Scan]] = {}

    @answers(OrderCalls.append_journal)
    async def append_journal(self, term: Term, number: int, offset: int, content: bytes) -> int:
        stream = Stream(term.number, number)
        with self._lock:
            before = self._state.term
            self._state.begin_term(term.number, term.token)
            length = self._append(stream, offset, content)
        if before != term.number:
            self._reporting.soon()
        return length

    @answers(OrderCalls.journals)
    async def journals(self) -> list[Kept]:
        with self._lock:
            kept = sorted(self._streams.items())
            return [Kept(stream.term, stream.number, len(content)) for stream, (content, _) in kept]

    @answers(OrderCalls.read_journal)
    async def read_journal(self, term: int, number: int, offset: int, nbytes: int) -> bytes:
        with self._lock:
            found = self._streams.get(Stream(term, number))
            if found is None:
                raise LookupError(f"shard {self._index}: expected stream {term}.{number} of the journal; found none")
            return bytes(found[0][offset : offset + nbytes])

    def _append(self, stream: Stream, offset: int, content: bytes) -> int:
        """Append what is new; return the length. Call it with the lock held."""
        kept, scan = self._streams.setdefault(stream, (bytearray(), Scan()))
        fresh = content[len(kept) - offset :] if offset <= len(kept) else b""
        if fresh:
            kept += fresh
            scan.feed(fresh)
            if scan.whole:
                for other in [other for other in self._streams if other < stream]:
                    del self._streams[other]
        return len(kept)
