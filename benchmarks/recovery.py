"""Recovery: how long a repository takes to start on a path with many models.

Rules
- The path is built by writing files (`store.archive.archive`), not by saving. Its models are as a search leaves them:
  many share an architecture, half derive from another one and inherit half of their tensors.
- The tensors are tiny: a start reads none of them.
- The files have just been written, so they are in the page cache.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import Tensor, encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.versions.manifest import Header, TensorEntry

from .architectures import nas_graphs
from .callers import timed
from .disk import TIMEOUT_S, start
from .measure import Action, Goal, Report, Row, Sample, alternate, progress
from .session import quality_of

if TYPE_CHECKING:
    from tensorvine.actors import Repository

TENSORS = 60
ITEMS = 16
STORE_BYTES = 64 << 20
MODELS_PER_ARCHITECTURE = 20
LEAST_LAYERS, MOST_LAYERS = 20, 60
WRITERS = 16
"""Threads that write the path: most of that is waiting for syncs."""
SHARDS = (1, 2)
GOAL_S = 10.0
FLOOR = "reading the manifests' bytes"


@dataclass(frozen=True)
class Design:
    """An architecture, as models of the path have it."""

    text: str
    """The graph's JSON."""
    key: bytes
    layers: dict[str, str]
    """Tensor -> its layer."""

    @staticmethod
    def of(graph: ModelGraph) -> Design:
        """Return a graph's design."""
        text = graph.to_json()
        layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
        return Design(text, blake2b(f"{text}\0None".encode(), digest_size=16).digest(), layers)


def designs(count: int, seed: int = 0) -> list[Design]:
    """Draw different architectures of 20 to 60 layers and 60 tensors."""
    sources = cycle([nas_graphs(10 * count, seed + branches, subgraphs=branches) for branches in (2, 3, 4)])
    found: dict[bytes, ModelGraph] = {}
    for source in islice(sources, 30 * count):
        graph = next(source)
        if LEAST_LAYERS <= len(graph.layers) <= MOST_LAYERS:
            found.setdefault(graph.fingerprint, graph)
        if len(found) == count:
            break
    return [Design.of(_with_tensors(graph)) for graph in found.values()]


def _with_tensors(graph: ModelGraph) -> ModelGraph:
    """Spread the tensors over the dense layers."""
    named: dict[str, list[str]] = {layer.name: [] for layer in graph.layers if layer.config["class"] == "Dense"}
    for place, name in zip(range(TENSORS), cycle(named), strict=False):
        named[name].append(f"{name}/{place}")
    layers = [Layer(v.name, v.config, v.inputs, tuple(named.get(v.name, ()))) for v in graph.layers]
    return ModelGraph(layers)


def build(path: Path, models: int) -> list[ModelRef]:
    """Write a repository of `models` models with one version each; the second half derives from the first.

    Args:
        path: where; it is made.
        models: how many; even.

    Raises:
        ValueError: `models` is odd, or less than 2.
    """
    if models < 2 or models % 2:
        raise ValueError(f"repository to recover: expected an even number of models; found {models}")
    archive = Archive(str(path), shards=1)
    known = designs(max(1, models // MODELS_PER_ARCHITECTURE))
    half = models // 2
    refs = [ModelRef(f"search/{place // 100:03d}/model-{place:05d}", 1) for place in range(models)]
    values = np.random.default_rng(0).integers(0, 256, (TENSORS, 4 * ITEMS), np.uint8)

    def write(place: int) -> None:
        parent = refs[place - half] if place >= half else None
        _write_model(archive, known[place % half % len(known)], place, refs[place], parent, half, values)

    with ThreadPoolExecutor(WRITERS) as pool:
        for _ in pool.map(write, range(models)):
            pass
    return refs


def _write_model(
    archive: Archive, design: Design, place: int, ref: ModelRef, parent: ModelRef | None, half: int, values: Any
) -> None:
    """Write a version: a child has the first half of its tensors from its parent, whose segment is `half` before."""
    names = list(design.layers)
    inherited = TENSORS // 2 if parent is not None else 0
    shape, nbytes, own, old = (ITEMS,), 4 * ITEMS, (0, place), (0, place - half)
    entries = {n: TensorEntry("float32", shape, nbytes, parent, old, i) for i, n in enumerate(names[:inherited])}
    tensors: list[Tensor] = []
    for slot, name in enumerate(names[inherited:]):
        entries[name] = TensorEntry("float32", shape, nbytes, None, own, slot)
        tensors.append(
            Tensor(
                slot=slot,
                name=name,
                layer=design.layers[name],
                dtype="float32",
                shape=shape,
                data=values[slot] ^ place % 256,
                digest=None,
            )
        )
    archive.write_segment(own, 0, *encode_tensors(None, tensors))
    header = Header(
        ref=ref,
        parent=parent,
        quality=quality_of(place),
        metadata=json.dumps({"place": place}),
        created_ns=10**18 + place,
        graph_key=design.key,
        bytes_owned=nbytes * len(tensors),
        bytes_total=nbytes * TENSORS,
    )
    archive.write_manifest(Manifest(header, (design.text, None), entries, {}), design.layers)


def recoveries(report: Report, folder: Path, models: int, rounds: int, warmup: int) -> None:
    """Time starts on a path with `models` models and on an empty one, and the first load after each."""
    path, empty = folder / "models", folder / "empty"
    progress(f"writing {models} models")
    took, refs = timed(lambda: build(path, models))
    progress(f"written in {took:.0f} s; starting on them")
    loads: dict[int, list[float]] = {shards: [] for shards in SHARDS}
    manifests = sorted(file for file in path.rglob("manifests/**/*") if file.is_file())
    actions = {FLOOR: Action(lambda: [file.read_bytes() for file in manifests])}
    for shards in SHARDS:
        on_models = partial(start, path, STORE_BYTES, shards=shards)
        actions[f"models {shards}"] = Action(on_models, partial(_first_load, refs[-1], loads[shards]))
        on_empty = partial(start, empty, STORE_BYTES, shards=shards)
        actions[f"empty {shards}"] = Action(on_empty, lambda repo: repo.close())
    found = alternate(actions, rounds=rounds, warmup=warmup)
    size = sum(file.stat().st_size for file in manifests)
    for shards in SHARDS:
        ours, nothing = found[f"models {shards}"], found[f"empty {shards}"]
        case = f"start on {models} models, {shards} shard{'s' if shards > 1 else ''}"
        goal = Goal(f"seconds to bring {models} models back, in all", ours.median, at_most=GOAL_S)
        facts = {"empty_s": nothing.median, "recovery_s": ours.median - nothing.median, "models": models}
        report.add(Row(case, ours, size, "an empty path", nothing, FLOOR, found[FLOOR].median, (goal,), facts))
        report.add(Row(f"{case}: first load after", Sample(tuple(loads[shards][-rounds:])), 4 * ITEMS * TENSORS))


def _first_load(ref: ModelRef, loads: list[float], repo: Repository) -> None:
    took, loaded = timed(lambda: repo.load(ref, timeout=TIMEOUT_S))
    if len(loaded) != TENSORS:
        raise RuntimeError(f"recovery: {ref}: expected {TENSORS} tensors; found {len(loaded)}")
    loads.append(took)
    repo.close()
