"""Saves and loads of whole models and of parts, beside files (DStore, sections 6.4 to 6.8).

Every save has a name of its own and is retired after, so that nothing is inherited and the store does not
fill.
Files go to the temporary folder and are not synced.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .architectures import Architecture, bert_large, synthetic, vgg19
from .callers import RoundTrip, in_fresh_process, timed
from .measure import (
    GIB,
    MIB,
    ONE_COPY,
    ROUND_TRIP,
    Action,
    Effort,
    Goal,
    MemoryGrowth,
    Report,
    Row,
    Sample,
    Tensors,
    alternate,
    buffers_like,
    copy_action,
    memory_growth,
    progress,
    total_bytes,
)
from .peers import Peer, file_peers
from .session import NAME, Names, repository, retire

if TYPE_CHECKING:
    from tensorvine.actors import Repository

HEADLINE_PEER = "h5py"
ONE_VIEW = "one NumPy view a tensor"
SAVE_GOALS = {"h5py": 3.0, "keras .weights.h5": 5.0, "SavedModel": 20.0}
VIEW_GOALS = {"h5py": 100.0}
MEMORY_GOAL = 64 * MIB
QUARTER = 0.25
FRACTIONS = (QUARTER, 0.5, 0.75)


@dataclass(frozen=True)
class Case:
    """One model to save and load."""

    name: str
    build: Callable[[], Architecture]
    fractions: tuple[float, ...] = FRACTIONS
    """Shares of the bytes to load on their own."""
    staged_goal: float | None = None
    """Bound on staging, in memory copies."""
    headline: bool = False
    large: bool = False
    """Too large for peers that hold another copy."""


@dataclass
class Bench:
    """What a case works with."""

    repo: Repository
    folder: Path
    case: Case
    effort: Effort
    architecture: Architecture
    tensors: Tensors
    peers: list[Peer]
    round_trip_s: float
    rounds: int
    buffers: Tensors = field(init=False)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = buffers_like(self.tensors)
        self.names = Names(f"save/{self.case.name.replace(' ', '_')}")
        for peer in self.peers:
            peer.hold(self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the whole model."""
        return total_bytes(self.tensors)

    def path(self, peer: Peer) -> Path:
        """Where a peer writes."""
        return self.folder / peer.name.replace(" ", "_")


def run(effort: Effort) -> Report:
    """Measure all cases."""
    report = Report("save_load")
    store = {Effort.QUICK: GIB, Effort.NORMAL: 4 * GIB, Effort.FULL: 8 * GIB}[effort]
    with repository(store) as repo, tempfile.TemporaryDirectory(prefix="save_load-") as folder:
        trip = RoundTrip()
        round_trip_s = trip.measure().median
        trip.close()
        for case in cases(effort):
            progress(case.name)
            architecture = case.build()
            rounds = 3 if architecture.nbytes > 512 * MIB else 5
            tensors = architecture.tensors()
            peers = file_peers(large=case.large)
            bench = Bench(repo, Path(folder), case, effort, architecture, tensors, peers, round_trip_s, rounds)
            _saves(report, bench)
            _memory(report, bench)
            _loads(report, bench)
    return report


def cases(effort: Effort) -> list[Case]:
    """List the models of an effort."""
    if effort is Effort.QUICK:
        return [_synthetic(64 * MIB, layers, headline=layers == 100) for layers in (10, 100)]
    found = [_synthetic(256 * MIB, layers) for layers in (10, 100, 1000)]
    found += [_synthetic(GIB, layers, headline=layers == 100) for layers in (10, 100, 1000)]
    found.append(Case("VGG19", vgg19, fractions=(0.15,)))
    full = effort is Effort.FULL
    name = "BERT-large and head" if full else "BERT-large"
    found.append(Case(name, lambda: bert_large(head=full), fractions=(0.35,), large=full))
    return found


def _synthetic(size: int, layers: int, *, headline: bool = False) -> Case:
    staged_goal = (2.0 if layers >= 1000 else 1.5) if size == GIB else None
    name = f"{size // MIB} MiB in {layers} layers"
    return Case(name, lambda: synthetic(size, layers), staged_goal=staged_goal, headline=headline)


def _saves(report: Report, bench: Bench) -> None:
    """Time staging and committed saves, ours and the peers' in turn."""
    repo, graph = bench.repo, bench.architecture.graph

    def stage() -> Any:
        pending = repo.save_async(bench.names.fresh(), bench.tensors, graph=graph)
        pending.staged(60)
        return pending

    actions = {
        ONE_COPY: copy_action(bench.tensors, bench.buffers),
        "staged": Action(stage, lambda pending: retire(repo, pending.committed(60).ref)),
        "committed": Action(
            lambda: repo.save(bench.names.fresh(), bench.tensors, graph=graph),
            lambda saved: retire(repo, saved.ref),
        ),
    }
    for peer in bench.peers:
        actions[peer.name] = _file_save(peer, bench.path(peer))
    found = alternate(actions, rounds=bench.rounds)
    copy_s = found[ONE_COPY].median
    staged = found["staged"]
    goals: tuple[Goal, ...] = ()
    if bench.case.staged_goal:
        goals = (Goal("staging in memory copies", staged.median / copy_s, at_most=bench.case.staged_goal),)
    report.add(Row(f"{bench.case.name}: staged", staged, bench.size, limit=ONE_COPY, limit_s=copy_s, goals=goals))
    for peer in bench.peers:
        row = Row(
            f"{bench.case.name}: save",
            found["committed"],
            bench.size,
            peer.name,
            found[peer.name],
            ONE_COPY,
            copy_s,
            _ratio_goals(SAVE_GOALS, peer, found["committed"], found[peer.name]),
        )
        report.add(row, headline=bench.case.headline and peer.name == HEADLINE_PEER)


def _file_save(peer: Peer, path: Path) -> Action:
    return Action(lambda: peer.save(path), lambda _: peer.remove(path))


def _ratio_goals(bounds: dict[str, float], peer: Peer, ours: Sample, theirs: Sample) -> tuple[Goal, ...]:
    if peer.name not in bounds:
        return ()
    return (Goal(f"times faster than {peer.name}", theirs.median / ours.median, at_least=bounds[peer.name]),)


def _memory(report: Report, bench: Bench) -> None:
    """Report what one save adds to the memory of a client that did not save such a model before."""
    took, growth = in_fresh_process(memory_of_save, bench.case.name, bench.effort)
    report.add(
        Row(
            f"{bench.case.name}: save, watching memory",
            Sample((took,)),
            bench.size,
            goals=(
                Goal("resident bytes beyond the model's", growth.rss_bytes - bench.size, at_most=MEMORY_GOAL),
                Goal("unshared bytes beyond the model's", growth.uss_bytes - bench.size, at_most=MEMORY_GOAL),
            ),
            facts={"rss_growth_bytes": growth.rss_bytes, "uss_growth_bytes": growth.uss_bytes},
        )
    )


def memory_of_save(case_name: str, effort: Effort) -> tuple[float, MemoryGrowth]:
    """Connect and save a case's model once from this process; give the seconds and the growth of its memory.

    A process that was connected before has shared memory mapped already: its growth would be too small.
    """
    from tensorvine.actors import Repository

    architecture = next(case for case in cases(effort) if case.name == case_name).build()
    tensors = architecture.tensors()
    took = 0.0

    def save() -> tuple[Repository, Any]:
        nonlocal took
        repo = Repository.connect(NAME)
        took, saved = timed(lambda: repo.save("memory", tensors, graph=architecture.graph))
        return repo, saved

    def leave(done: tuple[Repository, Any]) -> None:
        repo, saved = done
        retire(repo, saved.ref)
        repo.close()

    growth = memory_growth(Action(save, leave))
    return took, growth


def _loads(report: Report, bench: Bench) -> None:
    """Time full and partial loads, ours and the peers' in turn."""
    ref = bench.repo.save(bench.names.fresh(), bench.tensors, graph=bench.architecture.graph).ref
    for peer in bench.peers:
        peer.save(bench.path(peer))
    first = _first_loads(ref)
    actions = {
        ONE_VIEW: Action(lambda: {name: tensor.view() for name, tensor in bench.tensors.items()}),
        ONE_COPY: copy_action(bench.tensors, bench.buffers),
        "views": Action(lambda: bench.repo.load(ref)),
        "buffers": Action(lambda: bench.repo.load(ref, into=bench.buffers)),
    }
    for peer in bench.peers:
        actions[peer.name] = Action(lambda peer=peer: peer.load(bench.path(peer)))
    for fraction in bench.case.fractions:
        actions |= _partial_actions(bench, ref, fraction)
    found = alternate(actions, rounds=bench.rounds)
    for peer in bench.peers:
        _full_rows(report, bench, peer, found)
    theirs = bench.peers[0]
    report.add(
        Row(
            f"{bench.case.name}: a client's first load as views",
            first,
            bench.size,
            theirs.name,
            found[theirs.name],
            ROUND_TRIP,
            bench.round_trip_s,
        )
    )
    for fraction in bench.case.fractions:
        _partial_rows(report, bench, fraction, found)
    for peer in bench.peers:
        peer.remove(bench.path(peer))
    retire(bench.repo, ref)


def _partial_actions(bench: Bench, ref: Any, fraction: float) -> dict[str, Action]:
    layers = bench.architecture.leading_layers(fraction)
    names = bench.architecture.tensors_of(layers)
    buffers = {name: bench.buffers[name] for name in names}
    actions = {
        f"{ONE_COPY} {fraction}": copy_action({name: bench.tensors[name] for name in names}, buffers),
        f"views {fraction}": Action(lambda: bench.repo.load(ref, layers=layers)),
        f"buffers {fraction}": Action(lambda: bench.repo.load(ref, layers=layers, into=buffers)),
    }
    for peer in bench.peers:
        if peer.partial:
            actions[f"{peer.name} {fraction}"] = Action(lambda peer=peer: peer.load(bench.path(peer), names))
    return actions


def _first_loads(ref: Any) -> Sample:
    """Time the first load of clients that know nothing of the model yet."""
    from tensorvine.actors import Repository

    found: list[float] = []
    for _ in range(3):
        with Repository.connect(NAME) as client:
            found.append(timed(lambda client=client: client.load(ref))[0])
    return Sample(tuple(found))


def _full_rows(report: Report, bench: Bench, peer: Peer, found: dict[str, Sample]) -> None:
    """Add the rows of full loads beside one peer; the first peer's rows carry what concerns us alone."""
    theirs, copy_s = found[peer.name], found[ONE_COPY].median
    views, buffers = found["views"], found["buffers"]
    report.add(
        Row(
            f"{bench.case.name}: load as views",
            views,
            bench.size,
            peer.name,
            theirs,
            ONE_VIEW,
            found[ONE_VIEW].median,
            _ratio_goals(VIEW_GOALS, peer, views, theirs),
        )
    )
    alone = (Goal("memory copies", buffers.median / copy_s, at_most=1.3),) if peer is bench.peers[0] else ()
    report.add(
        Row(
            f"{bench.case.name}: load into buffers",
            buffers,
            bench.size,
            peer.name,
            theirs,
            ONE_COPY,
            copy_s,
            alone,
        )
    )


def _partial_rows(report: Report, bench: Bench, fraction: float, found: dict[str, Sample]) -> None:
    """Add one row per peer; one that cannot load a part, or not faster, stands with its full load."""
    names = bench.architecture.tensors_of(bench.architecture.leading_layers(fraction))
    size = total_bytes(bench.tensors, names)
    ours = found[f"buffers {fraction}"]
    of_full = ours.median / found["buffers"].median
    share = size / bench.size
    goals: tuple[Goal, ...] = ()
    if fraction == QUARTER:
        # Whole layers cannot always make up a quarter; the bound is held against what a quarter would cost.
        goals = (Goal("of a full load, for 25% of the bytes", of_full * fraction / share, at_most=0.30),)
    for peer in bench.peers:
        part = found.get(f"{peer.name} {fraction}")
        theirs = min((s for s in (part, found[peer.name]) if s), key=lambda sample: sample.median)
        facts: dict[str, float | int | str] = {"peer_loads": "part" if theirs is part else "all"}
        if peer is bench.peers[0]:
            facts |= {
                "of_full": of_full,
                "share_of_bytes": share,
                "views_s": found[f"views {fraction}"].median,
            }
        report.add(
            Row(
                f"{bench.case.name}: load {fraction:.0%} into buffers",
                ours,
                size,
                peer.name,
                theirs,
                ONE_COPY,
                found[f"{ONE_COPY} {fraction}"].median,
                goals if peer is bench.peers[0] else (),
                facts,
            )
        )
