"""Writes to disk, reads of one tensor, and restarts, compared with plain files and file formats.

Rules
- The floor is the same bytes with plain `write` and `fsync`, into one file. Peers are followed by an fsync of their
  files and folders. Before each turn, what others left unwritten is synced, untimed; what was written is removed after.
- The shard writes, in a process of its own: wall clock from the call to its return. The memory that it copies tensors
  into was touched before. Every save is a root.
- One tensor is read through a repository that was just started, with nothing in memory. When a tensor of a segment was
  read, another read of the segment would read all of it; so each timed tensor is of another segment, and the repository
  is started again, untimed, when no segment is left. Reads find the files in the page cache, or dropped from it.
- A path to restart on is built by writing files, not by saving. Its models are as a search leaves them: many share an
  architecture, half derive from another one and inherit half of their tensors. Its files are in the page cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cache, partial
from hashlib import blake2b
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.encoding import Tensor, decode_slot, encode_tensors
from tensorvine.store.archive.manifestfile import Manifest
from tensorvine.store.versions.manifest import Header, TensorEntry

from .core.clusters import Names, quality_of
from .core.measure import GIB, MIB, Action, alternate, expect, progress, sample, timed, wait_until
from .core.models import nas_graphs, synthetic
from .core.peers import H5py, Peer, Plain, Safetensors, drop_from_cache, sync
from .core.report import Goal, Report

TIMEOUT_S = 600.0
"""For saves, loads and waits: a busy disk may take its time."""
SAVE, BEHIND = "save, on disk", "from commit to disk"
REPOSITORY, FILES, READ_FLOOR = "repository", "segment files", "plain read"
TENSORS, ITEMS, LAYERS = 60, 16, (20, 60)
"""Of a version of the path to restart on: tensors, values of each, least and greatest number of layers."""
MODELS_PER_ARCHITECTURE, WRITERS, SHARDS = 20, 16, (1, 2)
MANIFESTS = "reading the manifests' bytes"
_serial = count(1)


def run(report: Report) -> None:
    """Measure writes, reads and restarts."""
    from tensorvine.clusters.local import LocalCluster

    size, layers, rounds = report.pick(quick=(4 * MIB, 20, 1), normal=(GIB, 100, 3))
    with LocalCluster(object_store_bytes=128 * MIB), tempfile.TemporaryDirectory(prefix="persist-") as folder:
        _writes(report, Path(folder), size, layers, rounds)
        layers, ones = report.pick(quick=(20, 2), normal=(1000, 24))
        _reads(report, Path(folder), size, layers, (rounds, ones))
        _restarts(report, Path(folder), report.pick(quick=20, normal=10_000), rounds)


def start(path: Path, store_bytes: int, *, touched: int = 0, shards: int = 1) -> Any:
    """Start a repository on a path, under a name that was not used before.

    Args:
        path: The repository's.
        store_bytes: Capacity of each shard.
        touched: Bytes of it to take from the system now. Fresh pages cost more than writing a file does.
        shards: Number of shards.
    """
    from tensorvine.actors import Repository

    name = f"disk-{next(_serial)}"
    return Repository.start(name, path=path, shards=shards, store_bytes=store_bytes, preallocate_bytes=touched)


# ---- writes -----------------------------------------------------------------------------------------------


def _writes(report: Report, folder: Path, size: int, layers: int, rounds: int) -> None:
    """Time writing one model."""
    case, model, path = f"{size // MIB} MiB in {layers} tensors", synthetic(size, layers), folder / "writes"
    progress(f"writes of {case}")
    tensors, names = model.tensors(), Names("persist")
    peers = [Plain(), H5py(), Safetensors()]
    behind_s: list[float] = []

    def save(repo: Any) -> Any:
        return repo.save(names.fresh(), tensors, graph=model.graph, durability="disk", timeout=TIMEOUT_S)

    def save_behind(repo: Any) -> Any:
        saved = repo.save(names.fresh(), tensors, graph=model.graph, timeout=TIMEOUT_S)
        behind_s.append(timed(lambda: repo.flush(TIMEOUT_S))[0])
        return saved

    def forget(repo: Any, saved: Any) -> None:
        repo.retire(saved.ref)
        wait_until(lambda: repo.stats().bytes_memory == 0, f"no bytes in memory after {saved.ref}", timeout=TIMEOUT_S)
        wait_until(lambda: not any((path / "segments").iterdir()), f"no segments after {saved.ref}", timeout=TIMEOUT_S)
        os.sync()

    def write(peer: Peer) -> None:
        peer.save(folder / "peer")
        if not isinstance(peer, Plain):
            sync(folder / "peer")

    def remove(peer: Peer, _: None) -> None:
        peer.remove(folder / "peer")
        os.sync()

    with start(path, 2 * size + 64 * MIB, touched=size + 32 * MIB) as repo:
        actions: dict[str, Action] = {
            SAVE: (partial(save, repo), partial(forget, repo)),
            BEHIND: (partial(save_behind, repo), partial(forget, repo)),
        }
        for peer in peers:
            peer.hold(tensors)
            actions[peer.name] = partial(write, peer), partial(remove, peer)
        os.sync()
        found = alternate(actions, rounds=rounds)
    Peer.remove(path)
    found[BEHIND] = sample(behind_s[1:])
    plain = found[Plain.name]
    for way in (SAVE, BEHIND):
        for peer in peers[1:]:
            goal = Goal(f"of the throughput of {Plain.name}", plain.median / found[way].median, at_least=0.8)
            report.add(
                f"{case}: {way}",
                found[way],
                size,
                peer=(peer.name, found[peer.name]),
                floor=(Plain.name, plain),
                goals=[goal] if peer is peers[1] else [],
                headline=way == SAVE and peer is peers[1],
            )


# ---- reads ------------------------------------------------------------------------------------------------


class _SegmentFiles:
    """A version's tensors, read from the files without a repository."""

    def __init__(self, path: Path, ref: ModelRef) -> None:
        self._archive = Archive(str(path), create=False)
        manifest = self._archive.read_manifest(ref)
        self._places = {name: ((entry.segment, entry.slot), entry.nbytes) for name, entry in manifest.entries.items()}
        self._files = {segment: files[0] for segment, files in self._archive.segments().items()}

    def load(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Read all tensors, or those named, and check them."""
        with ExitStack() as stack:

            @cache
            def opened(segment: Any) -> Any:
                return stack.enter_context(closing(self._archive.open_segment(self._files[segment])))

            wanted = self._places if names is None else names
            return {name: decode_slot(*self._places[name], opened) for name in wanted}

    def one_of_each(self) -> list[str]:
        """Return one tensor of each segment: the middle one."""
        groups: dict[Any, list[str]] = {}
        for name, ((segment, _), _) in self._places.items():
            groups.setdefault(segment, []).append(name)
        return [names[len(names) // 2] for names in groups.values()]


class _Cold:
    """A repository that has nothing of a version in memory, or nothing of some segments."""

    def __init__(self, path: Path, ref: ModelRef, nbytes: int, names: Sequence[str]) -> None:
        self._given, self._ref, self._names = (path, nbytes), ref, names
        self._restart()

    def all(self) -> dict[str, Any]:
        """Load all tensors."""
        self._left = []
        return self._repo.load(self._ref, timeout=TIMEOUT_S)

    def one(self) -> dict[str, Any]:
        """Load a tensor of a segment from which no tensor was loaded before."""
        return self._repo.load(self._ref, tensors=[self._left.pop()], timeout=TIMEOUT_S)

    def cool(self) -> None:
        """Start again if no such segment is left."""
        if not self._left:
            self._repo.close()
            self._restart()

    def close(self) -> None:
        """Stop the repository."""
        self._repo.close()

    def _restart(self) -> None:
        path, nbytes = self._given
        self._repo = start(path, nbytes + 64 * MIB, touched=nbytes + 32 * MIB)
        self._left = list(self._names)


def _reads(report: Report, folder: Path, size: int, layers: int, rounds: tuple[int, int]) -> None:
    """Time reads of all tensors and of one, with the files in the page cache and dropped from it."""
    case, tensors, path = f"{size // MIB} MiB in {layers} tensors", synthetic(size, layers).tensors(), folder / "reads"
    with start(path, size + 64 * MIB) as repo:
        ref = repo.save("model", tensors, durability="disk", timeout=TIMEOUT_S).ref
    peers: dict[str, Peer] = {READ_FLOOR: Plain(), "h5py": H5py(), "safetensors": Safetensors()}
    for name, peer in peers.items():
        peer.hold(tensors)
        peer.save(folder / name)
        sync(folder / name)
    files = _SegmentFiles(path, ref)
    names = cycle(files.one_of_each())
    for state in ("cached", "dropped"):
        progress(f"reads of {case}, {state}")

        def prepare(_: object = None, state: str = state) -> None:
            if state == "dropped":
                drop_from_cache(folder)

        with closing(_Cold(path, ref, size, files.one_of_each())) as cold:

            def cool(_: object, cold: _Cold = cold) -> None:
                cold.cool()
                prepare()

            everything: dict[str, Action] = {REPOSITORY: (cold.all, cool), FILES: (files.load, prepare)}
            single: dict[str, Action] = {
                REPOSITORY: (cold.one, cool),
                FILES: (lambda: files.load([next(names)]), prepare),
            }
            for name, peer in peers.items():
                everything[name] = partial(peer.load, folder / name), prepare
                single[name] = lambda peer=peer, name=name: peer.load(folder / name, [next(names)]), prepare
            prepare()
            every, one = alternate(everything, rounds=rounds[0]), alternate(single, rounds=rounds[1])
        for level in (REPOSITORY, FILES):
            where, share = f"{case}, {state}, {level}", one[level].median / every[level].median
            for peer in ("h5py", "safetensors"):
                goal = Goal("of the time of reading it all", share, at_most=0.01)
                floor = READ_FLOOR, every[READ_FLOOR]
                report.add(f"{where}: all", every[level], size, peer=(peer, every[peer]), floor=floor)
                report.add(
                    f"{where}: one",
                    one[level],
                    size // layers,
                    peer=(peer, one[peer]),
                    floor=(READ_FLOOR, one[READ_FLOOR]),
                    goals=[goal] if peer == "h5py" and size == GIB else [],
                    of_all=share,
                    peer_of_all=one[peer].median / every[peer].median,
                )
    for name in (*peers, path.name):
        Peer.remove(folder / name)


# ---- restarts ---------------------------------------------------------------------------------------------


def _restarts(report: Report, folder: Path, models: int, rounds: int) -> None:
    """Time starts on a path with `models` models and on an empty one."""
    path, empty = folder / "models", folder / "empty"
    progress(f"writing {models} models")
    newest = _build(path, models)
    progress("starting on them")
    manifests = sorted(file for file in path.rglob("manifests/**/*") if file.is_file())

    def check(repo: Any) -> None:
        found = len(repo.load(newest, timeout=TIMEOUT_S))
        repo.close()
        expect(found == TENSORS, "persist", f"{TENSORS} tensors of {newest}")

    actions: dict[str, Action] = {MANIFESTS: lambda: [file.read_bytes() for file in manifests]}
    for shards in SHARDS:
        actions[f"models {shards}"] = partial(start, path, 64 * MIB, shards=shards), check
        actions[f"empty {shards}"] = partial(start, empty, 64 * MIB, shards=shards), lambda repo: repo.close()
    found = alternate(actions, rounds=rounds)
    size = sum(file.stat().st_size for file in manifests)
    for shards in SHARDS:
        ours, nothing = found[f"models {shards}"], found[f"empty {shards}"]
        goal = Goal(f"seconds to restore {models} models, in all", ours.median, at_most=10.0)
        report.add(
            f"start on {models} models, {shards} shard{'s' if shards > 1 else ''}",
            ours,
            size,
            peer=("an empty path", nothing),
            floor=(MANIFESTS, found[MANIFESTS]),
            goals=[goal],
            recovery_s=ours.median - nothing.median,
        )


def _build(path: Path, models: int) -> ModelRef:
    """Write a repository of an even number of models; the second half derives from the first. Return the newest."""
    archive, half = Archive(str(path)), models // 2
    known = _graphs(max(1, models // MODELS_PER_ARCHITECTURE))
    refs = [ModelRef(f"search/{place // 100:03d}/model-{place:05d}", 1) for place in range(models)]
    values = np.random.default_rng(0).integers(0, 256, (TENSORS, 4 * ITEMS), np.uint8)

    def write(place: int) -> None:
        parent = refs[place - half] if place >= half else None
        _write_model(archive, known[place % half % len(known)], place, refs[place], parent, half, values)

    with ThreadPoolExecutor(WRITERS) as pool:  # most of it is waiting for syncs
        for _ in pool.map(write, range(models)):
            pass
    return refs[-1]


def _graphs(wanted: int) -> list[ModelGraph]:
    """Draw different architectures of 20 to 60 layers; spread 60 tensors over the dense layers."""
    sources = cycle([nas_graphs(10 * wanted, branches, subgraphs=branches) for branches in (2, 3, 4)])
    found: dict[bytes, ModelGraph] = {}
    for source in islice(sources, 30 * wanted):
        graph = next(source)
        if LAYERS[0] <= len(graph.layers) <= LAYERS[1]:
            found.setdefault(graph.fingerprint, graph)
        if len(found) == wanted:
            break
    made: list[ModelGraph] = []
    for graph in found.values():
        named: dict[str, list[str]] = {each.name: [] for each in graph.layers if each.config["class"] == "Dense"}
        for place, name in zip(range(TENSORS), cycle(named), strict=False):
            named[name].append(f"{name}/{place}")
        made.append(ModelGraph([Layer(v.name, v.config, v.inputs, tuple(named.get(v.name, ()))) for v in graph.layers]))
    return made


def _write_model(
    archive: Archive, graph: ModelGraph, place: int, ref: ModelRef, parent: ModelRef | None, half: int, values: Any
) -> None:
    """Write a version: a child has the first half of its tensors from its parent, whose segment is `half` before."""
    text = graph.to_json()
    layers = {tensor: layer.name for layer in graph.layers for tensor in layer.tensors}
    names, inherited = list(layers), TENSORS // 2 if parent is not None else 0
    shape, nbytes, own, old = (ITEMS,), 4 * ITEMS, (0, place), (0, place - half)
    entries = {n: TensorEntry("float32", shape, nbytes, parent, old, i) for i, n in enumerate(names[:inherited])}
    tensors: list[Tensor] = []
    for slot, name in enumerate(names[inherited:]):
        entries[name] = TensorEntry("float32", shape, nbytes, None, own, slot)
        data, layer = values[slot] ^ place % 256, layers[name]
        tensors.append(Tensor(slot=slot, name=name, layer=layer, dtype="float32", shape=shape, data=data, digest=None))
    archive.write_segment(own, 0, *encode_tensors(None, tensors))
    header = Header(
        ref=ref,
        parent=parent,
        quality=quality_of(place),
        metadata=json.dumps({"place": place}),
        created_ns=10**18 + place,
        graph_key=blake2b(f"{text}\0None".encode(), digest_size=16).digest(),
        bytes_owned=nbytes * len(tensors),
        bytes_total=nbytes * TENSORS,
    )
    archive.write_manifest(Manifest(header, (text, None), entries, {}), layers)
