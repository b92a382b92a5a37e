"""Saves that change a part of the tensors (EvoStore, section 5.4), beside h5py, which writes everything.

The parent stays; each child is retired after its save. `inherit={...}` is EvoStore's case, where the caller
knows which layers were frozen; with `inherit="auto"` the repository finds the unchanged tensors by their
bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .architectures import Architecture, synthetic
from .measure import (
    GIB,
    MIB,
    ONE_COPY,
    Action,
    Effort,
    Goal,
    Report,
    Row,
    Sample,
    Tensors,
    alternate,
    buffers_like,
    copy_action,
    total_bytes,
)
from .peers import H5py
from .session import Names, repository, retire

if TYPE_CHECKING:
    from tensorvine.actors import Repository

LAYERS = 100
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
Inherit = Mapping[str, str] | Literal["auto"]


def run(effort: Effort) -> Report:
    """Measure all fractions, both ways of inheriting."""
    size, store = (128 * MIB, GIB) if effort is Effort.QUICK else (GIB, 4 * GIB)
    report = Report("incremental")
    with repository(store) as repo, tempfile.TemporaryDirectory(prefix="incremental-") as folder:
        _Family(repo, synthetic(size, LAYERS), Path(folder)).measure(report)
    return report


class _Family:
    """A parent, and children that change their last layers."""

    def __init__(self, repo: Repository, architecture: Architecture, folder: Path) -> None:
        self._repo = repo
        self._architecture = architecture
        self._tensors = architecture.tensors(seed=0)
        self._changed = architecture.tensors(seed=1)
        self._buffers = buffers_like(self._tensors)
        self._file = folder / "model.h5"
        self._names = Names("child")
        self._peer = H5py()
        self._peer.hold(self._changed)
        self._parent = repo.save("parent", self._tensors, graph=architecture.graph).ref

    def measure(self, report: Report) -> None:
        actions = {"h5py": Action(lambda: self._peer.save(self._file), lambda _: self._peer.remove(self._file))}
        for fraction in FRACTIONS:
            changed = self._changed_part(fraction)
            actions[f"{ONE_COPY} {fraction}"] = copy_action(changed, self._buffers)
            for way in ("explicit", "auto"):
                actions[f"{way} {fraction}"] = self._save_action(fraction, way)
        found = alternate(actions, rounds=5)
        for fraction in FRACTIONS:
            for way in ("explicit", "auto"):
                row = self._row(fraction, way, found)
                report.add(row, headline=fraction == FRACTIONS[0] and way == "explicit")
        report.add(self._metadata())

    def _frozen(self, fraction: float) -> dict[str, str]:
        weighted = [layer.name for layer in self._architecture.graph.layers if layer.tensors]
        return {name: name for name in weighted[: round(len(weighted) * (1 - fraction))]}

    def _changed_part(self, fraction: float) -> Tensors:
        kept = set(self._architecture.tensors_of(list(self._frozen(fraction))))
        return {name: tensor for name, tensor in self._changed.items() if name not in kept}

    def _save(self, tensors: Tensors, inherit: Inherit) -> Any:
        graph = self._architecture.graph
        return self._repo.save(self._names.fresh(), tensors, graph=graph, parent=self._parent, inherit=inherit)

    def _save_action(self, fraction: float, way: str) -> Action:
        changed = self._changed_part(fraction)
        after = lambda saved: retire(self._repo, saved.ref, total_bytes(self._tensors))  # noqa: E731
        if way == "auto":
            tensors = self._tensors | changed
            return Action(lambda: self._save(tensors, "auto"), after)
        frozen = self._frozen(fraction)
        return Action(lambda: self._save(changed, frozen), after)

    def _row(self, fraction: float, way: str, found: dict[str, Sample]) -> Row:
        ours = found[f"{way} {fraction}"]
        of_full = ours.median / found[f"{way} 1.0"].median
        size = total_bytes(self._changed_part(fraction))
        before = self._repo.stats().bytes_memory
        saved = self._save_action(fraction, way).run()
        space = self._repo.stats().bytes_memory - before
        retire(self._repo, saved.ref, before)
        goals = [Goal("bytes stored beyond the changed ones", space - size, at_most=0)]
        if fraction == FRACTIONS[0]:
            goals.append(Goal("of a full save", of_full, at_most=0.35))
        return Row(
            f"{fraction:.0%} changed, inherit {way}",
            ours,
            size,
            "h5py, all tensors",
            found["h5py"],
            ONE_COPY,
            found[f"{ONE_COPY} {fraction}"].median,
            tuple(goals),
            {"of_full": of_full, "bytes_written": saved.bytes_written, "space_bytes": space},
        )

    def _metadata(self) -> Row:
        """Save a child that changes nothing: what it takes is metadata alone."""
        frozen = self._frozen(0.0)
        before = self._repo.stats()
        samples = alternate({"child": Action(lambda: self._save({}, frozen))}, rounds=10)
        after = self._repo.stats()
        metadata = sum(s.bytes_metadata for s in after.shards) - sum(s.bytes_metadata for s in before.shards)
        per_layer = metadata / (after.models - before.models) / LAYERS
        return Row(
            "nothing changed, inherit explicit",
            samples["child"],
            total_bytes(self._tensors),
            goals=(Goal("bytes of metadata a layer", per_layer, at_most=1024),),
            facts={"space_bytes": after.bytes_memory - before.bytes_memory},
        )
