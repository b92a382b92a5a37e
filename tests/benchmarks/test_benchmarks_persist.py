"""The persistence benchmark: the floor, DCP and Orbax, the page cache, the path to recover, and all of it, quick."""

from __future__ import annotations

import doctest
import importlib.util
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorvine.store import ModelGraph
from tensorvine.store.archive.archive import Archive

from benchmarks import disk, partial_read, persist, recovery, start, trained
from benchmarks.architectures import synthetic
from benchmarks.disk import Dcp, Plain, disk_peers, drop_from_cache, sync
from benchmarks.measure import MIB, Effort, Report, Row, Sample
from benchmarks.partial_read import Cold, SegmentFiles
from benchmarks.peers import H5py, Peer, Safetensors
from benchmarks.persist import PersistReport
from benchmarks.training import Recipe
from tests.support.page_cache import cached, evict

PEERS = [H5py(), Safetensors()]

# ---- the floor and the peers ----------------------------------------------------------------------------


@pytest.mark.parametrize("writer", [Plain(), Plain(split_as_ours=True), Dcp()], ids=["one", "split", "DCP"])
def test_whoever_writes_to_disk_gives_all_and_single_tensors_back(writer: Peer, tmp_path: Path) -> None:
    check_peer(writer, tmp_path)


def test_orbax_gives_all_and_single_tensors_back(tmp_path: Path) -> None:
    """In a process of its own: JAX, which comes with it, warns at each later fork of its process."""
    if importlib.util.find_spec("orbax") is None:
        pytest.skip("Orbax is not installed")
    script = "import sys; from pathlib import Path; from benchmarks.disk import Orbax"
    script += (
        "; from tests.benchmarks.test_benchmarks_persist import check_peer; check_peer(Orbax(), Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=110)


def check_peer(writer: Peer, folder: Path) -> None:
    tensors = synthetic(MIB, 7, deviation=0.3).tensors(seed=5)
    tensors["square/kernel"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = folder / "model"
    writer.hold(tensors)
    writer.save(path)
    sync(path)
    writer.hold({name: np.zeros_like(tensor) for name, tensor in tensors.items()})
    for names in (None, ["square/kernel", "layer_0002/kernel"]):
        loaded = writer.load(path, names)
        assert set(loaded) == set(names or tensors)
        for name, tensor in loaded.items():
            np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
            assert tensor.dtype == tensors[name].dtype
    writer.remove(path)
    assert not any(folder.iterdir())


def test_the_plain_files_have_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(3 * MIB, i, np.uint8) for i in range(13)} | {"none": np.zeros((2, 0))}
    for number, plain in enumerate((Plain(), Plain(split_as_ours=True))):
        plain.hold(tensors)
        plain.save(tmp_path / str(number))
    assert [file.stat().st_size for file in (tmp_path / "0").iterdir()] == [39 * MIB]
    assert sorted(file.stat().st_size for file in (tmp_path / "1").iterdir()) == [9 * MIB, 30 * MIB]


def test_a_plain_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    plain = Plain()
    plain.hold({"a": np.ones(100)})
    plain.save(tmp_path / "model")
    os.truncate(tmp_path / "model/0", 700)
    with pytest.raises(EOFError, match="100 more bytes at 700"):
        plain.load(tmp_path / "model")


def test_orbax_is_measured_or_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise disk.PackageNotFoundError(name)

    peers, about = disk_peers()
    assert ("Orbax" in [peer.name for peer in peers]) is ("missing" not in about[0])
    monkeypatch.setattr(disk, "version", missing)
    peers, about = disk_peers()
    assert [peer.name for peer in peers] == ["h5py", "safetensors", "torch.save", "DCP"]
    assert "Orbax is missing" in about[0]


def test_what_is_dropped_from_the_page_cache_is_not_there_any_more(tmp_path: Path) -> None:
    file = tmp_path / "folder/file"
    file.parent.mkdir()
    file.write_bytes(bytes(MIB))
    sync(file.parent)

    assert cached(file) == MIB
    drop_from_cache(tmp_path)
    left = cached(file)
    evict(file)
    if cached(file):
        pytest.skip("this file system keeps its files in memory")
    assert not left


# ---- reads of one tensor --------------------------------------------------------------------------------


def test_a_cold_repository_reads_one_segment_at_a_time_and_starts_anew_after_the_last(
    cluster: object, tmp_path: Path
) -> None:
    tensors = synthetic(80 * MIB, 10).tensors()
    with disk.start(tmp_path, 128 * MIB) as repo:
        ref = repo.save("model", tensors, durability="disk").ref
    files = SegmentFiles(tmp_path, ref)
    names = files.one_of_each()
    assert len(names) == len(Archive(str(tmp_path), shards=1).segments()) == 3
    cold = Cold(tmp_path, ref, 80 * MIB, names)
    try:
        for place, name in enumerate(reversed(names)):
            (found,) = cold.one().items()
            assert found[0] == name
            np.testing.assert_array_equal(found[1], tensors[name])
            del found
            assert cold._repo.stats().bytes_memory == 8 * MIB * (place + 1)
            cold.cool(None)
        assert cold._repo.stats().bytes_memory == 0
        assert cold.all().keys() == tensors.keys()
        cold.cool(None)
        assert cold._repo.stats().bytes_memory == 0
        assert list(cold.first()) == names[-1:]
        cold.cool(None)
        assert cold._repo.stats().bytes_memory == 0
    finally:
        cold.close()
    for name, tensor in files.load().items():
        np.testing.assert_array_equal(tensor, tensors[name])
    assert list(files.load(names[:1])) == names[:1]


# ---- recovery -------------------------------------------------------------------------------------------


def test_designs_differ_and_have_the_layers_and_tensors_asked_for() -> None:
    designs = recovery.designs(40)
    graphs = [ModelGraph.from_json(design.text) for design in designs]
    assert len({graph.fingerprint for graph in graphs}) == len(designs) == 40
    counts = [len(graph.layers) for graph in graphs]
    assert 20 <= min(counts) < 35 < max(counts) <= 60
    assert {len(graph.tensors) for graph in graphs} == {recovery.TENSORS}
    assert all(design.layers.keys() == set(graph.tensors) for design, graph in zip(designs, graphs, strict=True))


@pytest.mark.parametrize("models", [0, 7])
def test_a_path_of_an_odd_number_of_models_is_refused(models: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even number of models; found"):
        recovery.build(tmp_path, models)


def test_the_path_that_is_built_is_a_repository_without_faults(cluster: object, tmp_path: Path) -> None:
    refs = recovery.build(tmp_path, 40)
    with disk.start(tmp_path, 64 * MIB, shards=2) as repo:
        assert repo.models() == sorted(refs)
        assert repo.verify() == []
        root, child = refs[3], refs[23]
        assert repo.lineage(child) == [child, root]
        assert {ref: len(names) for ref, names in repo.contributions(child).items()} == {root: 30, child: 30}
        theirs, ours = repo.load(root), repo.load(child)
        same = {name for name in ours if np.array_equal(ours[name], theirs[name], equal_nan=True)}
        assert same == set(repo.contributions(child)[root])
        assert repo.graph(child) == repo.graph(root)
        saved = repo.save(root.name, theirs, graph=repo.graph(root))
        assert saved.bytes_written == 0, "the graph is found by its key, and nothing has changed"
        assert repo.stats().models == 41


def test_a_start_on_a_history_stands_beside_files_and_the_floor(cluster: object, tmp_path: Path) -> None:
    report, size = Report("start"), start.Size(2, 30)
    start.measure(report, size, tmp_path, rounds=1)
    to_the_first_load, empty, whole = report.rows
    assert (to_the_first_load.peer, to_the_first_load.facts["tensors"]) == ("safetensors", 60)
    assert to_the_first_load.facts["empty_s"] == empty.ours.median
    assert to_the_first_load.size_bytes > 60 * 4 * start.ITEMS
    assert not to_the_first_load.goals, "the goal is meant for a million tensors"
    assert whole.size_bytes == 30 * 4 * start.ITEMS


# ---- the benchmark --------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_version_that_was_measured(cluster: object, tmp_path: Path) -> None:
    tensors = synthetic(2 * MIB, 10).tensors()
    with disk.start(tmp_path, 64 * MIB) as repo:
        ours = persist.Ours(repo, tmp_path, tensors)
        for save in (ours.save, ours.save_behind):
            saved = save()
            assert len(list((tmp_path / "manifests").rglob("*.arrow"))) >= 1
            ours.forget(saved)
            assert 2 * MIB < ours.nbytes < 2.2 * MIB
            assert (repo.models(), repo.stats().bytes_disk) == ([], 0)
        assert len(ours.behind_s) == 1


def test_the_notes_are_printed_and_in_the_json() -> None:
    report = PersistReport("persist", [Row("save", Sample((1.0,)), MIB)], notes=["Orbax is missing: no such package"])
    text = io.StringIO()
    report.print(Console(file=text, width=200))
    assert "Orbax is missing" in text.getvalue()
    assert report.as_dict()["notes"] == report.notes


@pytest.fixture(scope="module")
def quick(cluster: object) -> dict[str, Any]:
    """Run it on little, and without JAX in this process (see above)."""
    plan = persist.PLANS[Effort.QUICK]
    small = replace(plan, size=4 * MIB, layers=(10,), models=20, trained_bytes=MIB)
    small = replace(small, rounds=1, read_rounds=(1, 1), warmup=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(persist.PLANS, Effort.QUICK, small)
        patch.setitem(trained.QUICK, "resnet", Recipe("resnet", width=16, steps=10, batch=8, rate=0.02))
        patch.setattr(persist, "disk_peers", lambda: (PEERS, ["Orbax is not asked"]))
        patch.setattr(partial_read, "STATES", (partial_read.DROPPED,))
        patch.setattr(recovery, "SHARDS", (2,))
        return persist.run(Effort.QUICK).as_dict()


@pytest.mark.timeout(400)
class TestQuick:
    def test_writes_stand_beside_the_floor_and_every_peer(self, quick: dict[str, Any]) -> None:
        names = {peer.name for peer in PEERS} | {"as many plain files"}
        for way in (persist.OURS, persist.BEHIND):
            rows = [row for row in quick["rows"] if row["case"].endswith(f"10 tensors: {way}")]
            assert {row["peer"] for row in rows} == names
            assert {row["limit"] for row in rows} == {"plain write + fsync"}
            (goal,) = [goal for row in rows for goal in row["goals"]]
            assert goal["value"] == pytest.approx(1 / rows[0]["limit_ratio"])
            assert goal["reached"] is (goal["value"] >= 0.8)

    @pytest.mark.parametrize("level", [partial_read.REPOSITORY, partial_read.FILES])
    def test_reads_of_one_tensor_stand_beside_those_of_all(self, quick: dict[str, Any], level: str) -> None:
        where = f"4 MiB in 100 tensors, {partial_read.DROPPED}, {level}: "
        one = [row for row in quick["rows"] if row["case"] == f"{where}one"]
        everything = [row for row in quick["rows"] if row["case"] == f"{where}all"]
        assert [row["peer"] for row in one] == [row["peer"] for row in everything] == [peer.name for peer in PEERS]
        for row, whole in zip(one, everything, strict=True):
            assert row["of_all"] == pytest.approx(row["ours_s"] / whole["ours_s"])
            assert row["peer_of_all"] == pytest.approx(row["peer_s"] / whole["peer_s"])
            assert row["size_bytes"] == whole["size_bytes"] // 100

    def test_codecs_say_what_they_save(self, quick: dict[str, Any]) -> None:
        found = {row["case"].partition(": ")[2]: row for row in quick["rows"] if "trained" in row["case"]}
        assert found["Quantize(8) | Zstd"]["of_bytes"] < 0.26 < found["Shuffle | Zstd"]["of_bytes"] < 0.95
        assert {row["peer"] for row in found.values()} == {"ours, as they are"}

    def test_recovery_is_held_against_its_goal_and_an_empty_start(self, quick: dict[str, Any]) -> None:
        (row,) = [row for row in quick["rows"] if row["case"] == "start on 20 models, 2 shards"]
        assert row["recovery_s"] == pytest.approx(row["ours_s"] - row["empty_s"])
        assert row["goals"][0]["value"] == row["ours_s"]
        assert [r for r in quick["rows"] if r["case"] == "start on 20 models, 2 shards: first load after"]


@pytest.mark.parametrize("module", [disk, partial_read, persist, recovery])
def test_examples_in_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
