"""The search of `examples/nas`: its spaces, the evolution, the data and the models. Ray is not needed."""

from __future__ import annotations

import doctest
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorvine.store.errors import GraphError
from tensorvine.store.torch import graph_of

from examples.nas import evolution, report, space
from examples.nas.data import ATTN_FEATURES, ATTN_POSITIVE, NAMES, NT3_FEATURES, NT3_FILES, load, read_candle
from examples.nas.evolution import Evolution
from examples.nas.models import build
from examples.nas.plan import SPACES, Mode, Plan
from examples.nas.space import (
    ACTIVATIONS,
    SMALL_UNITS,
    UNITS,
    AttnSpace,
    Candidate,
    Decision,
    Nt3Space,
    draw,
    mutate,
    size_of,
    validate,
)
from examples.nas.trainer import Trainer, TrainingError

SPACE = AttnSpace(2)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread: several threads wait for one another, and such waiting takes CPU time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("module", [space, evolution, report])
def test_docstring_examples(module: object) -> None:
    found = doctest.testmod(module)  # pyright: ignore[reportArgumentType]
    assert found.attempted
    assert not found.failed


# ---- spaces -------------------------------------------------------------------------------------------------


def test_a_dense_choice_of_the_attn_space_has_the_published_options() -> None:
    dense = AttnSpace(6, UNITS).decisions[0].options
    assert len(dense) == 391
    assert dense[0] == "identity"
    assert {option[0] for option in dense[1:]} == set(range(50, 2000, 25))
    assert {option[1] for option in dense[1:]} == set(ACTIVATIONS)
    assert len(SMALL_UNITS) == len(UNITS)


def test_the_attn_space_has_the_published_numbers_of_decisions_and_candidates() -> None:
    small, paper = AttnSpace(2, UNITS), AttnSpace(6, UNITS)
    assert (len(small.decisions), size_of(small)) == (18, 391**6 * 2**12)
    assert (len(paper.decisions), size_of(paper)) == (54, 391**18 * 2**36)
    cells = list(small.cells((0,) * 18))
    assert [cell.dense for cell in cells] == [None] * 6


def test_the_nt3_space_has_the_published_numbers() -> None:
    assert (len(Nt3Space(60).decisions), size_of(Nt3Space(60))) == (8, 624_000)


def test_skips_lead_to_anchors_of_their_own_sub_graph_alone() -> None:
    everything = tuple(len(decision.options) - 1 for decision in SPACE.decisions)
    assert [cell.skips for cell in SPACE.cells(everything)] == [(0,), (0, 1), (0, 1, 2)] * 2


def test_a_mutation_changes_exactly_one_decision_and_reaches_every_option() -> None:
    rng = random.Random(1)  # noqa: S311  for candidates
    seen: list[set[int]] = [set() for _ in Nt3Space(60).decisions]
    candidate = draw(Nt3Space(60), rng)
    for _ in range(3000):
        child = mutate(Nt3Space(60), candidate, rng)
        (place,) = [i for i, (mine, its) in enumerate(zip(child, candidate, strict=True)) if mine != its]
        seen[place].add(child[place])
        candidate = child
    assert [len(options) for options in seen] == [len(decision.options) for decision in Nt3Space(60).decisions]


@pytest.mark.parametrize(("length", "message"), [(13, "stage 2: kernel"), (59, "stage 2: pooling"), (2, "kernel")])
def test_a_space_that_yields_invalid_graphs_is_refused_by_the_name_of_the_decision(length: int, message: str) -> None:
    with pytest.raises(GraphError, match=f"decision '.*({message})': expected at most \\d+, .* found \\d"):
        validate(Nt3Space(length))


def test_the_spaces_of_the_example_are_valid() -> None:
    for name in SPACES:
        validate(Plan(space=name, data="digits").trainer().space)


class Broken:
    """A space whose decisions are given."""

    name = "broken"

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = decisions

    def check(self, candidate: Candidate) -> None:
        pass


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ((), "space 'broken': expected decisions"),
        ((Decision("first", (1, 2)), Decision("second", ())), "decision 'second'"),
        ((Decision("first", (1,)),), "decision 'first': expected two or more options"),
        ((Decision("first", (1, 2, 1)),), "decision 'first'.*all different"),
    ],
)
def test_decisions_that_leave_nothing_to_choose_are_refused(decisions: tuple[Decision, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        validate(Broken(*decisions))


def test_an_unknown_activation_or_width_is_refused_by_the_name_of_the_decision() -> None:
    with pytest.raises(GraphError, match="decision 'sub-graph 1, cell 1: dense': expected a positive width"):
        validate(AttnSpace(2, (0, 10)))


@pytest.mark.parametrize(
    ("candidate", "message"), [((0,) * 17, "expected 18 decisions"), ((999,) + (0,) * 17, "dense")]
)
def test_what_is_no_candidate_is_refused(candidate: Candidate, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build(SPACE, candidate, 4, 2, seed=0)


# ---- evolution ----------------------------------------------------------------------------------------------


def test_the_population_ages_and_children_come_from_the_best_of_a_sample() -> None:
    search = Evolution(SPACE, population=10, sample=10, seed=3)
    left: list[int] = []
    for number in range(30):
        asked = search.ask()
        assert asked.number == number
        if number >= 10:
            assert asked.parent == max(search.members, key=lambda member: member.quality).number
        gone = search.tell(number, quality=(number * 7 % 11) / 11)
        left += [gone.number] if gone else []
    assert left == list(range(20))
    assert [member.number for member in search.members] == list(range(20, 30))


def test_a_candidate_that_failed_never_enters_the_population() -> None:
    search = Evolution(SPACE, population=2, sample=1, seed=0)
    for quality in (None, 0.5, None, 0.6):
        search.tell(search.ask().number, quality)
    assert [member.number for member in search.members] == [1, 3]
    with pytest.raises(KeyError):
        search.tell(1, 0.5)


def test_the_same_calls_give_the_same_candidates() -> None:
    def run() -> list[Candidate]:
        search, drawn = Evolution(SPACE, 5, 3, seed=11), []
        for first, second in pairwise([0.1 * n for n in range(12)]):
            one, other = search.ask(), search.ask()
            drawn += [one.candidate, other.candidate]
            search.tell(other.number, second)
            search.tell(one.number, first)
        return drawn

    assert run() == run()


@pytest.mark.parametrize(("population", "sample"), [(5, 6), (5, 0), (0, 0)])
def test_a_sample_is_part_of_the_population(population: int, sample: int) -> None:
    with pytest.raises(ValueError, match="expected 1 <= sample <= population"):
        Evolution(SPACE, population, sample)


# ---- data and models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nt3"])
def test_data_are_standardised_and_split_alike_every_time(name: str) -> None:
    data, again = load(name, samples=400), load(name, samples=400)
    (train, labels), (test, truth) = data.train, data.test
    assert train.dtype == test.dtype == np.float32
    assert np.isfinite(train).all()
    assert train.shape == (len(labels), data.features)
    assert test.shape == (len(truth), data.features)
    assert abs(train.mean()) < 1e-3
    np.testing.assert_array_equal(train, again.train[0])
    assert data.quality(truth) == 1.0


def test_generated_data_have_the_true_shape_of_attn() -> None:
    data = load("attn", samples=1000)
    assert data.features == ATTN_FEATURES == 6212
    labels = np.concatenate([data.train[1], data.test[1]])
    assert abs(labels.mean() - ATTN_POSITIVE) < 1e-3
    assert data.quality(np.zeros_like(data.test[1])) == 0.5


def test_generated_data_have_the_true_shape_of_nt3_and_a_candidate_trains_on_them() -> None:
    trainer = Plan(space="nt3", data="nt3", samples=20).trainer()
    data, again = trainer.load(), trainer.load()
    (train, labels), (test, truth) = data.train, data.test
    assert (train.shape, test.shape) == ((16, NT3_FEATURES), (4, NT3_FEATURES)) == ((16, 60_483), (4, 60_483))
    assert sum(NT3_FILES.values()) == 1_400
    assert np.abs(train).max() == 1.0
    assert {0, 1} == set(labels) == set(truth)
    np.testing.assert_array_equal(train, again.train[0])
    model = trainer.build((1, 1, 4, 1, 1, 5, 0, 1), data, seed=0)
    assert 0.0 <= trainer.train(model, data, seed=0) <= 1.0


@pytest.mark.parametrize("between", [",", " ", ", "])
def test_candles_files_are_read_as_they_are(tmp_path: Path, between: str) -> None:
    rng = np.random.default_rng(0)
    for name in NT3_FILES:
        lines = [between.join(map(str, [label, *rng.integers(0, 9, NT3_FEATURES)])) for label in (0, 1, 1)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    features, labels = read_candle(tmp_path / "nt_test2.csv")
    assert labels.tolist() == [0, 1, 1]
    assert features[2].tolist() == [float(text) for text in lines[2].split(between)[1:]]
    data = load("nt3", folder=str(tmp_path))
    assert (data.train[0].shape, data.features, data.classes) == ((3, NT3_FEATURES), NT3_FEATURES, 2)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1,2,3", "3 numbers, 1 first"),
        ("class," + ",".join(["1"] * NT3_FEATURES), "no number"),
        (",".join(["2"] * (NT3_FEATURES + 1)), f"{NT3_FEATURES + 1} numbers, 2 first"),
    ],
    ids=["short", "header", "another class"],
)
def test_a_file_that_is_none_of_candles_is_refused_by_its_line(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "nt_train2.csv"
    path.write_text(",".join(["0"] * (NT3_FEATURES + 1)) + "\n" + line + "\n")
    with pytest.raises(
        ValueError, match=rf"nt_train2.csv, line 2: expected a class .0 or 1. and 60483 .*found {found}"
    ):
        read_candle(path)
    with pytest.raises(ValueError, match="expected nt3 with a folder of CANDLE's files; found 'wine'"):
        load("wine", folder=str(tmp_path))


def test_unknown_data_and_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data: expected one of digits, .*found 'imagenet'"):
        load("imagenet")
    with pytest.raises(ValueError, match=r"space: expected one of attn, .*found 'darts'"):
        Plan(space="darts").trainer()


def test_shifted_digits_are_each_image_nine_times() -> None:
    plain, moved = load("digits"), load("digits-shifted")
    assert len(moved.train[1]) == 9 * len(plain.train[1])
    np.testing.assert_array_equal(moved.test[1], plain.test[1])


@pytest.mark.parametrize(("name", "data"), [("attn", "wine"), ("attn-6", "breast_cancer"), ("nt3", "digits")])
def test_every_drawn_candidate_builds_and_trains(name: str, data: str) -> None:
    trainer, rng = Plan(space=name, data=data).trainer(), random.Random(5)  # noqa: S311  for candidates
    loaded = trainer.load()
    for number in range(5):
        candidate = draw(trainer.space, rng)
        model = trainer.build(candidate, loaded, seed=number)
        quality = trainer.train(model, loaded, seed=number)
        again = trainer.build(candidate, loaded, seed=number)
        assert trainer.train(again, loaded, seed=number) == quality
        assert len(graph_of(model).layers) > 1


def test_candidates_that_begin_alike_share_a_prefix_and_what_differs_ends_it() -> None:
    rng = random.Random(2)  # noqa: S311  for candidates
    candidate = draw(SPACE, rng)
    mine = graph_of(build(SPACE, candidate, 64, 10, seed=0))
    last = (*candidate[:14], (candidate[14] + 1) % 391, *candidate[15:])
    shared = len(mine.common_prefix(graph_of(build(SPACE, last, 64, 10, seed=1))))
    first = ((candidate[0] + 5) % 391, *candidate[1:])
    early = mine.common_prefix(graph_of(build(SPACE, first, 64, 10, seed=1)))
    assert "cells.0.dense" in mine.by_name
    assert "cells.0.dense" not in early
    assert len(early) < shared < len(mine)


def test_a_loss_that_is_no_number_is_an_error() -> None:
    trainer = Trainer(SPACE, "wine")
    data = trainer.load()
    model = trainer.build((0,) * 18, data, seed=0)
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="expected a finite loss; found nan"):
        trainer.train(model, data, seed=0)
    for tensor in model.parameters():
        tensor.requires_grad_(False)
    with pytest.raises(TrainingError, match="finite outputs"):
        trainer.train(model, data, seed=0)


def test_a_plan_survives_json_and_says_what_differs() -> None:
    plan = Plan(mode=Mode.HDF5, seed=4)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="resume: seed: expected 4, as the search began; found 0"):
        plan.expect_same(Plan(mode=Mode.HDF5))
    plan.expect_same(Plan(mode=Mode.HDF5, seed=4, candidates=5))
