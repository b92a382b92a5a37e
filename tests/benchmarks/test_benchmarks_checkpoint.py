"""The checkpoint benchmark: trainings, trained weights, Check-QZP's variants, the load, and all of it, quick."""

from __future__ import annotations

import doctest
import gzip
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from rich.console import Console

from benchmarks import checkpoint, file_load, qzp, trained, training
from benchmarks.checkpoint import CheckpointReport, Figures
from benchmarks.measure import MIB, Effort, Row, Sample
from benchmarks.qzp import Parallel, Synchronous, TorchSave, bytes_with_one_scale, quantised, write
from benchmarks.training import Recipe, Task

SMALL: dict[Task, Recipe] = {
    "resnet": Recipe("resnet", width=4, steps=3, batch=8, rate=0.02),
    "ptychonn": Recipe("ptychonn", width=2, steps=3, batch=2, rate=1e-3),
    "words": Recipe("words", width=4, steps=3, batch=16, rate=5e-3),
}
TASKS = tuple(SMALL)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where other tests run, too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def state() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.standard_normal((40, 25), dtype=np.float32),
        "bias": np.full(7, 0.5, np.float32),
        "steps": np.array(12, np.int64),
        "none": np.zeros((0, 3), np.float32),
    }


@pytest.fixture
def small_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trained, "QUICK", SMALL)
    monkeypatch.setattr(trained.tempfile, "gettempdir", lambda: str(tmp_path))


# ---- training and trained weights -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "width", "parameters"), [("resnet", 64, 11_173_962), ("ptychonn", 32, 1_154_210), ("words", 8, None)]
)
def test_networks_have_the_published_sizes(task: Task, width: int, parameters: int | None) -> None:
    model = training.training(Recipe(task, width, 1, 1, 1e-3)).model
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == (parameters or width * (training.Words.rows + len(training._text()[1])))


@pytest.mark.parametrize("task", TASKS)
def test_the_same_recipe_trains_to_the_same_first_losses_and_leaves_the_random_state_alone(task: Task) -> None:
    import torch

    before = torch.random.get_rng_state()
    losses = []
    for _ in range(2):
        run = training.training(SMALL[task])
        losses.append([run.step() for _ in range(2)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_training_lowers_its_loss() -> None:
    run = training.training(Recipe("words", width=8, steps=0, batch=128, rate=0.02))
    losses = [run.step() for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


@pytest.mark.parametrize("task", TASKS)
def test_the_state_is_a_view_of_what_the_training_changes(task: Task) -> None:
    run = training.training(SMALL[task])
    run.step()
    views = run.weights() | run.optimizer_state()
    assert any(name.startswith("optimizer/") for name in views)
    before = {name: value.copy() for name, value in views.items()}
    run.step()
    assert any((views[name] != before[name]).any() for name in views)


@pytest.mark.usefixtures("small_recipes")
@pytest.mark.parametrize("task", TASKS)
def test_fine_tuning_changes_some_tensors_and_leaves_the_frozen_ones(task: Task) -> None:
    first, *others = versions = trained.fine_tuning(task, 3, quick=True)
    frozen = training.training(SMALL[task]).frozen
    for earlier, later in zip(versions, others, strict=False):
        changed = {name for name in first if (earlier[name] != later[name]).any()}
        assert changed
        assert not [name for name in changed if name.startswith(frozen)]


@pytest.mark.usefixtures("small_recipes")
def test_fine_tuning_word_vectors_changes_few_rows() -> None:
    before, after = (version["grams.weight"] for version in trained.fine_tuning("words", 2, quick=True))
    assert 0 < (before != after).any(1).mean() < 0.1


@pytest.mark.usefixtures("small_recipes")
def test_weights_are_trained_once_and_again_for_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings: list[Recipe] = []
    train = trained._train
    monkeypatch.setattr(trained, "_train", lambda recipe: trainings.append(recipe) or train(recipe))
    first = trained.trained_weights("resnet", quick=True)
    again = trained.trained_weights("resnet", quick=True)
    assert len(trainings) == 1
    assert all(np.array_equal(first[name], again[name]) for name in first)
    other = Recipe("resnet", width=4, steps=3, batch=8, rate=0.01)
    monkeypatch.setattr(trained, "QUICK", {"resnet": other})
    assert not np.array_equal(trained.trained_weights("resnet", quick=True)["head.weight"], first["head.weight"])
    assert trainings == [SMALL["resnet"], other]


@pytest.mark.usefixtures("small_recipes")
def test_the_state_has_the_weights_and_the_optimizer_s_tensors() -> None:
    state = trained.trained_state("ptychonn", quick=True)
    weights = trained.trained_weights("ptychonn", quick=True)
    assert set(weights) == {name for name in state if not name.startswith("optimizer/")}
    assert {f"optimizer/exp_avg/{name}" for name in weights} < set(state)


def test_no_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least one version; found 0"):
        trained.fine_tuning("resnet", 0, quick=True)


@given(nbytes=st.integers(1, 3000))
def test_tiling_reaches_the_size_with_copies_that_differ_a_little(nbytes: int) -> None:
    weights = {"a": np.linspace(1, 2, 100, dtype=np.float32), "n": np.arange(3)}
    made = trained.tiled(weights, nbytes)
    total = sum(value.nbytes for value in made.values())
    assert nbytes <= total < nbytes + 400
    assert all(made[name] is weights[name] for name in weights if name in made)
    if "copy1/a" in made:
        assert made["copy1/a"].dtype == np.float32
        np.testing.assert_allclose(made["copy1/a"], weights["a"], rtol=0.01)
        assert (made["copy1/a"] != weights["a"]).mean() > 0.9
    if "copy1/n" in made:
        np.testing.assert_array_equal(made["copy1/n"], weights["n"])


@pytest.mark.parametrize("weights", [{}, {"none": np.zeros(0, np.float32)}])
def test_nothing_cannot_be_tiled(weights: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        trained.tiled(weights, 10)


# ---- Check-QZP ------------------------------------------------------------------------------------------


@example(np.array([1e-45, 0], np.float32))
@given(arrays(np.float32, array_shapes(min_side=0, max_side=8), elements=st.floats(-1e3, 1e3, width=32)))
def test_quantised_values_are_at_most_half_a_step_off(value: np.ndarray) -> None:
    if not value.size:
        assert quantised(value) is value
        return
    codes, low, scale = quantised(value)
    assert codes.dtype == np.uint8
    assert codes.shape == value.shape
    assert np.abs(low + codes * np.float64(scale) - value).max() <= scale * 0.501 + 1e-6 * np.abs(value).max()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("kind", [Synchronous, Parallel])
def test_a_variant_s_file_holds_the_state_of_the_call(
    tmp_path: Path, state: dict[str, np.ndarray], kind: Any, quantise: bool, compress: bool
) -> None:
    expected = {name: value.copy() for name, value in state.items()}
    with closing(kind(tmp_path, quantise=quantise, compress=compress)) as variant:
        variant.checkpoint(1, state)
        state["weight"] += 1  # as a training does, as soon as it may
        variant.checkpoint(2, state)
        first = (tmp_path / f"{variant.name}-1").read_bytes()
        one, two = variant.finish()
    content = pickle.loads(gzip.decompress(first) if compress else first)  # noqa: S301
    assert set(content) == set(expected)
    for name, value in expected.items():
        if quantise and value.dtype == np.float32 and value.size:
            codes, low, scale = content[name]
            assert np.abs(low + codes * scale - value).max() <= scale * 0.501
        else:
            np.testing.assert_array_equal(content[name], value, strict=True)
    assert one.nbytes == len(first)
    assert (one.quantise_s > 0, one.compress_s > 0) == (quantise, compress)
    for timing in (one, two):
        assert 0 < timing.write_s <= timing.total_s
        assert timing.snapshot_s <= timing.stall_s <= timing.total_s
        assert (timing.snapshot_s > 0) == (kind is Parallel)
    assert not list(tmp_path.iterdir())
    assert variant.finish() == []


def test_the_baseline_s_file_is_what_torch_loads(tmp_path: Path, state: dict[str, np.ndarray]) -> None:
    import torch

    variant = TorchSave(tmp_path)
    variant.checkpoint(1, state)
    loaded = torch.load(tmp_path / "torch.save-1", weights_only=True)
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in state.items())
    (timing,) = variant.finish()
    assert timing.stall_s == timing.total_s > 0
    assert timing.nbytes > sum(value.nbytes for value in state.values())


def test_names_are_the_paper_s(tmp_path: Path) -> None:
    names = [variant.name for variant in qzp.variants(tmp_path, keras=True)]
    assert names == [
        *("torch.save", "keras save_weights", "Check-Q", "Check-Z", "Check-P", "Check-QZ", "Check-QZP"),
    ]


def test_a_child_that_cannot_write_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, state: dict[str, np.ndarray]
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    variant = Parallel(tmp_path / "missing")
    variant.checkpoint(1, state)
    with pytest.raises(OSError, match="its child ended without writing it"):
        variant.close()
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


def test_every_writer_syncs_its_file(
    tmp_path: Path, state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = qzp.os.fsync
    monkeypatch.setattr(qzp.os, "fsync", lambda file: synced.append(file) or fsync(file))
    write(tmp_path / "a", state, quantise=True, compress=True)
    TorchSave(tmp_path).checkpoint(1, state)
    assert len(synced) == 2


def test_one_scale_for_a_model_is_smaller_where_one_tensor_is_large(state: dict[str, np.ndarray]) -> None:
    state["large"] = np.array([-1e4, 1e4], np.float32)
    per_tensor = len(gzip.compress(pickle.dumps({name: quantised(value) for name, value in state.items()}), 6))
    assert bytes_with_one_scale(state) < per_tensor / 2


# ---- the load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fio", "python"])
def test_the_load_reads_and_writes_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    if engine == "python":
        monkeypatch.setattr(file_load.shutil, "which", lambda _: None)
    elif file_load.shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with caplog.at_level(logging.WARNING), file_load.file_load(tmp_path, jobs=2, size_bytes=4 * MIB) as load:
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert started
        threading.Event().wait(0.5)  # the load's own duration
    assert load.engine == engine
    assert load.operations_per_s > 0
    assert "2 jobs" in load.about
    assert ("is not installed" in caplog.text) == (engine == "python")
    alive = [child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in alive if "resource_tracker" not in " ".join(child.cmdline())]
    assert not (tmp_path / "load").exists()


def test_the_load_ends_when_the_block_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with file_load.file_load(tmp_path, jobs=1, size_bytes=MIB):
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        fail()
    assert not [child for child in psutil.Process().children() if child.name() == "fio"]
    assert not (tmp_path / "load").exists()


@pytest.mark.parametrize("engine", ["fio", "python"])
def test_the_load_ends_when_its_process_is_killed(tmp_path: Path, engine: str) -> None:
    if engine == "fio" and file_load.shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    script = tmp_path / "victim.py"
    script.write_text(
        "import shutil, sys\nfrom pathlib import Path\nfrom benchmarks.file_load import file_load\n"
        "if __name__ == '__main__':\n"
        f"    if {engine!r} == 'python':\n        shutil.which = lambda name: None\n"
        f"    with file_load(Path({str(tmp_path)!r}), jobs=2, size_bytes=1 << 20):\n"
        "        print('busy', flush=True)\n        sys.stdin.read()\n"
    )
    victim = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        text=True,
    )
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "busy\n"
        jobs = psutil.Process(victim.pid).children(recursive=True)
        assert jobs
        victim.kill()
    _, alive = psutil.wait_procs(jobs, timeout=30)
    assert not alive


@pytest.mark.parametrize(("jobs", "size"), [(0, MIB), (1, 100)])
def test_an_impossible_load_is_refused(tmp_path: Path, jobs: int, size: int) -> None:
    load = file_load.file_load(tmp_path, jobs=jobs, size_bytes=size)
    with pytest.raises(ValueError, match="expected a job and 4096 bytes"):
        load.__enter__()


# ---- the benchmark --------------------------------------------------------------------------------------


def test_the_report_shows_every_variant_and_the_paper_s_figures() -> None:
    timing = qzp.Timing(0.001, 0.5, 0.001, None, None, None, 2 * MIB)
    report = CheckpointReport("checkpoint", notes=[checkpoint.PUBLISHED])
    report.figures = [Figures("resnet", "idle", "ours", [timing, timing], [1.0, 3.0])]
    report.add(Row("stall", Sample((0.001,)), MIB))
    text = io.StringIO()
    report.print(Console(file=text, width=200))
    assert "500 ms" in text.getvalue()
    assert "-87%" in text.getvalue()
    found = json.loads(json.dumps(report.as_dict()))["variants"][0]
    assert (found["stall_s"], found["quantise_s"], found["nbytes"], found["step_s"]) == (0.001, None, 2 * MIB, 2.0)


@pytest.fixture(scope="module")
def quick(cluster: object) -> dict[str, Any]:
    plan = replace(checkpoint.PLANS[Effort.QUICK], interval_s=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoint.PLANS, Effort.QUICK, plan)
        patch.setattr(checkpoint, "GIB", 64 * MIB)  # the shards' capacity, which they touch
        patch.setitem(trained.QUICK, "resnet", Recipe("resnet", width=16, steps=10, batch=8, rate=0.02))
        return checkpoint.run(Effort.QUICK).as_dict()


@pytest.mark.timeout(300)
class TestQuick:
    def test_everybody_is_measured_idle_and_under_load(self, quick: dict[str, Any]) -> None:
        names = {"no checkpoint", "torch.save", "Check-Q", "Check-Z", "Check-P", "Check-QZ", "Check-QZP"}
        for condition in ("idle", "load"):
            found = {each["variant"] for each in quick["variants"] if each["condition"] == condition}
            assert names < found
            assert len([name for name in found - names if name.startswith("ours")]) == len(found - names) == 4

    def test_the_rows_are_ours_beside_the_baseline_with_the_goal(self, quick: dict[str, Any]) -> None:
        stalls = [row for row in quick["rows"] if ": stall, " in row["case"]]
        assert len(stalls) == 8
        for row in stalls:
            assert row["peer"] == "torch.save"
            assert row["goals"][0]["value"] == pytest.approx(100 * (1 - row["ours_s"] / row["peer_s"]))
            by_one_copy = 100 * (1 - row["limit_s"] / row["peer_s"])
            assert row["saved_by_one_copy_percent"] == pytest.approx(by_one_copy)

    def test_sizes_are_those_of_the_codecs(self, quick: dict[str, Any]) -> None:
        sizes = {each["variant"]: each["nbytes"] for each in quick["variants"] if each["condition"] == "idle"}
        state = quick["size_bytes"]
        assert sizes["Check-QZ"] < sizes["Check-Q"] < 0.26 * state
        assert sizes["ours, Quantize(8) | Zstd"] < 0.26 * state
        assert sizes["ours, Shuffle | Zstd"] < 0.95 * state
        assert state < sizes["ours"] < 1.1 * state
        assert sizes["Check-QZP"] == pytest.approx(sizes["Check-QZ"], rel=0.1)


@pytest.mark.parametrize("module", [training, trained, qzp])
def test_examples_in_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
