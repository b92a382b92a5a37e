"""One tensor of a model on disk against all of it: through the repository, from its segment files, and beside files.

Rules
- The repository was just started on the path: it has nothing in memory. A tensor that it has read it answers from
  memory, and when more of a segment is asked for it reads all of the segment; so each tensor that is timed is of
  another segment, and when there is none left the repository is started anew, untimed.
- Everything is measured with the files in the page cache, and with them dropped from it before each read.
- Whoever reads gets arrays of its own: what maps a file copies out of the map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorvine.store import ModelRef
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import decode_slot
from tensorvine.store.archive.segmentfile import SegmentFile
from tensorvine.store.segments.segment import SegmentId

from .architectures import synthetic
from .callers import timed
from .disk import TIMEOUT_S, Plain, drop_from_cache, start, sync
from .measure import GIB, MIB, Action, Goal, Report, Row, Sample, Tensors, alternate, progress
from .peers import Peer

if TYPE_CHECKING:
    from tensorvine.actors import Repository

REPOSITORY, FILES = "repository", "segment files"
CACHED, DROPPED = "cached", "dropped"
"""States of the page cache."""
STATES = (CACHED, DROPPED)
FLOOR = "plain read"
GOAL = 0.01
"""Of the time of reading all, for one of 1000 tensors of 1 GiB."""
GOAL_TENSORS = 1000


class SegmentFiles:
    """A version's tensors, read from the files without a repository.

    Args:
        path: the repository's.
        ref: the version.
    """

    def __init__(self, path: Path, ref: ModelRef) -> None:
        self._archive = Archive(str(path), shards=1, create=False)
        self.manifest_s, manifest = timed(lambda: self._archive.read_manifest(ref))
        self._places = {name: ((entry.segment, entry.slot), entry.nbytes) for name, entry in manifest.entries.items()}
        self._files = {segment: files[0] for segment, files in self._archive.segments().items()}

    def load(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Read all tensors, or those named, and check them."""
        with ExitStack() as stack:

            @cache
            def opened(segment: SegmentId) -> SegmentFile:
                return stack.enter_context(closing(self._archive.open_segment(self._files[segment])))

            wanted = self._places if names is None else names
            return {name: decode_slot(*self._places[name], opened) for name in wanted}

    def one_of_each(self) -> list[str]:
        """Name one tensor of each segment: the middle one."""
        groups: dict[SegmentId, list[str]] = {}
        for name, ((segment, _), _) in self._places.items():
            groups.setdefault(segment, []).append(name)
        return [names[len(names) // 2] for names in groups.values()]


class Cold:
    """A repository that has nothing of a version in memory, or nothing of some segments.

    Args:
        path: the repository's.
        ref: the version, the only one there.
        nbytes: of the version.
        names: a tensor of each segment.
    """

    def __init__(self, path: Path, ref: ModelRef, nbytes: int, names: Sequence[str]) -> None:
        self._path = path
        self._ref = ref
        self._nbytes = nbytes
        self._names = names
        self._restart()

    def all(self) -> dict[str, Any]:
        """Load all tensors."""
        self._left = []
        return self._repo.load(self._ref, timeout=TIMEOUT_S)

    def one(self) -> dict[str, Any]:
        """Load a tensor of a segment of which nothing was loaded before."""
        return self._repo.load(self._ref, tensors=[self._left.pop()], timeout=TIMEOUT_S)

    def first(self) -> dict[str, Any]:
        """Load a tensor, the first one after a start."""
        loaded = self.one()
        self._left = []
        return loaded

    def cool(self, _: object) -> None:
        """Start anew if there is no segment left of which nothing was loaded."""
        if not self._left:
            self._repo.close()
            self._restart()

    def close(self) -> None:
        """Stop the repository."""
        self._repo.close()

    def _restart(self) -> None:
        self._repo: Repository = start(self._path, self._nbytes + 64 * MIB, touched=self._nbytes + 32 * MIB)
        self._left = list(self._names)


@dataclass(frozen=True)
class Case:
    """A model on disk, in everybody's files."""

    layers: int
    size: int
    folder: Path
    peers: Mapping[str, Peer]
    ref: ModelRef
    one_bytes: int
    """Of a tensor; all are about as large."""

    @property
    def what(self) -> str:
        """As the tables call it."""
        return f"{self.size // MIB} MiB in {self.layers} tensors"


def partial_reads(
    report: Report, folder: Path, size: int, layers: int, peers: Sequence[Peer], rounds: tuple[int, int], warmup: int
) -> None:
    """Measure one model.

    Args:
        report: gets the rows.
        folder: of everybody's files.
        size: bytes of the model.
        layers: how many tensors it has.
        peers: who else reads.
        rounds: how often all is read, and how often one tensor is.
        warmup: rounds of both before those.
    """
    tensors = synthetic(size, layers).tensors()
    with _written(folder, tensors, peers) as (ref, everybody):
        case = Case(layers, size, folder, everybody, ref, size // layers)
        files = SegmentFiles(folder / REPOSITORY, ref)
        for state in STATES:
            progress(f"reads of {size // MIB} MiB in {layers} tensors, {state}")
            with closing(Cold(folder / REPOSITORY, ref, size, files.one_of_each())) as cold:
                _measure(report, case, state, cold, files, rounds, warmup)


@contextmanager
def _written(folder: Path, tensors: Tensors, peers: Sequence[Peer]) -> Iterator[tuple[ModelRef, dict[str, Peer]]]:
    """Write a model in all forms; gives its version, and who reads from which file of the folder."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    with start(folder / REPOSITORY, size + 64 * MIB) as repo:
        ref = repo.save("model", tensors, durability="disk", timeout=TIMEOUT_S).ref
    everybody = {FLOOR: Plain(), **{peer.name: peer for peer in peers}}
    for name, peer in everybody.items():
        peer.hold(tensors)
        peer.save(folder / name)
        sync(folder / name)
    yield ref, everybody
    for name, peer in everybody.items():
        peer.remove(folder / name)
    Peer.remove(folder / REPOSITORY)


def _measure(
    report: Report, case: Case, state: str, cold: Cold, files: SegmentFiles, rounds: tuple[int, int], warmup: int
) -> None:
    """Time everybody in one state of the page cache."""

    def prepare(_: object = None) -> None:
        if state == DROPPED:
            drop_from_cache(case.folder)

    def cool(result: object) -> None:
        cold.cool(result)
        prepare()

    names = cycle(files.one_of_each())
    alone = {name: (lambda peer=peer, name=name: peer.load(case.folder / name)) for name, peer in case.peers.items()}
    single = {
        name: (lambda peer=peer, name=name: peer.load(case.folder / name, [next(names)]))
        for name, peer in case.peers.items()
    }
    prepare()
    everything = alternate(
        {
            REPOSITORY: Action(cold.all, cool),
            "first": Action(cold.first, cool),
            FILES: Action(files.load, prepare),
            **{name: Action(load, prepare) for name, load in alone.items()},
        },
        rounds=rounds[0],
        warmup=warmup,
    )
    one = alternate(
        {
            REPOSITORY: Action(cold.one, cool),
            FILES: Action(lambda: files.load([next(names)]), prepare),
            **{name: Action(load, prepare) for name, load in single.items()},
        },
        rounds=rounds[1],
        warmup=warmup,
    )
    for level, facts in ((REPOSITORY, {}), (FILES, {"manifest_s": files.manifest_s})):
        _rows(report, case, f"{state}, {level}", (everything[level], one[level]), everything, one, facts)
    first = everything["first"]
    facts = {"of_all": first.median / everything[REPOSITORY].median}
    what, floor = f"{case.what}, {state}, {REPOSITORY}: one, the first after a start", one[FLOOR].median
    report.add(Row(what, first, case.one_bytes, limit=FLOOR, limit_s=floor, facts=facts))


def _rows(
    report: Report,
    case: Case,
    where: str,
    ours: tuple[Sample, Sample],
    everything: Mapping[str, Sample],
    one: Mapping[str, Sample],
    facts: Mapping[str, float],
) -> None:
    """Add ours, of all and of one tensor, beside each peer."""
    peers = [name for name in case.peers if name != FLOOR]
    for peer in peers:
        of_all = (FLOOR, everything[FLOOR].median)
        report.add(Row(f"{case.what}, {where}: all", ours[0], case.size, peer, everything[peer], *of_all))
    share = ours[1].median / ours[0].median
    goals: tuple[Goal, ...] = ()
    if case.size == GIB and case.layers == GOAL_TENSORS:
        goals = (Goal("of the time of reading it all", share, at_most=GOAL),)
    for peer in peers:
        shares: dict[str, float | int | str] = {
            "of_all": share,
            "peer_of_all": one[peer].median / everything[peer].median,
            "floor_of_all": one[FLOOR].median / everything[FLOOR].median,
        }
        report.add(
            Row(
                *(f"{case.what}, {where}: one", ours[1], case.one_bytes, peer, one[peer], FLOOR, one[FLOOR].median),
                *(goals if peer == peers[0] else (), {**shares, **facts}),
            )
        )
