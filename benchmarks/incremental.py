"""Saves that change 25 to 100% of the tensors, compared with h5py (EvoStore, section 5.4).

The parent stays; each child is retired after its save. `inherit={...}` is EvoStore's case, where the caller knows which
layers were frozen. With `inherit="auto"` the repository finds the unchanged tensors by their bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .core.clusters import Names, repository, retire
from .core.measure import GIB, MIB, ONE_COPY, Action, Sample, Tensors, alternate, buffers_like, copying, total_bytes
from .core.models import Architecture, synthetic
from .core.peers import H5py
from .core.report import Effort, Goal, Report

LAYERS = 100
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
WAYS = ("explicit", "auto")
ROUNDS = 5


def run(report: Report) -> None:
    """Measure all fractions, both ways of inheriting."""
    size = report.pick(quick=4 * MIB, normal=GIB)
    with repository(4 * size + GIB // 4) as repo, tempfile.TemporaryDirectory(prefix="incremental-") as folder:
        _Family(repo, synthetic(size, LAYERS), Path(folder)).measure(report)


class _Family:
    """A parent, and children that change its last layers."""

    def __init__(self, repo: Any, model: Architecture, folder: Path) -> None:
        self._repo, self._model, self._file = repo, model, folder / "model.h5"
        self._tensors, self._changed = model.tensors(seed=0), model.tensors(seed=1)
        self._size = total_bytes(self._tensors)
        self._names = Names("child")
        self._parent = repo.save("parent", self._tensors, graph=model.graph).ref

    def measure(self, report: Report) -> None:
        peer, buffers = H5py(), buffers_like(self._tensors)
        peer.hold(self._changed)
        actions: dict[str, Action] = {"h5py": (lambda: peer.save(self._file), lambda _: peer.remove(self._file))}
        for fraction in FRACTIONS:
            actions[f"{ONE_COPY} {fraction}"] = copying(self._changed_part(fraction), buffers)
            for way in WAYS:
                actions[f"{way} {fraction}"] = self._action(fraction, way)
        found = alternate(actions, rounds=1 if report.effort is Effort.QUICK else ROUNDS)
        for fraction in FRACTIONS:
            for way in WAYS:
                self._row(report, fraction, way, found)
        self._metadata(report)

    def _frozen(self, fraction: float) -> dict[str, str]:
        weighted = [layer.name for layer in self._model.graph.layers if layer.tensors]
        return {name: name for name in weighted[: round(len(weighted) * (1 - fraction))]}

    def _changed_part(self, fraction: float) -> Tensors:
        kept = set(self._model.tensors_of(list(self._frozen(fraction))))
        return {name: tensor for name, tensor in self._changed.items() if name not in kept}

    def _save(self, tensors: Tensors, inherit: Mapping[str, str] | Literal["auto"]) -> Any:
        graph = self._model.graph
        return self._repo.save(self._names.fresh(), tensors, graph=graph, parent=self._parent, inherit=inherit)

    def _action(self, fraction: float, way: str) -> tuple[Any, Any]:
        changed, frozen = self._changed_part(fraction), self._frozen(fraction)
        given = (self._tensors | changed, "auto") if way == "auto" else (changed, frozen)
        return lambda: self._save(*given), lambda saved: retire(self._repo, saved.ref, self._size)

    def _row(self, report: Report, fraction: float, way: str, found: dict[str, Sample]) -> None:
        ours = found[f"{way} {fraction}"]
        of_full = ours.median / found[f"{way} 1.0"].median
        size = total_bytes(self._changed_part(fraction))
        before = self._repo.stats().bytes_memory
        saved = self._action(fraction, way)[0]()
        space = self._repo.stats().bytes_memory - before
        retire(self._repo, saved.ref, before)
        least = fraction == FRACTIONS[0]
        goals = [Goal("bytes stored beyond the changed ones", space - size, at_most=0)]
        report.add(
            f"{fraction:.0%} changed, inherit {way}",
            ours,
            size,
            peer=("h5py, all tensors", found["h5py"]),
            floor=(ONE_COPY, found[f"{ONE_COPY} {fraction}"]),
            goals=[*goals, *([Goal("of a full save", of_full, at_most=0.35)] if least else [])],
            headline=least and way == "explicit",
            of_full=of_full,
            bytes_written=saved.bytes_written,
            space_bytes=space,
        )

    def _metadata(self, report: Report) -> None:
        """Save children that change nothing: they take metadata alone."""
        frozen, before = self._frozen(0.0), self._repo.stats()
        ours = alternate({"child": lambda: self._save({}, frozen)}, rounds=10)["child"]
        after = self._repo.stats()
        metadata = after.catalog.bytes_metadata - before.catalog.bytes_metadata
        per_layer = metadata / (after.models - before.models) / LAYERS
        report.add(
            "nothing changed, inherit explicit",
            ours,
            self._size,
            goals=[Goal("bytes of metadata a layer", per_layer, at_most=1024)],
            space_bytes=after.bytes_memory - before.bytes_memory,
        )
