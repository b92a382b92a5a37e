"""A candidate's messages: what comes with the query is not asked again, and a save is announced before the training.

Rules
- What was told or announced ahead is taken up only while it holds: each test breaks it in another way in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import Beginning
from tensorvine.actors.search import Candidate
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.clusters import LocalCluster
from tensorvine.store.errors import ModelNotFoundError, TensorMismatchError
from tensorvine.store.refs import ModelRef
from tensorvine.store.torch import graph_of, tensors_of
from torch import nn

from tests.support.disk import kill_shard
from tests.support.waiting import PROMPT_S, eventually

WIDE = 300
"""Units: the tensors are too many bytes to travel within a message."""


@pytest.fixture
def repo(cluster: LocalCluster) -> Iterator[Repository]:
    with Repository.start("announced", shards=2, preallocate_bytes=0, store_bytes=64 << 20) as started:
        yield started


def net(last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE + last))


def at_home(repo: Repository, shard: int, what: str) -> str:
    """Return a name whose home is this shard."""
    return next(name for number in range(99) if repo._session.home(name := f"{what}{number}") == shard)


def saved(repo: Repository, name: str, model: nn.Module) -> ModelRef:
    with Candidate(repo, name, model) as candidate:
        done = candidate.save(0.5)
    assert done is not None
    return done.ref


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


class Sent(list[str]):
    """Names of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.with_graph: list[str] = []
        """Those that brought a graph."""


@contextmanager
def messages(repo: Repository) -> Iterator[Sent]:
    """Note what this client asks shards for."""
    session, sent = repo._session, Sent()
    send = session.send

    def noting(shard: int, request: Request[Any]) -> Any:
        first = request.arguments[0]
        brought = first.graph if isinstance(first, Beginning) else getattr(first, "architecture", None)
        if brought is not None:
            sent.with_graph.append(request.remote.name)
        sent.append(request.arguments[0] if request.remote is ShardCalls.gathered else request.remote.name)
        return send(shard, request)

    session.send = noting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        session.send = send  # type: ignore[method-assign]


def nothing_held(repo: Repository) -> bool:
    return all(shard.pins == 0 and shard.bytes_staged == 0 for shard in repo.stats().shards)


def kept_of(repo: Repository) -> list[int]:
    """Return the bytes of manifests and graphs of each shard."""
    return [shard.bytes_metadata for shard in repo.stats().shards]


def check(repo: Repository, ref: ModelRef, model: nn.Module) -> None:
    assert {name: array.tobytes() for name, array in repo.load(ref).items()} == bits(model)


def test_a_candidate_sends_a_query_and_a_save_and_waits_for_no_more(repo: Repository) -> None:
    home = 0
    root = saved(repo, at_home(repo, home, "root"), net(3))
    with Repository.connect(repo.name) as other:
        other._session.connect_all()
        model, name = net(4), at_home(repo, home, "child")
        with messages(other) as sent:
            with Candidate(other, name, model) as candidate:
                assert candidate.ancestor == root
                assert sent == ["match", "match", "begin"]
                assert sent.with_graph == ["begin"]
                model.state_dict()["4.weight"].add_(1.0)
                sent.clear()
                done = candidate.save(0.6)
                assert sent == ["commit"]
                assert sent.with_graph == ["begin"]
            eventually(lambda: sent[1:] == ["unpin"], "the client's thread removes the pin")
    assert done is not None
    assert done.bytes_written == sum(model.state_dict()[f"4.{part}"].nbytes for part in ("weight", "bias"))
    check(repo, done.ref, model)
    eventually(lambda: nothing_held(repo), "nothing is held", timeout=PROMPT_S)


def test_what_came_with_a_query_is_asked_again_when_the_shard_has_changed(repo: Repository) -> None:
    name = at_home(repo, 0, "root")
    root = saved(repo, name, model := net(3))
    graph = repo.graph(root)
    with Repository.connect(repo.name) as other, messages(other) as sent:
        for change in (lambda: repo.save(at_home(repo, 0, "beside"), {"w": np.ones(9)}), lambda: repo.retire(root)):
            with other.longest_prefix(graph) as match:
                change()
                sent.clear()
                loaded = other.load(match.ref, layers=["0", "2", "4"])
                assert sent[0] == "fetch"
                assert {key: array.tobytes() for key, array in loaded.items()} == bits(model)
        other.longest_prefix(graph)


def test_what_came_with_a_query_is_for_that_version_alone(repo: Repository) -> None:
    first = saved(repo, at_home(repo, 0, "first"), one := net(3))
    second = saved(repo, at_home(repo, 1, "second"), two := net(5))
    with Repository.connect(repo.name) as other:
        with other.longest_prefix(repo.graph(first)):
            check(other, second, two)
            check(other, first, one)
        with other.longest_prefix(repo.graph(first)):
            other.save(first.name, {"w": np.arange(4.0)})
            assert set(other.load(first.name)) == {"w"}
            check(other, first, one)


def test_an_announced_save_that_does_not_come_leaves_nothing(repo: Repository) -> None:
    saved(repo, at_home(repo, 0, "root"), net(3))
    with Candidate(repo, at_home(repo, 0, "child"), net(4)) as candidate:
        assert candidate.ancestor is not None
        eventually(
            lambda: sum(shard.bytes_staged for shard in repo.stats().shards) > 0,
            "memory is granted for what was announced",
        )
    eventually(lambda: nothing_held(repo), "nothing is held")


def test_a_graph_goes_whose_save_could_not_begin(repo: Repository) -> None:
    name, model = at_home(repo, 0, "child"), net(5)
    own, saver = tensors_of(model), repo._saves.saver
    before = kept_of(repo)
    announced = saver.announce(name, (name, 7), own, (graph_of(model).to_json(), None))
    with pytest.raises(ModelNotFoundError):
        announced.begun.result(30.0)
    saver.withdraw(announced)
    eventually(lambda: kept_of(repo) == before, "the graph is gone")


def test_a_client_that_goes_takes_what_it_had_announced_with_it(repo: Repository) -> None:
    saved(repo, at_home(repo, 0, "root"), net(3))
    with Repository.connect(repo.name) as other:
        Candidate(other, at_home(repo, 0, "child"), net(4))
        eventually(lambda: not nothing_held(repo), "memory is granted for what was announced")
    eventually(lambda: nothing_held(repo), "nothing is held", timeout=PROMPT_S)


def test_a_save_that_writes_more_than_was_announced(repo: Repository) -> None:
    root = saved(repo, at_home(repo, 0, "root"), net(3))
    model = net(4)
    with Candidate(repo, at_home(repo, 0, "child"), model) as candidate:
        assert candidate.ancestor == root
        model.state_dict()["2.weight"].add_(1.0)  # it was frozen
        done = candidate.save(0.6)
    assert done is not None
    check(repo, done.ref, model)
    assert repo.lineage(done.ref) == [done.ref, root]
    eventually(lambda: nothing_held(repo), "nothing is held")


def test_a_save_that_is_refused_may_be_repeated_and_leaves_nothing(repo: Repository) -> None:
    saved(repo, at_home(repo, 0, "root"), net(3))
    model = net(4)
    with Candidate(repo, at_home(repo, 0, "child"), model) as candidate:
        with pytest.raises(TensorMismatchError, match="metadata"):
            candidate.save(0.6, metadata={"no": object()})
        done = candidate.save(0.6)
    assert done is not None
    check(repo, done.ref, model)
    with Candidate(repo, "other", net(5)) as candidate, pytest.raises(TensorMismatchError, match="metadata"):
        candidate.save(0.6, metadata={"no": object()})
    eventually(lambda: nothing_held(repo), "nothing is held")


def test_memory_that_a_former_home_granted_goes_back(repo: Repository) -> None:
    before, after = repo._session.topology, repo._session.topology.grown([1])
    homes = {name: (before.home(name), after.home(name)) for name in (f"n{number}" for number in range(99))}
    root = next(name for name, (old, new) in homes.items() if old == new == 0)
    child = next(name for name, (old, new) in homes.items() if (old, new) == (0, 2))
    saved(repo, root, net(3))
    model = net(4)
    with Candidate(repo, child, model) as candidate:
        eventually(lambda: not nothing_held(repo), "memory is granted for what was announced")
        repo.scale(3)
        done = candidate.save(0.6)
    assert done is not None
    check(repo, done.ref, model)
    eventually(lambda: nothing_held(repo), "nothing is held")


def test_a_second_save_needs_no_announcement(repo: Repository) -> None:
    model, name = net(4), at_home(repo, 0, "twice")
    with Candidate(repo, name, model) as candidate:
        first = candidate.save(0.1)
        second = candidate.save(0.2)
    assert first is not None
    assert second is not None
    assert [first.ref.version, second.ref.version] == [1, 2]
    check(repo, second.ref, model)
    eventually(lambda: nothing_held(repo), "nothing is held")


def test_memory_that_an_earlier_life_of_the_shard_granted_is_not_written_to(repo: Repository) -> None:
    kept = saved(repo, at_home(repo, 1, "kept"), other := net(7))
    model, name = net(4), at_home(repo, 0, "child")
    with Candidate(repo, name, model) as candidate:
        eventually(lambda: not nothing_held(repo), "memory is granted for what was announced")
        kill_shard(repo, 0)
        neighbour = saved_again(repo, at_home(repo, 0, "neighbour"), net(9))
        done = candidate.save(0.6)
    assert done is not None
    check(repo, done.ref, model)
    check(repo, *neighbour)
    check(repo, kept, other)
    eventually(lambda: nothing_held(repo), "nothing is held")


def saved_again(repo: Repository, name: str, model: nn.Module) -> tuple[ModelRef, nn.Module]:
    """Save as soon as the shard is back."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return repo.save_model(name, model).ref, model
        except ConnectionError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_that_join_or_drain_between_the_announcement_and_the_save(repo: Repository, shards: int) -> None:
    root = saved(repo, at_home(repo, 1, "root"), net(3))
    models = {at_home(repo, shard, "child"): net(4 + shard) for shard in (0, 1)}
    candidates = [Candidate(repo, name, model) for name, model in models.items()]
    repo.scale(shards)
    refs = []
    for candidate in candidates:
        with candidate:
            done = candidate.save(0.6)
        assert done is not None
        refs.append(done.ref)
    for ref, model in zip(refs, models.values(), strict=True):
        check(repo, ref, model)
        assert repo.lineage(ref) == [ref, root]
    assert repo.verify() == []
    eventually(lambda: nothing_held(repo), "nothing is held")
