"""What the examples of online updates are made of: simulated instrument, networks, tables, pictures."""

from __future__ import annotations

import doctest
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tensorvine.actors import ConsumerStatus, Delivery, PublishReport, Update
from tensorvine.actors.planner.streams import Fitted
from tensorvine.planner import Schedule, UpdateCosts
from tensorvine.store import ModelRef

from examples.online import answering, report
from examples.online import recorded as recorded_module
from examples.online.answering import SLOWEST, bearable
from examples.online.picture import Reconstructions, draw_runs
from examples.online.recorded import Answer, Run, Sighting, smooth
from examples.online.report import Report, milliseconds
from examples.online_cancer import classifier
from examples.online_ptychography import scans
from examples.online_ptychography.scans import Instrument, intensity, photographs, probe

ROOT = Path(__file__).parents[2]
START = 1_700_000_000.0


# ---- the instrument -----------------------------------------------------------------------------------------


def test_patterns_and_their_truth_have_the_shapes_and_ranges_that_the_network_takes() -> None:
    found = Instrument(seed=1, scans_per_sample=2).measure(5, 7)
    for array in (found.patterns, found.amplitudes, found.phases):
        assert array.shape == (7, 64, 64, 1)
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
    assert found.patterns.min() >= 0
    assert scans.DARKEST <= found.amplitudes.min() <= found.amplitudes.max() <= 1
    assert np.abs(found.phases).max() <= np.pi
    assert np.abs(found.phases.mean(axis=(1, 2, 3))).max() < 1e-5


def test_a_pattern_follows_from_the_seed_and_its_number_alone() -> None:
    whole = Instrument(seed=3, scans_per_sample=2).measure(100, 8)
    part = Instrument(seed=3, scans_per_sample=2).measure(104, 2)
    other = Instrument(seed=4, scans_per_sample=2).measure(104, 2)
    np.testing.assert_array_equal(whole.patterns[4:6], part.patterns)
    np.testing.assert_array_equal(whole.phases[4:6], part.phases)
    np.testing.assert_array_equal(other.phases, part.phases)
    assert (other.patterns != part.patterns).mean() > 0.5


def test_as_many_photons_reach_the_detector_as_leave_the_object() -> None:
    found = Instrument(seed=1, scans_per_sample=1).measure(0, 4)
    amplitudes, phases = found.amplitudes[..., 0], found.phases[..., 0]
    behind = scans.FLUX * (np.abs(probe()) ** 2 * amplitudes.astype(np.float64) ** 2).sum(axis=(1, 2))
    np.testing.assert_allclose(intensity(amplitudes, phases).sum(axis=(1, 2)), behind, rtol=1e-6)
    counted = ((found.patterns.astype(np.float64) * scans.SCALE) ** 2).sum(axis=(1, 2, 3))
    assert (np.abs(counted - behind) < 6 * np.sqrt(behind)).all()  # Poisson's noise, and no more


def test_the_phase_shows_in_the_pattern() -> None:
    amplitudes = np.ones((1, 64, 64), np.float32)
    flat, bent = (intensity(amplitudes, phases) for phases in (amplitudes * 0, photographs()[:1, 100:164, :64]))
    assert np.abs(flat - bent).sum() > 0.02 * flat.sum()
    np.testing.assert_allclose(intensity(amplitudes, amplitudes * 0.7), flat, atol=1e-3)  # a constant one does not


def test_a_scan_measures_each_place_once_and_a_batch_sees_all_parts_of_the_object() -> None:
    instrument = Instrument(seed=1, scans_per_sample=1)
    assert instrument.scan == 784
    places = [number * scans.SKIP % instrument.scan for number in range(instrument.scan)]
    assert sorted(places) == list(range(instrument.scan))
    rows = {place // 28 for place in places[:16]}
    assert len(rows) >= 14


def test_the_object_is_exchanged_after_its_scans_and_the_data_are_others_then() -> None:
    instrument = Instrument(seed=1, scans_per_sample=2)
    last = 2 * instrument.scan
    assert [instrument.sample(number) for number in (0, last - 1, last, 2 * last)] == [0, 0, 1, 2]
    before, again, after = (instrument.measure(first, 8) for first in (0, instrument.scan, last))
    np.testing.assert_array_equal(before.amplitudes, again.amplitudes)  # the same places of the same object
    assert (before.patterns != again.patterns).any()  # but photons come as they like
    noise = np.abs(before.patterns - again.patterns).mean()
    assert np.abs(before.patterns - after.patterns).mean() > 2 * noise
    assert np.abs(before.amplitudes - after.amplitudes).mean() > 0.1


def test_the_four_objects_differ() -> None:
    instrument = Instrument(seed=1, scans_per_sample=1)
    shown = [instrument.measure(sample * instrument.scan, 1) for sample in range(5)]
    both = [np.concatenate([found.amplitudes, found.phases]) for found in shown]
    assert len({array.tobytes() for array in both[:4]}) == 4
    np.testing.assert_array_equal(both[0], both[4])


# ---- the networks -------------------------------------------------------------------------------------------


def test_ptychonn_has_the_parameters_of_the_paper_and_answers_in_its_ranges() -> None:
    from examples.online_ptychography.network import ptychonn

    assert ptychonn(32).count_params() == 1_154_210
    model = ptychonn(8)
    amplitudes, phases = model.predict_on_batch(Instrument(1, 1).measure(0, 3).patterns)
    assert amplitudes.shape == phases.shape == (3, 64, 64, 1)
    assert 0 < amplitudes.min() < amplitudes.max() < 1
    assert np.abs(phases).max() < math.pi


def test_nt3_has_the_parameters_of_its_size_for_cpus_and_its_data_fit() -> None:
    train, test = classifier.load_samples(seed=1)
    assert train.features.shape == (455, 600, 1)
    assert test.features.shape == (114, 600, 1)
    assert train.features.dtype == np.float32
    assert np.abs(train.features).max() <= 1
    assert (train.classes.sum(axis=1) == 1).all()
    np.testing.assert_array_equal(train.features, classifier.load_samples(seed=1)[0].features)
    model = classifier.nt3()
    assert model.count_params() == 62_686
    np.testing.assert_allclose(model.predict_on_batch(test.features).sum(axis=1), 1, rtol=1e-5)


# ---- what was recorded --------------------------------------------------------------------------------------


def recorded(schedule: str, every: int, *, iterations: int = 200, warmup: int = 40, period_s: float = 0.05) -> Run:
    """A run that never was: an iteration and an answer every `period_s`, an update every so many iterations."""
    losses = tuple((i, 0.5 * 0.99**i + 0.1) for i in range(1, iterations + 1))
    at = {i: START + (i - warmup) * period_s for i, _ in losses}
    made = [i for i in range(warmup, iterations + 1) if (i - warmup) % every == 0]
    refs = {i: ModelRef("net", number) for number, i in enumerate(made, 1)}
    updates = tuple(Update(i, refs[i], dict(losses)[i], 0.002, 0.0, 0.003, 1000, at[i]) for i in made)
    deliveries = tuple(Delivery(refs[i], at[i], 0.004, 0.001, "shared", 1000) for i in made)
    answers = tuple(
        Answer(number, at[i], refs[max(m for m in made if m <= i)].version, 0.3 + 0.1 * (number % 2))
        for number, i in enumerate(range(warmup + 1, iterations + 1))
    )
    curve = Fitted("exp3", {"a": 0.5, "b": 0.01, "c": 0.1}, 0, 1e-4)
    report = PublishReport(
        updates, 0, losses, Schedule(tuple(made), every, 1.0), curve, UpdateCosts(period_s, 0.002, 0.008, 0.01)
    )
    status = ConsumerStatus(refs[made[-1]], deliveries, len(answers) // 2, 0, {}, False)
    sightings = tuple(Sighting(at[i], i, curve if i > warmup else None) for i in range(10, iterations + 1, 5))
    return Run(
        schedule, warmup, START, period_s, 8.0, report, (status, status), answers[::-1], sightings
    )  # fmt: skip


def test_a_run_adds_the_losses_of_its_answers_up_and_knows_its_latency() -> None:
    run = recorded("planned", every=8)
    assert run.measured_loss == pytest.approx(160 * 0.35)
    assert run.latency_s == pytest.approx(0.003 + 0.004 + 0.001)
    assert run.stalls_s == (0.002,) * 21


def test_the_predicted_loss_is_the_sum_over_the_versions_that_answered() -> None:
    run = recorded("planned", every=8)
    made = [update.iteration for update in run.report.updates]
    by_hand = sum(0.5 * 0.99 ** max(m for m in made if m < i) + 0.1 for i in range(41, 201))
    assert run.predicted_loss == pytest.approx(by_hand, rel=0.01)
    assert recorded("epoch", every=60).predicted_loss > run.predicted_loss


def test_the_lag_is_what_the_training_did_since_the_version_that_answers() -> None:
    seconds, behind = recorded("planned", every=8).lag()
    np.testing.assert_allclose(seconds, np.arange(1, 161) * 0.05, atol=1e-4)
    np.testing.assert_allclose(behind, np.arange(1, 161) % 8, atol=1e-3)


def test_answers_that_come_out_of_order_are_put_in_the_order_of_their_times() -> None:
    seconds, losses = recorded("planned", every=8).heard()
    assert (np.diff(seconds) > 0).all()
    np.testing.assert_allclose(losses[:3], [0.3, 0.4, 0.3])


def test_smoothing_few_values_gives_their_mean() -> None:
    x, y = smooth([1, 2, 3], [3.0, 4.0, 8.0])
    assert (x.tolist(), y.tolist()) == ([2.0], [5.0])


@pytest.mark.parametrize(("iteration_s", "expected"), [(0.001, 0.04), (0.05, 0.08), (9.0, SLOWEST * 0.04)])
def test_the_pace_leaves_time_for_answers_within_bounds(iteration_s: float, expected: float) -> None:
    assert bearable(UpdateCosts(iteration_s, 0.001, 0.01, 0.01), 0.04) == pytest.approx(expected)


# ---- table and picture --------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_schedule_and_says_which_gave_better_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned, epoch = recorded("planned", every=8), recorded("epoch", every=60)
    worse = tuple(Answer(a.number, a.at, a.version, 2 * a.loss) for a in epoch.answers)
    epoch = Run(*(worse if name == "answers" else getattr(epoch, name) for name in Run.__slots__))
    Report().table("Runs", [planned, epoch])
    printed = capsys.readouterr().out
    assert re.search(r"planned +21 +42 ms +2\.0 ms +8\.0 ms +3\.5 +\d+\.\d\d +56\.00 +8\.00 s", printed)
    assert re.search(r"epoch +3 +6\.0 ms +2\.0 ms +8\.0 ms +\d+\.\d +\d+\.\d\d +112\.00", printed)
    assert "160 answers each" in printed
    assert re.search(r"With planned updates their loss is in all 50\.0% less than with epoch updates", printed)


def test_a_line_shows_iteration_loss_and_the_version_of_each_consumer(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer(0, START, 6, 0.25), Answer(1, START, 7, 0.35)]
    with Report().line(200) as line:
        line.show(120, 0.4321, 7, [6, None], answers)
    printed = capsys.readouterr().out
    assert "120/200 loss 0.432  published @7  answering @6 (-1), none yet  their loss 0.300" in printed


@pytest.mark.parametrize(("seconds", "text"), [(0.00999, "10.0 ms"), (0.01, "10 ms"), (2.5, "2500 ms")])
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize("with_images", [True, False], ids=["with reconstructions", "with totals"])
def test_the_picture_is_drawn_whatever_was_recorded(with_images: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stack = rng.random((3, 8, 64, 64), dtype=np.float32)
    images = Reconstructions(stack[0], {"amplitude": list(stack), "phase": list(stack)}) if with_images else None
    runs = [recorded("planned", every=8), recorded("epoch", every=60)]
    path = draw_runs(runs, [100, 150] if with_images else [], tmp_path / "deep" / "runs.png", images)
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(image[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1320, 1012)


def test_a_run_that_ended_after_its_first_version_can_be_drawn(tmp_path: Path) -> None:
    runs = [recorded("planned", every=1000, iterations=44), recorded("epoch", every=1000, iterations=44)]
    assert draw_runs(runs, [], tmp_path / "runs.png").stat().st_size > 10_000


@pytest.mark.parametrize("module", [answering, recorded_module, report, scans], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0
