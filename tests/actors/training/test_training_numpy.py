"""A NumPy loop as a training: what it tells, what it waits for, and that a copy of it goes on bit for bit."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tensorvine.actors.training.numpy import NumpyTraining, StepContext
from tensorvine.actors.training.training import RankContext
from tensorvine.store.errors import TensorMismatchError, TensorNotFoundError

BATCH = 32
LAYERS = (64, 40, 24, 10)


def digits() -> tuple[np.ndarray, np.ndarray]:
    found: Any = load_digits()
    return (found.data / 16).astype(np.float32), found.target


def classifier(context: RankContext) -> NumpyTraining:
    """A perceptron of three layers with dropout and momentum, on the rank's share of each batch."""
    pictures, labels = digits()
    start = np.random.default_rng(context.options.get("seed", 0))
    state: dict[str, np.ndarray] = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(LAYERS)):
        kernel = start.normal(scale=inputs**-0.5, size=(inputs, outputs)).astype(np.float32)
        for name, array in (("kernel", kernel), ("bias", np.zeros(outputs, np.float32))):
            state[f"{layer}/{name}"] = array
            state[f"{layer}/{name}/momentum"] = np.zeros_like(array)
    state["seen"] = np.zeros((), np.int64)
    parameters = [name for name in state if name.endswith(("kernel", "bias"))]

    def step(now: StepContext) -> float:
        order = np.random.default_rng(now.step).permutation(len(pictures))[: BATCH * now.size]
        mine = order[now.rank :: now.size]
        layers = range(len(LAYERS) - 1)
        taken = [pictures[mine]]
        for layer in layers:
            taken.append(taken[-1] @ now[f"{layer}/kernel"] + now[f"{layer}/bias"])
            if layer < layers[-1]:
                kept = now.random.random(taken[-1].shape) < now.options["keep"] if now.options["keep"] < 1 else True
                taken[-1] = np.maximum(taken[-1], 0) * kept
        shifted = taken[-1] - taken[-1].max(axis=1, keepdims=True)
        likely = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        rows = np.arange(len(mine))
        loss = float(-np.log(likely[rows, labels[mine]]).mean())
        likely[rows, labels[mine]] -= 1
        error = (likely / len(mine)).astype(np.float32)
        for layer in reversed(layers):
            now.reduce(f"{layer}/bias", error.sum(axis=0))
            now.reduce(f"{layer}/kernel", taken[layer].T @ error)
            if layer:
                error = (error @ now[f"{layer}/kernel"].T) * (taken[layer] > 0)
        for name in reversed(parameters):
            with now.changing(f"{name}/momentum") as momentum:
                momentum *= now.options["momentum"]
                momentum += now.mean(name)
            now.update(name, now[name] - now.options["rate"] * now[f"{name}/momentum"])
        now.update("seen", now["seen"] + len(mine))
        return loss

    updates = [name for parameter in reversed(parameters) for name in (f"{parameter}/momentum", parameter)]
    return NumpyTraining(
        context,
        state,
        step,
        parameters=parameters,
        random=np.random.default_rng([7, context.rank]),
        updates=updates,
        options={"rate": 0.1, "momentum": 0.9, "keep": 0.8},
    )


def single(options: Mapping[str, Any] | None = None) -> RankContext:
    return RankContext("digits", 0, 1, None, options or {})


def plain(
    step: Callable[[StepContext], float], state: Mapping[str, Any] | None = None, **arguments: Any
) -> NumpyTraining:
    return NumpyTraining(single(), state or {"w": np.zeros(3), "v": np.ones((2, 2))}, step, **arguments)


def move(source: NumpyTraining, target: NumpyTraining) -> None:
    """What a fork does, by hand."""
    for spec in source.specs():
        target.memory(spec.name)[...] = source.tensor(spec.name)
        target.filled(spec.name)
    target.restore(json.loads(json.dumps(source.facts())))


class Recorder:
    """Hooks that keep what they hear."""

    def __init__(self, training: NumpyTraining, telling: bool = True) -> None:
        self.training, self.telling = training, telling
        self.heard: list[Any] = []
        self.values: dict[str, np.ndarray] = {}
        self.before: dict[str, np.ndarray] = {}
        """Of the state, when the step's first change was announced."""

    def step_begins(self, step: int) -> bool:
        self.heard.append(("begins", step))
        return self.telling

    def before_update(self) -> None:
        self.heard.append("before_update")
        self.before = {spec.name: self.training.tensor(spec.name).copy() for spec in self.training.specs()}

    def updated(self, name: str, array: Any, stable: bool = False) -> None:
        assert not stable
        self.heard.append(name)
        self.values[name] = np.array(array)

    def step_ended(self, step: int) -> None:
        self.heard.append(("ended", step, self.training.steps_done))


# ---- a copy goes on as the original ------------------------------------------------------------------------


def test_it_learns():
    training = classifier(single({"keep": 1.0}))
    losses = [training.step() for _ in range(120)]
    assert np.mean(losses[-10:]) < 0.3 < 2.0 < np.mean(losses[:3])


def test_a_copy_of_state_and_facts_continues_bit_for_bit_for_20_steps():
    original, clone = classifier(single()), classifier(single({"seed": 99}))
    for _ in range(7):
        original.step()
    assert clone.step() != original.step()
    move(original, clone)
    assert clone.steps_done == original.steps_done == 8
    assert [clone.step() for _ in range(20)] == [original.step() for _ in range(20)]
    assert all(np.array_equal(original.tensor(spec.name), clone.tensor(spec.name)) for spec in original.specs())


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_random_state_of_every_bit_generator_travels_as_json(kind):
    def step(now: StepContext) -> float:
        return float(now.random.normal() + now.random.integers(1 << 20, dtype=np.uint32))

    def made(seed: int) -> NumpyTraining:
        return plain(step, random=np.random.Generator(getattr(np.random, kind)(seed)))

    original, clone = made(1), made(2)
    original.step()
    move(original, clone)
    assert [clone.step() for _ in range(5)] == [original.step() for _ in range(5)]


def test_facts_that_do_not_fit_are_refused_and_change_nothing():
    training = plain(lambda now: now.random.normal(), random=np.random.default_rng(0))
    other = plain(lambda now: now.random.normal(), random=np.random.Generator(np.random.MT19937(0)))
    before = training.facts()
    for facts in ({}, {"steps_done": 3}, {**before, "random": None}, other.facts()):
        with pytest.raises(ValueError, match=r"training 'digits', rank 0: facts.*expected"):
            training.restore(facts)
        assert training.facts() == before
    with pytest.raises(ValueError, match="facts"):
        plain(lambda now: 0.0).restore(training.facts())


def test_options_travel_but_those_that_a_rank_was_told_stay():
    original, clone = classifier(single({"rate": 0.3})), classifier(single({"keep": 0.5}))
    original.configure({"momentum": np.float32(0.5), "keep": 0.9})
    move(original, clone)
    assert clone.options == {"rate": 0.3, "momentum": 0.5, "keep": 0.5}
    clone.configure({"rate": 0.2})
    move(original, clone)
    assert clone.options["rate"] == 0.2


# ---- hooks ---------------------------------------------------------------------------------------------------


def test_hooks_hear_each_tensor_once_a_step_with_its_final_value_in_the_order_of_specs():
    training = classifier(single())
    recorder = Recorder(training)
    training.hook(recorder)
    for step in (1, 2, 3):
        recorder.heard.clear()
        training.step()
        names = [spec.name for spec in training.specs()]
        assert recorder.heard == [("begins", step), "before_update", *names, ("ended", step, step)]
        assert names[:2] == ["2/bias/momentum", "2/bias"]
        assert names[-1] == "seen"
        assert all(np.array_equal(recorder.values[name], training.tensor(name)) for name in names)


def test_before_update_is_called_before_the_first_change_of_a_step():
    training = classifier(single())
    recorder = Recorder(training)
    training.hook(recorder)
    training.step()
    after = {spec.name: training.tensor(spec.name).copy() for spec in training.specs()}
    training.step()
    assert all(np.array_equal(recorder.before[name], after[name]) for name in after)


def test_who_does_not_want_to_hear_of_tensors_hears_of_the_change_only():
    training = classifier(single())
    recorder = Recorder(training, telling=False)
    training.hook(recorder)
    training.step()
    assert recorder.heard == [("begins", 1), "before_update", ("ended", 1, 1)]
    training.hook(None)
    training.step()
    assert len(recorder.heard) == 3


def test_hooks_change_nothing_of_the_losses():
    one, other = classifier(single()), classifier(single())
    other.hook(Recorder(other))
    assert [one.step() for _ in range(5)] == [other.step() for _ in range(5)]


# ---- a clone's first step --------------------------------------------------------------------------------------


def test_the_first_step_waits_for_each_tensor_once_before_it_reads_it():
    original, clone = classifier(single()), classifier(single({"seed": 99}))
    original.step()
    clone.restore(original.facts())
    asked: list[str] = []

    def wait(name: str) -> None:
        clone.memory(name)[...] = original.tensor(name)
        asked.append(name)

    clone.gate(wait)
    assert clone.step() == original.step()
    assert sorted(asked) == sorted(clone.forward_order())
    kernels = [name for name in asked if name.endswith("kernel")]
    assert kernels == [name for name in clone.forward_order() if name.endswith("kernel")]
    assert clone.step() == original.step()
    assert len(asked) == len(clone.specs())


def test_a_step_is_held_until_what_it_reads_is_there():
    def step(now: StepContext) -> float:
        read = float(now["w"].sum())
        now.update("v", now["v"] + read)
        return read

    clone = plain(step)
    there, asked = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        asked.set()
        assert there.wait(30)

    clone.gate(wait)
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.append(clone.step()))
    thread.start()
    assert asked.wait(30)
    assert not losses
    clone.memory("w")[...] = 5.0
    there.set()
    thread.join(30)
    assert losses == [15.0]


def test_what_a_first_step_never_reads_is_waited_for_at_its_end():
    asked: list[str] = []
    training = plain(lambda now: float(now["w"].sum()))
    training.gate(asked.append)
    training.step()
    assert asked == ["w", "v"]


def test_a_gate_that_was_taken_away_holds_nobody():
    training = plain(lambda now: float(now["w"].sum()))
    training.gate(lambda name: pytest.fail(name))
    training.gate(None)
    assert training.step() == 0.0


# ---- wrong use -------------------------------------------------------------------------------------------------


def test_what_a_step_reads_cannot_be_written_to():
    def step(now: StepContext) -> float:
        now["w"][0] = 1.0
        return 0.0

    with pytest.raises(ValueError, match="read-only"):
        plain(step).step()


def twice(now: StepContext) -> float:
    now.update("w", np.ones(3))
    now.update("w", np.zeros(3))
    return 0.0


def misshapen(now: StepContext) -> float:
    now.update("w", np.ones(4))
    return 0.0


def complex_value(now: StepContext) -> float:
    now.update("w", np.ones(3) * 1j)
    return 0.0


def unknown(now: StepContext) -> float:
    return float(now["x"].sum())


def no_parameter(now: StepContext) -> float:
    now.reduce("v", np.ones((2, 2)))
    return 0.0


def misshapen_gradient(now: StepContext) -> float:
    now.reduce("w", np.ones(4))
    return 0.0


def reduced_twice(now: StepContext) -> float:
    now.reduce("w", np.ones(3))
    now.reduce("w", np.ones(3))
    return 0.0


def not_reduced(now: StepContext) -> float:
    return float(now.mean("w").sum())


def no_generator(now: StepContext) -> float:
    return now.random.normal()


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (twice, ValueError, "step 1: expected one change of 'w'"),
        (misshapen, TensorMismatchError, r"'w': expected shape \(3,\); found \(4,\)"),
        (complex_value, TensorMismatchError, "'w': expected float64"),
        (unknown, TensorNotFoundError, r"expected one of \['w', 'v'\]; found 'x'"),
        (no_parameter, ValueError, r"reduce: .*parameters \['w'\], once per step; found 'v'"),
        (misshapen_gradient, TensorMismatchError, r"gradient of 'w': expected shape \(3,\); found \(4,\)"),
        (reduced_twice, ValueError, "reduce: expected one of .* once per step"),
        (not_reduced, ValueError, r"expected a call of reduce\('w', ...\) in this step"),
        (no_generator, ValueError, r"random: expected NumpyTraining\(random=...\)"),
    ],
)
def test_a_step_that_is_wrong_is_told_where(step, error, match):
    training = plain(step, parameters=["w"])
    with pytest.raises(error, match=match):
        training.step()
    assert training.steps_done == 0


@pytest.mark.parametrize("argument", ["parameters", "updates", "local"])
@pytest.mark.parametrize("names", [["x"], ["w", "w"]])
def test_names_that_are_unknown_or_given_twice_are_refused(argument, names):
    with pytest.raises(ValueError, match=rf"{argument}: expected names of \['w', 'v'\], each once"):
        plain(lambda now: 0.0, **{argument: names})


@pytest.mark.parametrize("state", [{"w": ["a"]}, {"w": object()}], ids=["text", "object"])
def test_a_state_of_other_things_than_numbers_is_refused(state):
    with pytest.raises(TensorMismatchError, match="'w': expected an array of numbers"):
        plain(lambda now: 0.0, state)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speed": 1.0}, r"expected some of \['keep', 'momentum', 'rate'\]; found \['speed'\]"),
        ({"rate": "fast"}, "option 'rate': expected number such as 0.1; found 'fast'"),
        ({"momentum": 0.5, "rate": True}, "option 'rate': expected number"),
    ],
)
def test_options_that_it_does_not_have_are_refused_and_none_is_changed(options, match):
    training = classifier(single())
    with pytest.raises(ValueError, match=match):
        training.configure(options)
    assert training.options == {"rate": 0.1, "momentum": 0.9, "keep": 0.8}


def test_other_options_hold_from_the_next_step():
    one, other = classifier(single()), classifier(single())
    assert one.step() == other.step()
    other.configure({"rate": 0})
    one.step()
    other.step()
    still, before = other.tensor("0/kernel").copy(), one.tensor("0/kernel").copy()
    other.step()
    one.step()
    assert np.array_equal(other.tensor("0/kernel"), still)
    assert not np.array_equal(one.tensor("0/kernel"), before)


# ---- state -----------------------------------------------------------------------------------------------------


def test_specs_follow_the_updates_and_the_forward_order_the_state():
    state = {"a": np.zeros(2, np.float32), "b": np.zeros((), np.int16), "c": np.zeros((0, 3))}
    training = plain(lambda now: 0.0, state, local=["b"])
    assert [(s.name, s.dtype, s.shape, s.nbytes, s.local) for s in training.specs()] == [
        ("c", "float64", (0, 3), 0, False),
        ("b", "int16", (), 2, True),
        ("a", "float32", (2,), 8, False),
    ]
    assert training.forward_order() == ["a", "b", "c"]
    assert [s.name for s in plain(lambda now: 0.0, state, updates=["b"]).specs()] == ["b", "a", "c"]


def test_arrays_are_taken_as_they_are_and_others_copied_into_shape():
    mine, strided, frozen = np.zeros(3), np.ones((4, 4))[:, ::2], np.ones(3)
    frozen.flags.writeable = False

    def step(now: StepContext) -> float:
        for name in ("mine", "strided", "frozen"):
            now.update(name, now[name] + 1)
        return 0.0

    training = plain(step, {"mine": mine, "strided": strided, "frozen": frozen})
    training.step()
    assert mine.tolist() == [1.0] * 3
    assert frozen.tolist() == [1.0] * 3
    assert all(training.memory(spec.name).flags.c_contiguous for spec in training.specs())
    assert training.tensor("strided").tolist() == [[2.0, 2.0]] * 4
