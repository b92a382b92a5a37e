"""From a training's hand-over until another model answers with the new version: ours, Keras' HDF5, bare h5py, floors.

Every tensor changes in every version. NT3 and PtychoNN at the papers' sizes (Viper, section 5).

Rules
- Ours runs in blocks, one way and one repository at a time, for the machine's memory holds no more; in each block
  floors and files run in turn with it, each turn starting one place further along. Files take part in fewer turns.
- Between two updates everything changes and what was left behind comes to rest; neither is timed.
- The first versions of a block, which take memory from the system, do not count; the very first is told apart.
- What does not fit into the free memory is left out, and a note says so.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .measure import GIB, MIB, Effort, Goal, Report, Row, progress
from .networks import Network, Training, nt3, ptychonn
from .quiet import quiet
from .raylets import Nodes, actor_named, started_on, two_raylets
from .update_ours import Mapped, Ours
from .update_parties import Copy, H5File, KerasFile, Loopback, Parts, Party, warm_buffers
from .update_report import Figure, UpdateReport

PUBLISHED = (
    "Viper as published, beside h5py over a parallel file system: NT3.A 1.5 s (host memory 4x, GPU 12x, file 1.3x), "
    "PtychoNN 8.3 s (4x, 15x, 1.2x)"
)
SPARE_S = 0.005
"""Beside the copies, what an update on one node may take."""
STORE_MODELS = 5
"""Models that a shard has room for: two live, one that is still read, and as much again as a reservation asks for."""
KEPT = 1
"""Versions that a publisher keeps."""
REPOSITORY = "updates"
STORE_BYTES = 5 * GIB
"""Capacity of each raylet's object store; memory is taken as it is used."""
FREED_S = 10.0
"""How long the memory of actors that ended takes to come back."""
SPARED = 0.06
"""Of the machine's memory: at 95% in use, Ray ends actors."""
CONVERTED = 2
"""Models that a peer has in memory for a while: as a file is read, and as its tensors become a framework's."""


@dataclass(frozen=True)
class Block:
    """One way of ours, which has a repository to itself."""

    name: str
    """As the tables call it."""
    transport: str
    """Of the consumer, and of the publisher where it is "files"."""
    holds: int
    """Models that shard, object stores and consumer have in memory at most."""
    maps: bool = True
    """The consumer uses the arrays as they come; else it fills the variables of a Keras model."""
    far: bool = False
    """The consumer is on the other raylet."""
    synchronous: bool = False
    """The training waits for the commit."""


BLOCKS = (
    Block("asynchronous, mapped arrays", "auto", 4),
    Block("synchronous, mapped arrays", "auto", 3, synchronous=True),
    Block("asynchronous, into Keras' variables", "auto", 6, maps=False),
    Block("synchronous, into Keras' variables", "auto", 5, maps=False, synchronous=True),
    Block("files (PFS)", "files", 6),
    Block("two raylets, socket", "socket", 6, far=True),
    Block("two raylets, object store", "object_store", 11, far=True),
)
FEWER = tuple(BLOCKS[place] for place in (0, 2, 4, 5))


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    cases: tuple[tuple[Network, tuple[Block, ...]], ...]
    """Networks, and the ways that each is brought by."""
    warmup: int
    """Versions of each block that do not count."""
    rounds: int
    every: int
    """Files take part in each so-many-th turn."""
    rests: bool = True
    """Between two updates, what was left behind comes to rest."""


NT3_A, NT3_B, WIDE = nt3("NT3.A", 200), nt3("NT3.B", 600), ptychonn("PtychoNN, 1 GiB", 488)
SMALL = nt3("NT3, 9 MiB", 60, features=6048, filters=64)
PLANS = {
    Effort.QUICK: Plan(((SMALL, BLOCKS),), 1, 1, 2, rests=False),
    Effort.NORMAL: Plan(((NT3_A, BLOCKS), (NT3_B, FEWER), (WIDE, FEWER)), 3, 5, 4),
    Effort.FULL: Plan(((NT3_A, BLOCKS), (NT3_B, BLOCKS), (WIDE, BLOCKS)), 3, 12, 5),
}


def run(effort: Effort) -> Report:
    """Measure all ways of ours beside files and floors."""
    plan = PLANS[effort]
    report = UpdateReport("update_latency")
    for network, blocks in plan.cases:
        gc.collect()  # the network before has cycles
        with two_raylets(STORE_BYTES) as nodes:  # an object store gives no memory back before it ends
            progress(f"{network.name}: built")
            _Measured(network, plan, report, nodes).run(blocks)
    report.notes.append(PUBLISHED)
    report.notes.append("files are not synced, but those of ours; nobody has to tell the peers' readers of them")
    return report


class _Measured:
    """The measurements with one network."""

    def __init__(self, network: Network, plan: Plan, report: UpdateReport, nodes: Nodes) -> None:
        self._plan = plan
        self._report = report
        self._nodes = nodes
        self._training = Training(network)
        self._figures: dict[str, Figure] = {}
        self._published_at = 0.0

    def run(self, blocks: Sequence[Block]) -> None:
        """Measure block by block, then add the rows."""
        name, size = self._training.network.name, self._training.nbytes
        done: list[Block] = []
        with tempfile.TemporaryDirectory(prefix="update-") as folder, ExitStack() as stack:
            buffers = warm_buffers(self._training)
            loopback = Loopback(self._training, buffers)
            stack.callback(loopback.close)
            common: list[Party] = [
                KerasFile(self._training, Path(folder), self._plan.every),
                H5File(self._training, Path(folder), self._plan.every),
                Copy(self._training, buffers),
                loopback,
            ]
            for block in blocks:
                need = (block.holds + CONVERTED) * size + GIB // 2
                room = _room(need)
                if room < need:
                    text = f"it needs {need / GIB:.3g} GiB; {room / GIB:.3g} GiB are free"
                    self._report.notes.append(f"{name}: {block.name} is left out: {text}")
                    continue
                progress(f"{name}, {size / MIB:.0f} MiB: {block.name}")
                with _ours(block, self._training, Path(folder) / "repository", self._nodes) as ours:
                    self._alternate([ours, *common], check=[ours] if done else [ours, *common])
                done.append(block)
        self._report.figures += self._figures.values()
        for block in done:
            _add(self._report, self._figures, block, name, size)

    def _alternate(self, parties: Sequence[Party], check: Sequence[Party]) -> None:
        """Let all parties have their turns; then see that what they bring is right."""
        for turn in range(self._plan.warmup + self._plan.rounds):
            playing = [party for party in parties if turn % party.every == 0]
            shift = turn % len(playing)
            for party in playing[shift:] + playing[:shift]:
                self._note(party, turn, self._update(party))
        for party in check:
            self._update(party)
            party.check()

    def _update(self, party: Party) -> Parts:
        self._training.step()
        gc.collect()
        if self._plan.rests:
            quiet(since=self._published_at)
        parts = party.update()
        if isinstance(party, Ours):
            self._published_at = time.monotonic()
        return parts

    def _note(self, party: Party, turn: int, parts: Parts) -> None:
        if party.name not in self._figures:
            self._figures[party.name] = Figure(self._training.network.name, party.name, parts)
        elif party.every > 1 or turn >= self._plan.warmup:
            self._figures[party.name].warm.append(parts)


def _room(need: int) -> int:
    """Return the bytes of memory that may be used; where too few, first wait for what the block before had."""
    end = time.monotonic() + FREED_S
    spare = int(SPARED * psutil.virtual_memory().total)
    while (room := psutil.virtual_memory().available - spare) < need and time.monotonic() < end:
        time.sleep(0.1)
    return room


@contextmanager
def _ours(block: Block, training: Training, path: Path, nodes: Nodes) -> Iterator[Party]:
    """Start a repository, a consumer and a publisher; end all."""
    from tensorvine.actors import Consumer, Publisher, Repository

    here, other = nodes
    way = "files" if block.transport == "files" else "auto"
    build: Callable[[], Any] = Mapped if block.maps else training.network.build
    with ExitStack() as stack:
        kept_on = path if way == "files" else None
        store = STORE_MODELS * training.nbytes + GIB // 16
        repo = started_on(
            here,
            lambda: Repository.start(REPOSITORY, shards=1, path=kept_on, store_bytes=store),
            lambda _: actor_named(f"{REPOSITORY}/shard-0"),
        )
        stack.enter_context(repo)
        node = other if block.far else here
        consumer = started_on(
            node,
            lambda: Consumer.start(repo, "net", build, transport=block.transport, node=node),
            lambda consumer: consumer.actor,
        )
        stack.enter_context(consumer)
        publisher = Publisher(repo, "net", 1, transport=way, synchronous=block.synchronous, keep=KEPT)
        stack.enter_context(publisher)
        yield Ours(block.name, training, repo, publisher, consumer, block.maps)


def _add(report: UpdateReport, figures: dict[str, Figure], block: Block, network: str, size: int) -> None:
    """Add the rows of one way: beside Keras' file, and beside h5py's."""
    ours = figures[block.name]
    total = ours.sample.median
    floor = figures[Loopback.name if block.far else Copy.name]
    factors = {KerasFile.name: 4, H5File.name: None} if block.far else {KerasFile.name: 12, H5File.name: 5}
    for peer, factor in factors.items():
        theirs = figures[peer].sample
        goals: list[Goal] = []
        if block.transport != "files" and factor is not None:
            goals.append(Goal(f"times faster than {peer}", theirs.median / total, at_least=factor))
        if peer == KerasFile.name and block.far:
            goals.append(Goal("raw loopback sockets", total / floor.sample.median, at_most=2.5))
        elif peer == KerasFile.name and block.transport != "files":
            copies = max(total - SPARE_S, 0.0) / floor.sample.median
            goals.append(Goal("memory copies, beside 5 ms", copies, at_most=1.5 if block.maps else 2.5))
        row = Row(
            *(
                f"{network}: {block.name}",
                ours.sample,
                size,
                peer,
                theirs,
                floor.party,
                floor.sample.median,
                tuple(goals),
            ),
            facts=ours.as_dict(),
        )
        report.add(row, headline=network == "NT3.B" and block is BLOCKS[0] and peer == KerasFile.name)
