"""The population of a search in the repository: who falls out is retired, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.search import Population
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import ModelNotFoundError, OperationTimeoutError, ShardUnavailableError

from tests.support.waiting import eventually

GRAPH = ModelGraph([Layer("in", {"class": "Input"}), Layer("a", {"class": "Dense"}, ["in"], ["a/w"])])


@pytest.fixture(scope="module")
def shared(cluster: object) -> Iterator[Repository]:
    with Repository.start("search-retirement", shards=2, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def repo(shared: Repository) -> Iterator[Repository]:
    yield shared
    for ref in shared.models():
        shared.retire(ref)
    eventually(lambda: shared.stats().tensors == 0, "all memory comes back")


def save(repo: Repository, name: str, parent: ModelRef | None = None) -> ModelRef:
    return repo.save(name, {"a/w": np.arange(64.0)}, graph=GRAPH, parent=parent, quality=1.0).ref


def test_the_oldest_falls_out_and_is_retired(repo: Repository) -> None:
    population = Population(repo, size=2)
    refs = [save(repo, f"p/{number}") for number in range(4)]
    assert [population.add(ref) for ref in refs] == [None, None, refs[0], refs[1]]
    assert population.refs == (refs[2], refs[3])
    assert repo.models() == refs[2:]


def test_two_populations_in_one_repository_leave_each_other_alone(repo: Repository) -> None:
    ours, theirs = Population(repo, 1), Population(repo, 3)
    kept = [save(repo, f"theirs/{number}") for number in range(3)]
    for ref in kept:
        theirs.add(ref)
    mine = [save(repo, f"ours/{number}", parent=kept[0]) for number in range(5)]
    for ref in mine:
        ours.add(ref)
    other = save(repo, "nobody")
    assert repo.models() == sorted([other, mine[-1], *kept])


def test_who_failed_leaves_out_of_turn_whether_or_not_it_was_taken_in(repo: Repository) -> None:
    population = Population(repo, 3)
    taken, new = save(repo, "p/taken"), save(repo, "p/new")
    population.add(taken)
    population.drop(taken)
    population.drop(new)
    population.drop(new)  # gone already
    assert population.refs == ()
    assert repo.models() == []


def test_all_versions_of_a_name_leave_but_the_one_that_counts(repo: Repository) -> None:
    population = Population(repo, 3)
    versions = [save(repo, "p/1") for _ in range(3)]
    alike = save(repo, "p/11")
    population.drop_versions("p/1", but=versions[1])
    assert repo.models() == [versions[1], alike]


def test_a_search_goes_on_with_its_population_after_it_was_stopped(repo: Repository) -> None:
    before = Population(repo, 3)
    refs = [save(repo, f"p/{number}") for number in range(5)]
    for ref in refs[:3]:
        before.add(ref)
    after = Population(repo, 2)
    after.restore(before.refs)
    assert after.refs == (refs[1], refs[2])
    assert after.add(refs[3]) == refs[1]
    assert repo.models() == refs[2:]


def test_a_version_that_is_twice_in_the_queue_stays_until_its_last_entry_leaves(repo: Repository) -> None:
    population = Population(repo, 2)
    a, b, c = (save(repo, name) for name in "abc")
    population.add(a)
    population.add(b)
    assert population.add(a) == a
    assert repo.models() == [a, b, c]
    assert population.add(c) == b
    assert repo.models() == [a, c]
    population.add(a)
    population.drop(a)
    assert population.refs == (c,)
    population.restore([a, c, c, b])
    assert repo.models() == [c]


def test_one_that_somebody_else_retired_is_no_error(repo: Repository) -> None:
    population = Population(repo, 1)
    first, second = save(repo, "p/1"), save(repo, "p/2")
    population.add(first)
    repo.retire(first)
    assert population.add(second) == first
    assert population.refs == (second,)


def test_who_is_being_loaded_stays_for_who_loads_it(repo: Repository) -> None:
    population = Population(repo, 1)
    first = save(repo, "p/1")
    population.add(first)
    with repo.longest_prefix(GRAPH) as match:
        assert match is not None
        population.add(save(repo, "p/2"))
        with pytest.raises(ModelNotFoundError):
            Repository.connect(repo.name).load(first)
        np.testing.assert_array_equal(repo.load(match.ref)["a/w"], np.arange(64.0))
        tensors = repo.stats().tensors
    eventually(lambda: repo.stats().tensors == tensors - 1, "its tensor to go")


@pytest.mark.parametrize("error", [ShardUnavailableError, OperationTimeoutError])
def test_a_shard_that_does_not_answer_is_asked_again_with_the_next(
    repo: Repository, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    population = Population(repo, 1)
    refs = [save(repo, f"p/{number}") for number in range(3)]
    retire, calls = repo.retire, iter([error("scripted")])

    def once(ref: ModelRef) -> None:
        for failure in calls:
            raise failure
        retire(ref)

    monkeypatch.setattr(repo, "retire", once)
    assert [population.add(ref) for ref in refs[:2]] == [None, refs[0]]
    assert repo.models() == refs
    assert population.add(refs[2]) == refs[1]
    assert repo.models() == [refs[2]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_population_of_nobody_is_refused(repo: Repository, size: int) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        Population(repo, size)
