"""A candidate of a search: what it takes over, what stays frozen, what is saved of it, and how it lets go."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import psutil
import pytest
import ray
import torch
from tensorvine.actors import Repository
from tensorvine.actors.client.frameworks import adapter_of
from tensorvine.actors.search import Candidate
from tensorvine.store import ModelRef
from tensorvine.store.errors import (
    GraphError,
    InvalidNameError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorMismatchError,
)
from torch import nn

from tests.support.disk import name_at
from tests.support.waiting import PROMPT_S, eventually

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

CLASSES = 3
RNG = np.random.default_rng(11)
X = RNG.normal(3.0, 2.0, (64, 8)).astype(np.float32)
Y = RNG.integers(0, CLASSES, 64)


@pytest.fixture(scope="module")
def shared(cluster: object) -> Iterator[Repository]:
    with Repository.start("search-candidate", shards=1, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def repository(shared: Repository) -> Iterator[Repository]:
    """One repository for all tests of this file, which leave nothing in it."""
    yield shared
    for ref in shared.models():
        shared.retire(ref)
    eventually(lambda: shared.stats().tensors == 0, "nothing to be pinned after a test")


def dense_net(units: tuple[int, ...] = (16, 12), dtype: str = "float32") -> keras.Model:
    model = keras.Sequential([keras.Input((8,), dtype="float32")])
    for width in units:
        model.add(keras.layers.Dense(width, "relu", dtype=dtype))
        model.add(keras.layers.BatchNormalization(dtype=dtype))
    model.add(keras.layers.Dense(CLASSES, "softmax", dtype="float32"))
    return model


def fit(model: keras.Model, inputs: Any = X, eagerly: bool = False) -> None:
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", run_eagerly=eagerly)
    model.fit(inputs, Y, batch_size=32, epochs=1, verbose=0)


def torch_net(units: tuple[int, ...] = (16, 12), dtype: torch.dtype = torch.float32) -> nn.Sequential:
    parts: list[nn.Module] = []
    width = 8
    for more in units:
        parts += [nn.Linear(width, more), nn.BatchNorm1d(more), nn.ReLU()]
        width = more
    return nn.Sequential(*parts, nn.Linear(width, CLASSES)).to(dtype)


def descend(model: nn.Module) -> None:
    """Train as loops do: the training flag is set for all modules, and all that wants a gradient gets a step."""
    dtype = next(model.parameters()).dtype
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, 0.1) if learning else None
    model.train()
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(torch.from_numpy(X).to(dtype)), torch.from_numpy(Y))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train(model: Any) -> None:
    (fit if isinstance(model, keras.Model) else descend)(model)


def bits(model: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in adapter_of(model).tensors_of(model).items()}


def saved(repository: Repository, name: str, model: Any, quality: float = 0.5) -> ModelRef:
    """Train a model from scratch and save it: an ancestor, for whom Keras need not build a graph (1.2 s of a core)."""
    if isinstance(model, keras.Model):
        fit(model, eagerly=True)
    else:
        descend(model)
    return repository.save_model(name, model, quality=quality).ref


@pytest.mark.parametrize("build", [dense_net, torch_net])
class TestBothFrameworks:
    def test_what_matches_is_taken_over_frozen_and_shared_bit_for_bit(
        self, repository: Repository, build: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "tensorvine")
        ancestor = build()
        root = saved(repository, "root", ancestor)
        taken = list(bits(ancestor).values())[: len(bits(build((16,)))) - 2]  # Dense and BatchNormalization of 16 units
        model = build((16, 20))
        with Candidate(repository, "child", model) as candidate:
            assert candidate.ancestor == root
            assert re.search(rf"child: \d of \d layers from {root}, 2 frozen", caplog.text)
            assert list(bits(model).values())[: len(taken)] == taken
            train(model)
            child = candidate.save(0.75, {"epochs": 1})
        ours = list(bits(model).values())
        assert ours[: len(taken)] == taken  # the moving statistics too
        assert ours[len(taken) :] != list(bits(ancestor).values())[len(taken) :]
        assert child is not None
        assert child.bytes_inherited == sum(map(len, taken))
        assert child.bytes_written == sum(map(len, ours)) - child.bytes_inherited
        assert {name: array.tobytes() for name, array in repository.load(child.ref).items()} == bits(model)
        info = repository.info(child.ref)
        assert (info.parent, info.quality, info.metadata) == (root, 0.75, {"epochs": 1})
        assert set(repository.contributions(child.ref)) == {root, child.ref}
        assert repository.verify() == []
        assert 0 < candidate.seconds < 30

    def test_without_freezing_what_was_trained_on_is_written(
        self, repository: Repository, build: Callable[..., Any]
    ) -> None:
        root = saved(repository, "root", build())
        model = build((16, 20))
        with Candidate(repository, "child", model, freeze=False) as candidate:
            assert candidate.ancestor == root
            first = next(iter(bits(model).values()))
            train(model)
            child = candidate.save(0.75)
        assert next(iter(bits(model).values())) != first
        assert child is not None
        assert child.bytes_inherited == 0
        assert {name: array.tobytes() for name, array in repository.load(child.ref).items()} == bits(model)

    def test_a_model_like_a_stored_one_learns_at_its_output(
        self, repository: Repository, build: Callable[..., Any]
    ) -> None:
        ancestor = build()
        saved(repository, "root", ancestor)
        model = build()
        with Candidate(repository, "copy", model) as candidate:
            assert list(bits(model).values()) == list(bits(ancestor).values())
            train(model)
            copy = candidate.save(0.6)
        changed = [mine != its for mine, its in zip(bits(model).values(), bits(ancestor).values(), strict=True)]
        assert changed == [False] * (len(changed) - 2) + [True, True]
        assert copy is not None
        assert copy.bytes_written == sum(map(len, list(bits(model).values())[-2:]))

    def test_a_retired_ancestor_stays_until_the_candidate_lets_go(
        self, repository: Repository, build: Callable[..., Any]
    ) -> None:
        root = saved(repository, "root", build())
        model = build((16, 20))
        with Candidate(repository, "child", model) as candidate:
            repository.retire(root)
            train(model)
            child = candidate.save(0.75)
        assert child is not None
        assert repository.models() == [child.ref]
        assert {name: array.tobytes() for name, array in repository.load("child").items()} == bits(model)
        eventually(lambda: repository.stats().tensors == len(bits(model)), "what the child does not share to go")
        assert repository.verify() == []

    def test_a_candidate_that_fails_holds_its_ancestor_no_longer(
        self, repository: Repository, build: Callable[..., Any]
    ) -> None:
        root = saved(repository, "root", build())

        def fail() -> None:
            with Candidate(repository, "child", build((16, 20))):
                repository.retire(root)
                assert repository.stats().tensors > 0
                raise FloatingPointError

        with pytest.raises(FloatingPointError):
            fail()
        eventually(lambda: repository.stats().tensors == 0, "the pin to go")
        assert repository.models() == []

    def test_what_shares_only_an_input_is_no_ancestor(self, repository: Repository, build: Callable[..., Any]) -> None:
        saved(repository, "root", build((5,)))
        model = build((6,))
        before = bits(model)
        with Candidate(repository, "child", model) as candidate:
            assert candidate.ancestor is None
            assert candidate.layers == {}
            assert bits(model) == before
            child = candidate.save(0.5)
        assert child is not None
        assert child.bytes_inherited == 0
        assert repository.lineage(child.ref) == [child.ref]

    def test_without_a_repository_there_is_no_transfer(self, repository: Repository, build: Callable[..., Any]) -> None:
        saved(repository, "root", build())
        model = build()
        before = bits(model)
        with Candidate(None, "alone", model) as candidate:
            assert bits(model) == before
            assert (candidate.ancestor, candidate.layers) == (None, {})
            assert candidate.save(0.5) is None
        assert candidate.seconds == 0.0


class TestKeras:
    def test_another_dtype_is_not_taken_over(self, repository: Repository) -> None:
        saved(repository, "root", dense_net())
        for dtype in ("float16", "float64"):
            with Candidate(repository, "other", dense_net(dtype=dtype)) as candidate:
                assert candidate.ancestor is None
                other = candidate.save(0.5)
        with Candidate(repository, "child", dense_net((16, 9), "float64")) as candidate:
            assert other is not None
            assert candidate.ancestor == other.ref
            child = candidate.save(0.5)
        assert child is not None
        assert child.bytes_inherited == 8 * (8 * 16 + 16 + 4 * 16)

    def test_layers_within_layers_and_layers_used_twice_are_frozen(self, repository: Repository) -> None:
        def build(units: int) -> keras.Model:
            left, right = keras.Input((8,)), keras.Input((8,))
            shared = keras.layers.Dense(6, "relu")
            inner = keras.Sequential(
                [keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization()]
            )
            joined = keras.layers.concatenate([inner(shared(left)), inner(shared(right))])
            wide = keras.layers.Bidirectional(keras.layers.SimpleRNN(3))(keras.layers.Reshape((5, 2))(joined))
            end = keras.layers.Dense(CLASSES, "softmax")(keras.layers.Dense(units)(wide))
            return keras.Model([left, right], end)

        ancestor = build(4)
        repository.save_model("root", ancestor)
        model = build(7)
        with Candidate(repository, "child", model) as candidate:
            fit(model, [X, X])
            child = candidate.save(0.5)
        assert child is not None
        mine, its = list(bits(model).values()), list(bits(ancestor).values())
        assert mine[:-4] == its[:-4]
        assert child.bytes_inherited == sum(map(len, mine[:-4]))
        assert {name: array.tobytes() for name, array in repository.load("child").items()} == bits(model)

    def test_what_layers_keep_beside_their_weights_is_taken_over(self, repository: Repository) -> None:
        def build(units: int, center: float) -> keras.Model:
            normal, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4, output_mode="one_hot")
            normal.adapt(X + np.float32(center))
            bins.adapt(X + np.float32(center))
            inputs = keras.Input((8,))
            both = keras.layers.concatenate([normal(inputs), keras.layers.Flatten()(bins(inputs))])
            return keras.Model(inputs, keras.layers.Dense(units)(keras.layers.Dense(CLASSES)(both)))

        ancestor = build(5, 3.0)
        repository.save_model("root", ancestor)
        model = build(6, 0.0)
        with Candidate(repository, "child", model) as candidate:
            child = candidate.save(0.5)
        assert child is not None
        mine, its = (keras.Model(each.inputs[0], each.layers[-2].output)(X) for each in (model, ancestor))
        np.testing.assert_array_equal(mine, its)
        assert (
            child.bytes_inherited
            == sum(array.nbytes for array in repository.load("root").values()) - (CLASSES + 1) * 5 * 4
        )
        assert {name: array.tobytes() for name, array in repository.load("child").items()} == bits(model)

    def test_a_layer_that_writes_although_it_is_frozen_is_written(self, repository: Repository) -> None:
        def build(units: int) -> keras.Model:
            normal = keras.layers.SpectralNormalization(keras.layers.Dense(4))
            return keras.Sequential([keras.Input((8,)), normal, keras.layers.Dense(units), keras.layers.Dense(CLASSES)])

        repository.save_model("root", build(5))
        model = build(6)
        with Candidate(repository, "child", model) as candidate:
            assert candidate.ancestor is not None
            before = bits(model)
            fit(model)
            child = candidate.save(0.5)
        assert child is not None
        assert bits(model) != before
        assert {name: array.tobytes() for name, array in repository.load("child").items()} == bits(model)


class TestTorch:
    def test_what_it_was_taken_apart_with_is_not_kept_through_the_training(self, repository: Repository) -> None:
        saved(repository, "root", torch_net())
        given = weakref.ref(extra := np.zeros(1000))

        class Told(nn.Sequential):
            def get_extra_state(self) -> object:
                return tell.pop() if tell else np.zeros(1000)

            def set_extra_state(self, state: object) -> None:
                pass

        tell = [extra]
        del extra
        with Candidate(repository, "child", Told(*torch_net((16, 20)))) as candidate:
            assert candidate.layers
            gc.collect()
            assert given() is None
            assert candidate.save(0.5) is not None

    def test_flags_and_hooks_are_off_again_after_the_release(self, repository: Repository) -> None:
        saved(repository, "root", torch_net())
        model = torch_net((16, 20))
        with Candidate(repository, "child", model):
            model.train()
            model(torch.from_numpy(X))
            assert not model[1].training
        assert not model[0].weight.requires_grad
        model.train()
        model(torch.from_numpy(X))
        assert model[1].training
        assert not any(part._forward_pre_hooks for part in model.modules())

    def test_what_was_saved_is_built_again_from_the_repository_alone(self, repository: Repository) -> None:
        saved(repository, "root", torch_net())
        model = torch_net((16, 20))
        with Candidate(repository, "child", model) as candidate:
            descend(model)
            done = candidate.save(0.5)
        assert done is not None
        again = repository.load_model(done.ref).eval()
        model.eval()
        assert torch.equal(again(torch.from_numpy(X)), model(torch.from_numpy(X)))

    def test_a_tied_parameter_is_taken_over_once(self, repository: Repository) -> None:
        class Tied(nn.Module):
            def __init__(self, units: int) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
                self.second.weight = self.first.weight
                self.last = nn.Linear(8, units)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(self.second(self.first(x)))

        ancestor = Tied(CLASSES)
        saved(repository, "root", ancestor)
        model = Tied(CLASSES + 1)
        with Candidate(repository, "child", model) as candidate:
            descend(model)
            child = candidate.save(0.5)
        assert child is not None
        assert child.bytes_inherited > 0
        assert bits(model)["first.weight"] == bits(model)["second.weight"] == bits(ancestor)["first.weight"]
        assert {name: array.tobytes() for name, array in repository.load("child").items()} == bits(model)

    @pytest.mark.parametrize("after", [[], [torch.ones(3)], [torch.ones(2), torch.ones(1)]])
    def test_state_that_changes_its_size_is_saved_as_it_is(self, repository: Repository, after: list) -> None:
        class Noted(torch.nn.Module):
            def __init__(self, units: int) -> None:
                super().__init__()
                self.body, self.head = torch.nn.Linear(8, 4), torch.nn.Linear(4, units)
                self.body.notes = [torch.ones(2)]
                self.notes = [torch.ones(2)]

            def get_extra_state(self) -> list:
                return self.notes

            def set_extra_state(self, state: list) -> None:
                self.notes = state

            def forward(self, x):
                return self.head(self.body(x))

        repository.save_model("noted-root", Noted(3))
        model = Noted(4)
        with Candidate(repository, "noted", model) as candidate:
            model.notes = after
            child = candidate.save(0.5)
        assert child is not None
        assert child.bytes_inherited >= model.body.weight.nbytes
        again = Noted(4)
        repository.load_model("noted", into=again)
        assert all(torch.equal(a, b) for a, b in zip(again.notes, after, strict=True))


def test_an_ancestor_that_was_lost_costs_the_transfer_and_not_the_candidate(
    cluster: object, caplog: pytest.LogCaptureFixture
) -> None:
    with Repository.start("search-lost", shards=2, preallocate_bytes=0) as repo:
        first, second = (name_at(repo, shard) for shard in (0, 1))
        saved(repo, first, torch_net())
        with Candidate(repo, second, torch_net((16, 20))) as candidate:
            child = candidate.save(0.5)
        assert child is not None
        process = psutil.Process(repo._session.connection(0).hello.pid)
        process.kill()
        psutil.wait_procs([process], timeout=20)
        model = torch_net((16, 24))
        with Candidate(repo, first, model) as candidate:
            assert (candidate.ancestor, candidate.layers) == (None, {})
            assert f"{first} inherits nothing: {child.ref} is lost in part" in caplog.text
            alone = candidate.save(0.5)
        assert alone is not None
        assert {name: array.tobytes() for name, array in repo.load(alone.ref).items()} == bits(model)


class TestBadInput:
    @pytest.mark.parametrize("quality", [float("nan"), float("inf"), -float("inf")])
    def test_a_quality_that_is_no_number_is_refused_and_nothing_is_saved(
        self, repository: Repository, quality: float
    ) -> None:
        candidate = Candidate(repository, "a", torch_net())
        with candidate, pytest.raises(ValueError, match="expected a finite number"):
            candidate.save(quality)
        assert repository.models() == []

    def test_names_and_models_that_cannot_be_stored_are_refused(self, repository: Repository) -> None:
        with pytest.raises(InvalidNameError):
            Candidate(repository, "../a", torch_net())
        with pytest.raises(GraphError):
            Candidate(repository, "a", object())

    def test_a_model_that_cannot_be_stored_keeps_no_ancestor(self, repository: Repository) -> None:
        root = saved(repository, "root", torch_net())
        model = torch_net((16, 20))
        model[0].register_buffer("rare", torch.zeros(2).to_sparse())
        with pytest.raises(TensorMismatchError, match=r"'0.rare': expected a dense tensor"):
            Candidate(repository, "child", model)
        repository.retire(root)
        eventually(lambda: repository.stats().tensors == 0, "nothing to be pinned")

    def test_a_released_candidate_saves_no_more(self, repository: Repository) -> None:
        candidate = Candidate(repository, "a", torch_net())
        candidate.release()
        candidate.release()
        with pytest.raises(ValueError, match="released"):
            candidate.save(0.5)

    def test_a_repository_that_is_gone_is_an_error(self, cluster: object) -> None:
        with Repository.start("search-gone", shards=1, preallocate_bytes=0):
            other = Repository.connect("search-gone")
        with pytest.raises((ShardUnavailableError, RepositoryNotFoundError)):
            Candidate(other, "a", torch_net())
        other.close()


@ray.remote(num_cpus=0)
class Worker:
    def begin(self, repository: str, name: str) -> str:
        self._candidate = Candidate(Repository.connect(repository), name, torch_net((16, 20)))
        return str(self._candidate.ancestor)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_pin_of_a_killed_worker_goes_and_its_ancestor_was_there_until_then(repository: Repository) -> None:
    root = saved(repository, "root", torch_net())
    worker: Any = Worker.remote()
    assert ray.get(worker.begin.remote(repository.name, "child"), timeout=60) == str(root)
    repository.retire(root)
    assert repository.stats().tensors > 0
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(worker.die.remote(), timeout=60)
    eventually(lambda: repository.stats().tensors == 0, "the pin of a dead worker to go", timeout=PROMPT_S)
