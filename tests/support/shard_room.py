"""Real shards in this process, without Ray, and a catalog whose answers a test decides.

Rules
- Calls travel by `direct`: each group of an actor's calls has a loop of its own, in a thread, as an actor has it.
- The catalog keeps to the rules of `store.catalog.reports`, and knows nothing of versions: what it commits it takes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np
from tensorvine.actors.memory.process import this_process
from tensorvine.actors.rpc import channel, lease
from tensorvine.actors.rpc.calls import Request as Call
from tensorvine.actors.rpc.catalog_messages import Committed, Located, Proposal, Refused, Term
from tensorvine.actors.rpc.messages import Disk, Filled, Handed, ShardConfig, actor_name, catalog_name
from tensorvine.actors.rpc.ticker import Ticker
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.actors.shard.segment_memory import SegmentMemory
from tensorvine.actors.shard.shard import Shard
from tensorvine.store.archive.archive import Archive
from tensorvine.store.catalog.orders import Order
from tensorvine.store.catalog.reports import Answered, Report, Sender
from tensorvine.store.errors import ShardUnavailableError
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.segment import File, Label, SegmentId, new_segment
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import Header
from tensorvine.store.versions.slots import packed_slots
from tensorvine.store.versions.version import Draft

from tests.support.direct import DirectLines, answered

REPOSITORY, CLIENT = "alone", "0123456789abcdef"
BYTES = 4 << 20
WAIT_S = 60.0


class Loops:
    """The loops of one actor, one for each group."""

    def __init__(self) -> None:
        self._loops = {group: asyncio.new_event_loop() for group in ("ctl", "data", "watch")}
        self._threads = [threading.Thread(target=loop.run_forever, daemon=True) for loop in self._loops.values()]
        self._stopped = False
        for thread in self._threads:
            thread.start()

    def run(self, actor: object, method: str, arguments: Sequence[Any]) -> concurrent.futures.Future[Any]:
        if self._stopped:
            return answered(error=ShardUnavailableError(f"{method}: the actor was ended"))
        answering = getattr(actor, method)
        loop = self._loops[getattr(answering, "concurrency_group", "ctl")]
        return asyncio.run_coroutine_threadsafe(answering(*arguments), loop)

    def stop(self) -> None:
        self._stopped = True
        for loop, thread in zip(self._loops.values(), self._threads, strict=True):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(WAIT_S)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            loop.close()


def _cut_off(answer: concurrent.futures.Future[Any], method: str) -> concurrent.futures.Future[Any]:
    """Return an answer that tells its caller that the actor was ended, where that cancelled it."""
    told: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def arrived(done: concurrent.futures.Future[Any]) -> None:
        if told.cancelled():
            return
        error = ShardUnavailableError(f"{method}: the actor was ended") if done.cancelled() else done.exception()
        with suppress(concurrent.futures.InvalidStateError):  # its caller has just given it up
            told.set_exception(error) if error is not None else told.set_result(done.result())

    answer.add_done_callback(arrived)
    return told


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Engine:
    """Finds the actors of this process, and keeps facts."""

    def __init__(self) -> None:
        self.actors: dict[str, tuple[object, Loops]] = {}
        self.facts: dict[str, bytes] = {}

    def this_node(self) -> str:
        return "node"

    def address(self) -> str:
        return "127.0.0.1"

    def find(self, name: str) -> str:
        if name not in self.actors:
            raise LookupError(f"no actor named {name!r}")
        return name

    def reach(self, actor: Any, timeout: float, who: str) -> list[Callable[..., Any]]:
        def answering(method: str, *arguments: Any) -> concurrent.futures.Future[Any]:
            if actor not in self.actors:
                return answered(error=ShardUnavailableError(f"{method}: {actor} is starting again"))
            found, loops = self.actors[actor]
            return _cut_off(loops.run(found, method, arguments), method)

        return [answering]

    def show(self, gauges: object, labels: object) -> None:
        pass

    def keep(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.facts.pop(name, None)
        else:
            self.facts[name] = value

    def keep_absent(self, name: str, value: bytes) -> bool:
        return self.facts.setdefault(name, value) is value

    def kept(self, prefix: str) -> dict[str, bytes]:
        return {name: value for name, value in list(self.facts.items()) if name.startswith(prefix)}

    def put(self, block: Any) -> Any:
        return np.array(block)


class PlainCatalog:
    """A catalog that takes whatever shards say, unless a test says otherwise."""

    def __init__(self) -> None:
        self.term = Term(1, b"first")
        self.reports: list[Report] = []
        self.proposals: list[tuple[Sender, Proposal]] = []
        self.committed: dict[Request, Committed] = {}
        self.ended_clients: list[str] = []
        self.watched: list[str] = []
        self.newest: dict[str, Located] = {}
        self.stored: dict[SegmentId, File] = {}
        self.refuses: set[SegmentId] = set()
        """New files that it does not take."""
        self.settled: dict[Request, tuple[SegmentId, ...]] = {}
        self.answers: Callable[[Proposal], Committed | Refused | None] = self.commits
        """What a proposal is answered; None: nothing yet, and the shard asks again in vain until `open` is set."""
        self.open = threading.Event()
        self.open.set()
        self.reachable = True
        self.changed = threading.Condition()

    def commits(self, proposal: Proposal) -> Committed | Refused | None:
        number = len(self.committed) + 1
        return self.committed.setdefault(proposal.save, Committed(ModelRef(proposal.draft.name, number), number))

    def until(self, look: Callable[[], Any]) -> Any:
        """Wait until something is so that a call of a shard changes."""
        with self.changed:
            found = self.changed.wait_for(look, WAIT_S)
        assert found
        return found

    def _check(self, term: int | None = None) -> None:
        if not self.reachable or (term is not None and term != self.term.number):
            raise ShardUnavailableError("catalog: this is another term")

    async def present(self, shard: int, incarnation: int) -> Term:
        self._check()
        return self.term

    async def report(self, report: Report) -> Answered:
        self._check(report.term)
        with self.changed:
            self.reports.append(report)
            refused = tuple(segment for segment in report.stored if segment in self.refuses)
            self.stored |= {segment: file for segment, file in report.stored.items() if segment not in refused}
            settled = {save: self.settled[save] for save in report.kept if save in self.settled}
            self.changed.notify_all()
        return Answered(refused, settled)

    async def commit(self, sender: Sender, proposal: Proposal) -> Committed | Refused:
        self._check(sender.term)
        with self.changed:
            self.proposals.append((sender, proposal))
            self.changed.notify_all()
        while not self.open.is_set():
            await asyncio.sleep(0.01)
            self._check(sender.term)
        answer = self.answers(proposal)
        if answer is None:
            raise ShardUnavailableError("catalog: the answer was lost")
        return answer

    async def watch(self, sender: Sender, names: Sequence[str]) -> list[Located]:
        self._check(sender.term)
        with self.changed:
            self.watched = list(names)
            self.changed.notify_all()
        return [self.newest[name] for name in names if name in self.newest]

    async def ended(self, sender: Sender, clients: Sequence[str]) -> None:
        self._check(sender.term)
        with self.changed:
            self.ended_clients += clients
            self.changed.notify_all()

    async def files(self, segments: Sequence[SegmentId]) -> dict[SegmentId, File]:
        return {segment: self.stored[segment] for segment in segments if segment in self.stored}


class Room:
    """A repository of real shards in this process."""

    def __init__(self) -> None:
        self.tickers: list[Ticker] = []
        self._recording = mock.patch.object(Ticker, "__init__", self._recorded(Ticker.__init__))
        self._recording.start()
        self.engine = Engine()
        self.catalog = PlainCatalog()
        self.loops: list[Loops] = []
        self.shards: dict[int, Shard] = {}
        self.serials = 0
        self._host(catalog_name(REPOSITORY), self.catalog)

    def _recorded(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Note the tickers of actors, which would go on as long as this process lives."""

        def noted(ticker: Ticker, *arguments: Any) -> None:
            begin(ticker, *arguments)
            self.tickers.append(ticker)

        return noted

    def _host(self, name: str, actor: object) -> None:
        loops = Loops()
        self.loops.append(loops)
        self.engine.actors[name] = actor, loops

    def start(self, index: int = 0, disk: Disk | None = None, replicas: int = 1, capacity: int = BYTES) -> Shard:
        """Start a shard; one that ran before is stopped."""
        config = ShardConfig(
            repository=REPOSITORY,
            index=index,
            capacity=capacity,
            preallocate_bytes=0,
            session_s=60.0,
            disk=disk,
            replicas=replicas,
        )
        if index in self.shards:
            self.call(ShardCalls.end(), index)
        engine: Any = self.engine
        shard = self.shards[index] = Shard(engine, config)
        self._host(actor_name(REPOSITORY, index), shard)
        self.call(ShardCalls.hello(CLIENT, "node", this_process()), index)
        return shard

    def stop(self) -> None:
        """End all shards."""
        for index in self.shards:
            self.call(ShardCalls.end(), index)
        self.catalog.open.set()
        for loops in self.loops:
            loops.stop()
        self._recording.stop()
        for ticker in self.tickers:
            ticker.end()

    def send(self, call: Call[Any], shard: int = 0) -> concurrent.futures.Future[Any]:
        """Begin a call of a shard."""
        actor, loops = self.engine.actors[actor_name(REPOSITORY, shard)]
        return loops.run(actor, call.remote.name, call.arguments)

    def call(self, call: Call[Any], shard: int = 0) -> Any:
        """Call a shard."""
        return self.send(call, shard).result(WAIT_S)

    def order(self, *orders: Order, first: int = 1, shard: int = 0) -> int:
        """Have the present term order something."""
        state = self.state(shard)
        return self.call(ShardCalls.orders(self.catalog.term, state.incarnation, first, list(orders)), shard)

    def state(self, shard: int = 0) -> ShardState:
        return self.part(Writes, shard)._state

    def memory(self, shard: int = 0) -> SegmentMemory:
        return self.part(Writes, shard)._segment_memory

    def part(self, part: type, shard: int = 0) -> Any:
        return self.shards[shard].parts[part]

    def segment(self) -> SegmentId:
        return new_segment(secrets.randbits(64))

    # ---- what a client does ----------------------------------------------------------------------------

    def save(self, number: int, *contents: bytes, base: SegmentId | None = None, **named: Any) -> Handed:
        """Make a commit that brings one segment with these tensors."""
        segment = self.segment()
        labels = tuple(
            Label(slot, f"t{slot}", "layer", "uint8", (len(content),), (base, slot) if base is not None else None)
            for slot, content in enumerate(contents)
        )
        return self.handed(number, [self.filled(number, segment, contents, labels)], **named)

    def filled(
        self, number: int, segment: SegmentId, contents: Sequence[bytes], labels: tuple[Label, ...] = (), shard: int = 0
    ) -> Filled:
        """Bring tensors into the shard's memory, or into the message where they are few."""
        from tensorvine.store.segments.segment import layout

        sizes = tuple(map(len, contents))
        offsets, length = layout(sizes)
        block = np.zeros(length, np.uint8)
        for offset, content in zip(offsets, contents, strict=True):
            block[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        if length <= 65536:
            return Filled(segment, block.tobytes(), sizes, labels)
        (start,) = self.call(ShardCalls.grant(CLIENT, Request(CLIENT, number), [length], 10.0), shard)
        part = Part(start, length)
        self.memory(shard).memory.part(part)[:] = block
        return Filled(segment, part, sizes, labels)

    def handed(
        self,
        number: int,
        blocks: Sequence[Filled],
        *,
        names: Mapping[SegmentId, Sequence[int]] | None = None,
        durable: bool = False,
        timeout: float = 30.0,
        incarnation: int | None = None,
    ) -> Handed:
        """Make a commit; by default it names all that it brings."""
        named = names if names is not None else {block.id: range(len(block.sizes)) for block in blocks}
        draft = Draft(
            name="m",
            save=Request(CLIENT, number),
            parent=None,
            quality=None,
            metadata="{}",
            graph_key=b"key",
            architecture=None,
            fingerprints=None,
            body=b"",
            slots=packed_slots({segment: list(slots) for segment, slots in named.items()}),
            bytes_owned=0,
            bytes_total=0,
        )
        return Handed(
            draft=draft,
            default_parent=True,
            incarnation=this_process().pid if incarnation is None else incarnation,
            blocks=blocks,
            durable=durable,
            timeout=timeout,
        )

    def content(self, segment: SegmentId, slots: Sequence[int], shard: int = 0) -> list[bytes]:
        """Read tensors as a client does that maps the memory."""
        block = self.call(ShardCalls.blocks({segment: list(slots)}), shard)[segment]
        sizes = self.state(shard).segment(segment).sizes
        memory = block.handle
        whole = self.memory(shard).memory.read(memory) if isinstance(memory, Part) else np.frombuffer(memory, np.uint8)
        return [whole[block.offsets[slot] : block.offsets[slot] + sizes[slot]].tobytes() for slot in slots]


def located(name: str, version: int, counter: int) -> Located:
    """A version without tensors, as the catalog pushes it."""
    header = Header(
        ref=ModelRef(name, version),
        parent=None,
        quality=None,
        metadata="{}",
        created_ns=version,
        graph_key=b"key",
        bytes_owned=0,
        bytes_total=0,
        codec=None,
    )
    return Located(header, b"", {}, counter)


def disk_at(path: Any, codec: str | None = None, unwritten: int | None = None) -> Disk:
    """A new repository's path."""
    Archive(str(path))
    return Disk(str(path), codec, unwritten, None)


@contextmanager
def room() -> Iterator[Room]:
    """Have a repository without shards."""
    with (
        mock.patch.object(channel, "Lines", DirectLines),
        mock.patch.object(lease, "_await_end", return_value=None),
    ):
        made = Room()
        try:
            yield made
        finally:
            with suppress(concurrent.futures.TimeoutError):
                made.stop()
