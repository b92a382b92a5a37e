"""Saves and loads of whole models and of a quarter, compared with five file formats (DStore, sections 6.4 to 6.8).

Every save has a name of its own and is retired after, so that nothing is inherited and the store does not fill.
Files are in the temporary folder and are not synced.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .core.clusters import NAME, Names, repository, retire
from .core.fleet import in_fresh_process, round_trip_floor
from .core.measure import (
    GIB,
    MIB,
    ONE_COPY,
    ROUND_TRIP,
    Action,
    Sample,
    alternate,
    buffers_like,
    copying,
    memory_growth,
    progress,
    sample,
    timed,
    total_bytes,
)
from .core.models import Architecture, bert_large, synthetic, vgg19
from .core.peers import file_peers
from .core.report import Effort, Goal, Report

HEADLINE_PEER = "h5py"
ONE_VIEW = "one NumPy view a tensor"
SAVE_GOALS = {"h5py": 3.0, "keras .weights.h5": 5.0, "SavedModel": 20.0}
VIEW_GOALS = {"h5py": 100.0}
MEMORY_GOAL = 64 * MIB
QUARTER = 0.25


def cases(effort: Effort) -> dict[str, tuple[Callable[[], Architecture], bool]]:
    """Return the models by name: how to build them, and whether they have the headline and partial loads."""

    def chains(size: int, *counts: int) -> dict[str, Any]:
        names = {count: f"{size // MIB} MiB in {count} layers" for count in counts}
        return {names[count]: (lambda count=count: synthetic(size, count), count == 100) for count in counts}

    if effort is Effort.QUICK:
        return chains(4 * MIB, 100)
    large: dict[str, Any] = {"VGG19": (vgg19, False), "BERT-large": (bert_large, False)}
    return chains(256 * MIB, 10, 100, 1000) | chains(GIB, 10, 100, 1000) | large


def run(report: Report) -> None:
    """Measure all models."""
    store = report.pick(quick=GIB // 4, normal=4 * GIB)
    with repository(store) as repo, tempfile.TemporaryDirectory(prefix="save_load-") as folder:
        floor = round_trip_floor()
        for name, (build, headline) in cases(report.effort).items():
            progress(name)
            bench = _Bench(report, repo, Path(folder), name, build())
            bench.saves(headline)
            bench.memory()
            bench.loads(floor)


class _Bench:
    """The measurements with one model."""

    def __init__(self, report: Report, repo: Any, folder: Path, name: str, model: Architecture) -> None:
        self._report, self._repo, self._name, self._model = report, repo, name, model
        self._tensors = model.tensors()
        self._buffers = buffers_like(self._tensors)
        self._size = total_bytes(self._tensors)
        self._names = Names(f"save/{name.replace(' ', '_')}")
        self._rounds = 1 if report.effort is Effort.QUICK else 3 if self._size > 512 * MIB else 5
        self._peers = {peer: folder / peer.name.replace(" ", "_") for peer in file_peers()}
        for peer in self._peers:
            peer.hold(self._tensors)

    def saves(self, headline: bool) -> None:
        """Time staging and committed saves, TensorVine's and the peers' in turn."""
        repo, graph = self._repo, self._model.graph

        def stage() -> Any:
            pending = repo.save_async(self._names.fresh(), self._tensors, graph=graph)
            pending.staged(60)
            return pending

        actions: dict[str, Action] = {
            ONE_COPY: copying(self._tensors, self._buffers),
            "staged": (stage, lambda pending: retire(repo, pending.committed(60).ref)),
            "committed": (
                lambda: repo.save(self._names.fresh(), self._tensors, graph=graph),
                lambda saved: retire(repo, saved.ref),
            ),
        }
        for peer, path in self._peers.items():
            actions[peer.name] = (
                lambda peer=peer, path=path: peer.save(path),
                lambda _, peer=peer, path=path: peer.remove(path),
            )
        found = alternate(actions, rounds=self._rounds)
        floor = ONE_COPY, found[ONE_COPY]
        self._report.add(f"{self._name}: staged", found["staged"], self._size, floor=floor)
        for peer in self._peers:
            theirs = found[peer.name]
            self._report.add(
                f"{self._name}: save",
                found["committed"],
                self._size,
                peer=(peer.name, theirs),
                floor=floor,
                goals=_faster(SAVE_GOALS, peer.name, found["committed"], theirs),
                headline=headline and peer.name == HEADLINE_PEER,
            )

    def memory(self) -> None:
        """Measure the memory that one save adds to a client that did not save such a model before."""
        took, rss, uss = in_fresh_process(memory_of_save, self._name, self._report.effort)
        goals = [
            Goal(f"{what} bytes beyond the model's", growth - self._size, at_most=MEMORY_GOAL)
            for what, growth in (("resident", rss), ("unshared", uss))
        ]
        self._report.add(
            f"{self._name}: save, watching memory",
            sample(took),
            self._size,
            goals=goals,
            rss_growth_bytes=rss,
            uss_growth_bytes=uss,
        )

    def loads(self, trip: Sample) -> None:
        """Time full loads and loads of a quarter, TensorVine's and the peers' in turn."""
        repo, names = self._repo, self._model.leading_layers(QUARTER)
        part = self._model.tensors_of(names)
        buffers = {name: self._buffers[name] for name in part}
        ref = repo.save(self._names.fresh(), self._tensors, graph=self._model.graph).ref
        first = _first_loads(ref)
        actions: dict[str, Action] = {
            ONE_VIEW: lambda: {name: tensor.view() for name, tensor in self._tensors.items()},
            ONE_COPY: copying(self._tensors, self._buffers),
            "views": lambda: repo.load(ref),
            "buffers": lambda: repo.load(ref, into=self._buffers),
            "part copied": copying({name: self._tensors[name] for name in part}, buffers),
            "part": lambda: repo.load(ref, layers=names, into=buffers),
        }
        for peer, path in self._peers.items():
            peer.save(path)
            actions[peer.name] = lambda peer=peer, path=path: peer.load(path)
            if peer.partial:
                actions[f"{peer.name} part"] = lambda peer=peer, path=path: peer.load(path, part)
        found = alternate(actions, rounds=self._rounds)
        for peer, path in self._peers.items():
            self._rows(peer.name, found, total_bytes(self._tensors, part))
            peer.remove(path)
        self._report.add(
            f"{self._name}: a client's first load as views",
            first,
            self._size,
            peer=(HEADLINE_PEER, found[HEADLINE_PEER]),
            floor=(ROUND_TRIP, trip),
        )
        retire(repo, ref)

    def _rows(self, peer: str, found: dict[str, Sample], part_bytes: int) -> None:
        """Add the rows of loads next to one peer; the first peer's rows have the goals of TensorVine alone."""
        views, buffers, part, theirs = found["views"], found["buffers"], found["part"], found[peer]
        alone = peer == HEADLINE_PEER
        self._report.add(
            f"{self._name}: load as views",
            views,
            self._size,
            peer=(peer, theirs),
            floor=(ONE_VIEW, found[ONE_VIEW]),
            goals=_faster(VIEW_GOALS, peer, views, theirs),
        )
        copies = buffers.median / found[ONE_COPY].median
        self._report.add(
            f"{self._name}: load into buffers",
            buffers,
            self._size,
            peer=(peer, theirs),
            floor=(ONE_COPY, found[ONE_COPY]),
            goals=[Goal("memory copies", copies, at_most=1.3)] if alone else [],
        )
        # Whole layers cannot always make up a quarter; the bound holds for exactly a quarter.
        of_full = part.median / buffers.median
        of_quarter = of_full * QUARTER / (part_bytes / self._size)
        theirs = min((each for each in (found.get(f"{peer} part"), theirs) if each), key=lambda each: each.median)
        self._report.add(
            f"{self._name}: load 25% into buffers",
            part,
            part_bytes,
            peer=(peer, theirs),
            floor=(ONE_COPY, found["part copied"]),
            goals=[Goal("of a full load, for 25% of the bytes", of_quarter, at_most=0.30)] if alone else [],
            of_full=of_full,
        )


def _faster(bounds: dict[str, float], peer: str, ours: Sample, theirs: Sample) -> Sequence[Goal]:
    if peer not in bounds:
        return ()
    return (Goal(f"times faster than {peer}", theirs.median / ours.median, at_least=bounds[peer]),)


def _first_loads(ref: Any) -> Sample:
    """Time the first load of clients that have no metadata of the model."""
    from tensorvine.actors import Repository

    found: list[float] = []
    for _ in range(3):
        with Repository.connect(NAME) as client:
            found.append(timed(lambda client=client: client.load(ref))[0])
    return sample(found)


def memory_of_save(case: str, effort: Effort) -> tuple[float, int, int]:
    """Connect and save a model once from this process; return the seconds and the growth of its memory.

    A process that was connected before has mapped shared memory already: its growth would be too small.
    """
    from tensorvine.actors import Repository

    model = cases(effort)[case][0]()
    tensors = model.tensors()

    def save() -> tuple[float, Any, Any]:
        repo = Repository.connect(NAME)
        return *timed(lambda: repo.save("memory", tensors, graph=model.graph)), repo

    rss, uss, (took, saved, repo) = memory_growth(save)
    with repo:
        retire(repo, saved.ref)
    return took, rss, uss
