"""The benchmarks of online updates: who brings a model where, who hears of it when, and all of them, quick."""

from __future__ import annotations

import doctest
import io
import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorvine.actors import Publisher, Repository

from benchmarks import consumers, crowd, networks, notify, pace, quiet, raylets, update_latency
from benchmarks.crowd import Crowd, Tagged, tagged
from benchmarks.measure import Effort, Row, Sample
from benchmarks.networks import Network, Training, nt3, ptychonn
from benchmarks.update_parties import Copy, H5File, KerasFile, Loopback, Parts, Party, warm_buffers
from benchmarks.update_report import Figure, UpdateReport

_serial = count(1)
keras_and_numpy = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(nt3("small", 12, features=600, filters=8))


# ---- networks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "parameters"),
    [(nt3("NT3 at CPU size", 64, features=600, filters=16), 62_686), (ptychonn("PtychoNN", 32), 1_154_210)],
    ids=["nt3", "ptychonn"],
)
def test_networks_have_the_published_sizes(network: Network, parameters: int) -> None:
    assert Training(network).nbytes == 4 * parameters


def test_a_step_changes_every_element_of_the_model_that_answers(training: Training) -> None:
    before = {name: array.copy() for name, array in training.arrays.items()}
    answer = training.answer()
    training.step()
    for name, array in training.arrays.items():
        assert (array != before[name]).all(), name
    assert not np.array_equal(training.answer(), answer)
    training.step()
    assert np.isfinite(training.answer()).all()


# ---- parties --------------------------------------------------------------------------------------------


@pytest.fixture(params=["Keras HDF5", "h5py", "copy", "loopback"])
def party(request: pytest.FixtureRequest, training: Training, tmp_path: Path) -> Any:
    buffers = warm_buffers(training)
    if request.param == "loopback":
        with closing(Loopback(training, buffers)) as loopback:
            yield loopback
        return
    made: dict[str, Party] = {
        "Keras HDF5": KerasFile(training, tmp_path, 1),
        "h5py": H5File(training, tmp_path, 1),
        "copy": Copy(training, buffers),
    }
    yield made[request.param]
    assert not any(tmp_path.iterdir()), "files are gone"


@keras_and_numpy
def test_a_party_brings_what_the_training_has_now(party: Party, training: Training) -> None:
    for _ in range(2):
        training.step()
        parts = party.update()
        party.check()
        assert parts.total_s > 0
        assert parts.total_s == pytest.approx(parts.stall_s + parts.fetch_s) or parts.stall_s == 0


@keras_and_numpy
@pytest.mark.parametrize("kind", [KerasFile, Copy])
def test_a_party_that_brought_an_older_version_is_caught(kind: type, training: Training, tmp_path: Path) -> None:
    old: Any = KerasFile(training, tmp_path, 1) if kind is KerasFile else Copy(training, warm_buffers(training))
    old.update()
    training.step()
    with pytest.raises(RuntimeError, match=f"{old.name}: expected the training's tensors"):
        old.check()


# ---- quiet, and nodes -----------------------------------------------------------------------------------


def test_quiet_waits_for_what_runs_yet() -> None:
    burn = "import time\nprint('begun', flush=True)\nwhile time.process_time() < 1.0: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        quiet.quiet()
        used = sum(quiet.psutil.Process(child.pid).cpu_times()[:2])
        child.communicate(b"\n", timeout=30)
    assert used > 0.9


def test_quiet_waits_until_a_shard_begins_to_hash() -> None:
    committed = time.monotonic()
    quiet.quiet(since=committed)
    assert time.monotonic() > committed + quiet.SWEEP_S


def test_two_raylets_are_not_started_beside_a_ray_that_runs(cluster: object) -> None:
    with pytest.raises(RuntimeError, match="connected to one"), raylets.two_raylets(1 << 20):
        pass


def test_what_came_to_run_on_another_node_is_closed_and_started_again(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = raylets.actor_named(f"{repository.name}/shard-0")
    here = repository.engine.this_node()
    assert raylets.node_of(actor) == here
    events: list[str] = []

    class Started:
        def __init__(self) -> None:
            events.append("start")

        def close(self) -> None:
            events.append("close")

    raylets.started_on(here, Started, lambda _: actor)
    assert events == ["start"]
    monkeypatch.setattr(raylets, "TRIES", 2)
    with pytest.raises(RuntimeError, match="elsewhere, 2 times"):
        raylets.started_on("another", Started, lambda _: actor)
    assert events == ["start"] + ["start", "close"] * 2


# ---- a crowd --------------------------------------------------------------------------------------------


def test_a_model_of_two_versions_shows_both() -> None:
    tensors = tagged({"a": np.empty((8, 3), np.float32), "b": np.empty((4, 5), np.float32)}, 6)
    model = Tagged()
    model.assign(tensors)
    assert model(None) == (6.0, 6.0)
    tensors["b"][2, 1] = 7
    least, most = model(None)
    assert least == 6.0
    assert most > 6.0


def test_a_crowd_counts_answers_that_are_not_of_the_version_they_claim(repository: Repository) -> None:
    name = f"crowd-{next(_serial)}"
    tensors = {"a": np.empty((64, 64), np.float32)}
    with closing(Crowd(repository.name, name, 3, 2)) as some, Publisher(repository, name, 1) as publisher:
        publisher.publish(tagged(tensors, 1)).committed(30)
        some.wait_for(1)
        begun = time.time()
        some.begin(0.01)
        time.sleep(0.3)
        publisher.publish(tagged(tensors, 2)).committed(30)
        some.wait_for(2)
        good = some.end()
        assert good.mixed == 0
        assert len(good.at) > 10
        assert begun < good.at[0] <= good.at[-1] < time.time()
        assert begun < some.answered_from([1, 2])[1] < time.time()
        publisher.publish(tagged(tensors, 9)).committed(30)
        some.wait_for(3)
        some.begin()
        time.sleep(0.1)
        wrong = some.end()
        assert wrong.mixed == len(wrong.at) > 3
        assert some.own_bytes() > 1 << 20


# ---- reports --------------------------------------------------------------------------------------------


def test_an_update_is_printed_part_by_part() -> None:
    parts = [Parts(total, 0.1, 0.02, 0.12, 0.001, 0.003, 0.004) for total in (0.2, 0.3, 0.7)]
    report = UpdateReport("update_latency", notes=["something is left out"])
    report.figures = [Figure("net", "ours", Parts(4.0), parts), Figure("net", "file", Parts(1.5, 1.0))]
    report.add(Row("net: ours", Sample((0.2,)), 8))
    text = io.StringIO()
    report.print(Console(file=text, width=200))
    for shown in ("300 ms [200-700]", "4 s", "100 ms", "1.5 s", "something is left out"):
        assert shown in text.getvalue()
    found = json.loads(json.dumps(report.as_dict()))
    assert found["notes"] == report.notes
    assert [each["party"] for each in found["parties"]] == ["ours", "file"]
    assert (
        found["parties"][0] | {"total_s": 0.3, "cold_s": 4.0, "notify_s": 0.001, "versions": 3} == found["parties"][0]
    )


# ---- the benchmarks -------------------------------------------------------------------------------------

SCRIPT = """
import gc, json
from contextlib import contextmanager
from dataclasses import replace

import keras
from benchmarks import update_latency
from benchmarks.measure import Effort
from benchmarks.networks import nt3
from benchmarks.raylets import two_raylets
from tests.support.warm import warm_workers

@contextmanager
def warm_raylets(store_bytes):
    with warm_workers(), two_raylets(store_bytes) as nodes:
        yield nodes

plan = update_latency.PLANS[Effort.QUICK]
blocks = tuple(update_latency.BLOCKS[place] for place in (0, 3, 4, 5, 6))
small = replace(plan, cases=((nt3("NT3", 60, features=600, filters=16), blocks),))
update_latency.PLANS[Effort.QUICK] = small
update_latency.STORE_BYTES = 100 << 20
update_latency.two_raylets = warm_raylets
gc.freeze()  # each collection between two updates would look at all of the framework
print(json.dumps(update_latency.run(Effort.QUICK).as_dict()))
"""


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
def test_updates_stand_beside_files_and_floors() -> None:
    """In a process of its own, for it starts two raylets."""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    parties = {each["party"]: each for each in found["parties"]}
    ours = [update_latency.BLOCKS[place].name for place in (0, 3, 4, 5, 6)]
    assert parties.keys() == {*ours, "Keras HDF5", "h5py", Copy.name, Loopback.name}
    for name in ours:
        each = parties[name]
        parts = sum(each[part] for part in ("exists_s", "notify_s", "fetch_s", "swap_s"))
        assert each["total_s"] == pytest.approx(parts, abs=1e-5)
        assert each["cold_s"] > 0
        rows = [row for row in found["rows"] if row["case"] == f"NT3: {name}"]
        assert [row["peer"] for row in rows] == ["Keras HDF5", "h5py"]
        for row in rows:
            assert row["peer_s"] == parties[row["peer"]]["total_s"]
            assert row["limit"] == (Loopback.name if "raylets" in name else Copy.name)
            faster = [goal for goal in row["goals"] if "times faster" in goal["goal"]]
            assert [goal["value"] for goal in faster] == [pytest.approx(row["ratio"])] * len(faster)
    assert {len(row["goals"]) for row in found["rows"] if "files" in row["case"]} == {0}
    assert sum(len(row["goals"]) for row in found["rows"]) == 2 * 3 + 2 * 2


def test_who_is_told_stands_beside_who_asks(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(notify.PLANS, Effort.QUICK, notify.Plan(1, 6, 1))
    report = notify.run(Effort.QUICK)
    found = report.as_dict()
    assert list(found["ways"]) == ["long poll", "Redis", "asking each 1 ms", "asking each 1 s"]
    assert [each["versions"] for each in found["ways"].values()] == [6, 6, 6, 1]
    for each in found["ways"].values():
        assert each["acknowledged_s"] < each["visible_s"] < each["path_s"] <= each["path_p99_s"]
    assert [(row["case"], row["peer"]) for row in found["rows"]] == [
        (ours, theirs) for ours in ("long poll", "Redis") for theirs in ("asking each 1 ms", "asking each 1 s")
    ]
    assert found["peer"] == "asking each 1 s"
    for row in found["rows"]:
        assert row["goals"][0]["value"] == pytest.approx(1e3 * found["ways"][row["case"]]["visible_s"])
    text = io.StringIO()
    report.print(Console(file=text, width=200))
    assert "of a core" in text.getvalue()


def test_consumers_are_asked_with_updates_and_without(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(
        consumers.PLANS[Effort.QUICK], counts=(1, 3), side=64, tensors=3, updates=2, pause_s=0.2, iterations=50
    )
    monkeypatch.setitem(consumers.PLANS, Effort.QUICK, plan)
    monkeypatch.setattr(consumers, "PROCESSES", 2)
    found = consumers.run(Effort.QUICK).as_dict()
    assert found["consumers"] == 3, "the headline is of the largest crowd"
    crowds = found["rows"][:-1]
    assert [row["consumers"] for row in crowds] == [1, 1, 3, 3]
    for row in crowds:
        assert row["versions"] == 2
        assert row["answers"] > 10
        share, _, mixed = row["goals"]
        assert share["value"] == pytest.approx(row["answers_per_s_in_updates"] / row["answers_per_s"])
        assert (mixed["value"], mixed["reached"]) == (0, True)
    assert found["rows"][1]["answers_per_s"] < found["rows"][0]["answers_per_s"]
    assert "processes: 2;" in found["notes"][1]
    training = found["rows"][-1]
    assert training["iterations"] == 50
    assert training["updates"] >= 1
    assert training["failed"] == 0
    assert training["goals"][0]["value"] == pytest.approx(100 * (training["ours_s"] / training["peer_s"] - 1))


@pytest.mark.parametrize("module", [consumers, crowd, networks, notify, pace, quiet, raylets, update_latency])
def test_examples_in_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
