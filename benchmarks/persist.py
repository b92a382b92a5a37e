"""Persistence: saves that return when they are on disk, reads of one tensor, recovery, and what codecs cost.

Rules
- The floor is the same bytes with plain `write` and `fsync` (`disk.Plain`), into one file. They are also written into
  as many files as the repository writes, as a peer.
- Peers are followed by an fsync of what they wrote and of its folder; before each, what anybody left unwritten is
  synced, untimed. What was written is removed after each.
- The shard writes, in a process of its own: wall clock from the call to its return. The memory that it copies the
  tensors into was touched before, as it is after a first save.
- Every save is a root: nothing is inherited.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .architectures import synthetic
from .disk import TIMEOUT_S, Plain, disk_peers, erase, settle, start, sync
from .measure import MIB, Action, Effort, Goal, Report, Row, Sample, Tensors, alternate, progress, total_bytes
from .partial_read import partial_reads
from .peers import Peer
from .recovery import recoveries
from .session import Names
from .trained import tiled, trained_weights

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.store import ModelGraph

HEADLINE_PEER = "h5py"
OURS, BEHIND = "save, on disk", "from commit to disk"
GOAL = 0.8
"""Of plain write and fsync's throughput."""
NOTE = "peers are followed by fsync of their files and folders (DCP and Orbax sync by themselves, too)"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    size: int
    """Bytes of the models that are written and read."""
    layers: tuple[int, ...]
    """Tensors of the models that are written."""
    read_layers: tuple[int, ...]
    """Of those that are read."""
    rounds: int
    read_rounds: tuple[int, int]
    """How often all is read, and how often one tensor."""
    models: int
    """Of the path that is recovered."""
    trained_bytes: int
    """At least, of the trained weights that are encoded."""
    quick: bool
    warmup: int = 1
    """Rounds that do not count."""


PLANS = {
    Effort.QUICK: Plan(64 * MIB, (10, 100), (100,), 2, (2, 6), 300, 16 * MIB, True),
    Effort.NORMAL: Plan(1024 * MIB, (10, 100, 1000), (1000, 100), 3, (3, 24), 10_000, 128 * MIB, False),
    Effort.FULL: Plan(1024 * MIB, (10, 100, 1000), (1000, 100), 7, (5, 48), 10_000, 512 * MIB, False),
}


@dataclass
class PersistReport(Report):
    """Also what cannot be seen in the rows."""

    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, and the notes."""
        return super().as_dict() | {"notes": self.notes}

    def print(self, console: Console) -> None:
        """Print the rows, then the notes."""
        super().print(console)
        for note in self.notes:
            console.print(note, highlight=False)


def run(effort: Effort) -> Report:
    """Measure writes, reads, codecs and recovery."""
    from tensorvine.clusters.local import LocalCluster

    plan = PLANS[effort]
    peers, about = disk_peers()
    report = PersistReport("persist", notes=[NOTE, *about])
    with LocalCluster(object_store_bytes=128 * MIB), tempfile.TemporaryDirectory(prefix="persist-") as folder:
        for layers in plan.layers:
            _writes(report, Path(folder), plan, layers, peers)
        for layers in plan.read_layers:
            partial_reads(report, Path(folder), plan.size, layers, peers, plan.read_rounds, plan.warmup)
        _codecs(report, Path(folder), plan)
        recoveries(report, Path(folder), plan.models, plan.rounds, plan.warmup)
    return report


class Ours:
    """A repository that writes models to a path and forgets them.

    Args:
        repo: the repository; nothing else is in it.
        path: its path.
        tensors: what it saves.
        graph: of the models.
    """

    def __init__(self, repo: Repository, path: Path, tensors: Tensors, graph: ModelGraph | None = None) -> None:
        self._repo = repo
        self._path = path
        self._tensors = tensors
        self._graph = graph
        self._names = Names("persist")
        self.behind_s: list[float] = []
        """Seconds from each commit in memory until the version was on disk."""
        self.nbytes = 0
        """Bytes of the files of the newest version's tensors."""

    def save(self) -> Any:
        """Save a version and wait until it is on disk."""
        name = self._names.fresh()
        return self._repo.save(name, self._tensors, graph=self._graph, durability="disk", timeout=TIMEOUT_S)

    def save_behind(self) -> Any:
        """Save a version, wait until it is committed, and then until it is on disk."""
        saved = self._repo.save(self._names.fresh(), self._tensors, graph=self._graph, timeout=TIMEOUT_S)
        committed = time.perf_counter()
        self._repo.flush(TIMEOUT_S)
        self.behind_s.append(time.perf_counter() - committed)
        return saved

    def forget(self, saved: Any) -> None:
        """Take the size of a version's files and remove it."""
        self.nbytes = sum(file.stat().st_size for file in (self._path / "segments").iterdir())
        erase(self._repo, self._path, saved.ref)
        settle()


def _writes(report: Report, folder: Path, plan: Plan, layers: int, peers: Sequence[Peer]) -> None:
    """Time writing one model."""
    case = f"{plan.size // MIB} MiB in {layers} tensors"
    progress(f"writes of {case}")
    architecture = synthetic(plan.size, layers)
    tensors = architecture.tensors()
    plain, split = Plain(), Plain(split_as_ours=True)
    others = [plain, split, *peers]
    for peer in others:
        peer.hold(tensors)
    path = folder / "writes"
    with start(path, 2 * plan.size + 64 * MIB, touched=plan.size + 32 * MIB) as repo:
        ours = Ours(repo, path, tensors, architecture.graph)
        actions = {OURS: Action(ours.save, ours.forget), BEHIND: Action(ours.save_behind, ours.forget)}
        actions |= {peer.name: _write(peer, folder / "peer") for peer in others}
        settle()
        found = alternate(actions, rounds=plan.rounds, warmup=plan.warmup)
    Peer.remove(path)
    found[BEHIND] = Sample(tuple(ours.behind_s[plan.warmup :]))
    for way in (OURS, BEHIND):
        for peer in others[1:]:
            of_floor = found[plain.name].median / found[way].median
            goal = Goal(f"of the throughput of {plain.name}", of_floor, at_least=GOAL)
            row = Row(
                *(f"{case}: {way}", found[way], plan.size, peer.name, found[peer.name]),
                *(plain.name, found[plain.name].median, (goal,) if peer is split else ()),
                {"files": split.files},
            )
            report.add(row, headline=way == OURS and layers == 100 and peer.name == HEADLINE_PEER)


def _write(peer: Peer, path: Path) -> Action:
    def write() -> None:
        peer.save(path)
        if not isinstance(peer, Plain):
            sync(path)

    def remove(_: None) -> None:
        peer.remove(path)
        settle()

    return Action(write, remove)


def _codecs(report: Report, folder: Path, plan: Plan) -> None:
    """Time saves to disk with and without codecs, on trained weights."""
    from tensorvine.store import Codec, Quantize, Shuffle, Zstd

    tensors = tiled(trained_weights("resnet", quick=plan.quick), plan.trained_bytes)
    size = total_bytes(tensors)
    progress(f"codecs on {size // MIB} MiB of trained weights")
    codecs: dict[str, Codec | None] = {
        "as they are": None,
        "Shuffle | Zstd": Shuffle() | Zstd(),
        "Quantize(8) | Zstd": Quantize(8) | Zstd(),
    }
    plain = Plain()
    plain.hold(tensors)
    with ExitStack() as stack:
        everybody: dict[str, Ours] = {}
        for number, (name, codec) in enumerate(codecs.items()):
            path = folder / f"codec-{number}"
            repo = stack.enter_context(start(path, 2 * size + 64 * MIB, touched=size + 32 * MIB, codec=codec))
            everybody[name] = Ours(repo, path, tensors)
        actions = {name: Action(ours.save, ours.forget) for name, ours in everybody.items()}
        actions[plain.name] = _write(plain, folder / "peer")
        settle()
        found = alternate(actions, rounds=plan.rounds, warmup=plan.warmup)
    bare, *encoded = codecs
    for name in encoded:
        nbytes = everybody[name].nbytes
        row = Row(
            *(f"{size // MIB} MiB of trained weights: {name}", found[name], size, f"ours, {bare}", found[bare]),
            *(plain.name, found[plain.name].median),
            facts={"bytes_on_disk": nbytes, "of_bytes": nbytes / size},
        )
        report.add(row)
