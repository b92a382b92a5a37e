"""The double buffer: whole versions only, refused ones leave the old answering, answers never wait for an update."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.updates.serving import Serving
from tensorvine.store.errors import (
    GraphError,
    OperationTimeoutError,
    TensorMismatchError,
    TensorNotFoundError,
    VersionNotServedError,
)
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.refs import ModelRef

TENSORS = 8
NONE = ModelGraph(())
MOST = 20_000
"""Versions that are taken until ten of them have answered."""


class Tagged:
    """A model whose tensors all hold their version; an answer tells which versions it was made of."""

    def assign(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = dict(tensors)

    def __call__(self, batch: Any) -> set[float]:
        return {float(value) for array in self.tensors.values() for value in array}


class InPlace(Tagged):
    """The same with memory of its own, as frameworks have."""

    def __init__(self) -> None:
        self.tensors = {f"t{i}": np.zeros(500) for i in range(TENSORS)}

    def assign(self, tensors: dict[str, np.ndarray]) -> None:
        for name, array in tensors.items():
            self.tensors[name][:] = array


def version(number: int) -> tuple[ModelRef, dict[str, np.ndarray], ModelGraph]:
    return ModelRef("m", number), {f"t{i}": np.full(500, float(number)) for i in range(TENSORS)}, NONE


def versions_of(answers: list[Any]) -> set[ModelRef]:
    return {answer.ref for answer in answers}


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def make(build: Callable[[], Any], generate: Any = None) -> Serving:
        made.append(Serving(build, "m", generate))
        return made[-1]

    yield make
    for serving in made:
        serving.close()


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns 50 times as often as Python has them do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class TestSwap:
    @pytest.mark.usefixtures("often")
    @pytest.mark.parametrize("model", [Tagged, InPlace])
    def test_no_answer_is_of_two_versions_while_versions_come_as_fast_as_they_can(self, serve, model):
        serving = serve(model)
        serving.take(*version(1))
        stop, answers, errors = threading.Event(), [], []

        def ask() -> None:
            while not stop.is_set():
                try:
                    answers.append(serving.infer(None))
                except BaseException as exc:  # noqa: BLE001  shown by the test
                    errors.append(exc)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        number = 1
        while not errors and number < MOST and (number < 119 or len(versions_of(answers)) < 10):
            number += 1
            serving.take(*version(number))
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(answer.outputs == {float(answer.ref.version)} for answer in answers)
        assert len(versions_of(answers)) >= 10
        assert serving.infer(None).ref == ModelRef("m", number)

    def test_an_answer_ends_on_the_version_on_which_it_began(self, serve):
        began, go_on = threading.Event(), threading.Event()

        class Slow(InPlace):
            def __call__(self, batch: Any) -> set[float]:
                if batch == "slow":
                    began.set()
                    assert go_on.wait(10)
                return super().__call__(batch)

        serving = serve(Slow)
        serving.take(*version(1))
        found: list[Any] = []
        slow = threading.Thread(target=lambda: found.append(serving.infer("slow")))
        slow.start()
        assert began.wait(10)
        serving.take(*version(2))
        assert serving.infer(None).outputs == {2.0}
        third = threading.Thread(target=lambda: serving.take(*version(3)))
        third.start()  # it needs the copy on which the slow answer is: it waits, and answers go on
        assert serving.infer(None).outputs == {2.0}
        assert third.is_alive()
        go_on.set()
        third.join(10)
        slow.join(10)
        assert found[0].outputs == {1.0}
        assert found[0].ref.version == 1
        assert serving.infer(None).outputs == {3.0}

    def test_the_first_answer_waits_for_the_first_version(self, serve):
        serving = serve(Tagged)
        with pytest.raises(OperationTimeoutError, match="first version of 'm'"):
            serving.infer(None, timeout=0.01)
        later = threading.Timer(0.05, lambda: serving.take(*version(1)))
        later.start()
        assert serving.infer(None, timeout=10).outputs == {1.0}
        later.join()

    def test_a_wait_for_a_version_ends_when_it_answers(self, serve):
        serving = serve(Tagged)
        with pytest.raises(OperationTimeoutError, match="m@2"):
            serving.wait_for(2, 0.01)
        serving.take(*version(3))
        assert serving.wait_for(2, 0.01) == ModelRef("m", 3)

    def test_what_is_no_model_is_refused(self):
        with pytest.raises(TypeError, match="found dict"):
            Serving(dict, "m")

    def test_a_model_that_fails_to_take_a_version_leaves_the_one_before(self, serve):
        class Picky(Tagged):
            def assign(self, tensors: dict[str, np.ndarray]) -> None:
                if tensors["t0"][0] == 2:
                    raise RuntimeError("no twos")
                super().assign(tensors)

        serving = serve(Picky)
        serving.take(*version(1))
        with pytest.raises(RuntimeError, match="no twos"):
            serving.take(*version(2))
        assert serving.infer(None).outputs == {1.0}
        serving.take(*version(3))
        assert serving.infer(None).outputs == {3.0}


class TestVersionOfAnAnswer:
    def test_a_request_names_the_oldest_or_the_only_version_that_may_answer(self, serve):
        serving = serve(Tagged)
        serving.take(*version(3))
        for allowed in ({"at_least": 2}, {"at_least": 3}, {"exactly": 3}, {}):
            answer = serving.infer(None, **allowed)
            assert (answer.ref, answer.first) == (ModelRef("m", 3), ModelRef("m", 3))
        for refused in ({"at_least": 4}, {"exactly": 2}, {"exactly": 4}):
            with pytest.raises(VersionNotServedError, match="found m@3; retry later") as caught:
                serving.infer(None, **refused)
            assert caught.value.served == "m@3"

    def test_the_error_keeps_its_version_between_processes(self):
        error = pickle.loads(pickle.dumps(VersionNotServedError("refused", "m@3")))  # noqa: S301
        assert (str(error), error.served) == ("refused", "m@3")

    @pytest.mark.parametrize(
        "wrong", [{"at_least": 0}, {"exactly": -1}, {"at_least": "3"}, {"exactly": True}, {"at_least": 1, "exactly": 1}]
    )
    def test_a_wrong_number_is_refused(self, serve, wrong):
        serving = serve(Tagged)
        serving.take(*version(1))
        with pytest.raises(ValueError, match=r"^infer: "):
            serving.infer(None, **wrong)

    def test_each_call_of_a_generation_uses_the_version_of_that_moment(self, serve):
        updates = iter([2, 3])

        def generate(model: Any, batch: Any) -> list[set[float]]:
            found = [model(batch)]
            for number in updates:
                serving.take(*version(number))
                found.append(model(batch))
            return found

        serving = serve(InPlace, generate)
        serving.take(*version(1))
        answer = serving.infer(None)
        assert answer.outputs == [{1.0}, {2.0}, {3.0}]
        assert (answer.first, answer.ref) == (ModelRef("m", 1), ModelRef("m", 3))

    def test_a_generation_by_exactly_one_version_keeps_it_during_an_update(self, serve):
        def generate(model: Any, batch: Any) -> list[set[float]]:
            found = [model(batch)]
            serving.take(*version(2))
            return [*found, model(batch)]

        serving = serve(InPlace, generate)
        serving.take(*version(1))
        answer = serving.infer(None, exactly=1)
        assert answer.outputs == [{1.0}, {1.0}]
        assert (answer.first, answer.ref) == (ModelRef("m", 1), ModelRef("m", 1))
        assert serving.ref == ModelRef("m", 2)

    def test_a_generation_that_calls_no_model_is_refused(self, serve):
        serving = serve(Tagged, lambda model, batch: batch)
        serving.take(*version(1))
        with pytest.raises(ValueError, match="made no call"):
            serving.infer(None)


class TestRefused:
    def test_a_wait_for_the_first_version_says_which_was_refused_and_why(self, serve):
        serving = serve(Tagged)
        serving.refuse(ModelRef("m", 1), "its layer 'a' has 3 units, where the model's has 4")
        said = "m@1 was refused: its layer 'a' has 3 units"
        with pytest.raises(OperationTimeoutError, match=said):
            serving.infer(None, timeout=0.01)
        with pytest.raises(OperationTimeoutError, match=said):
            serving.wait_for(1, timeout=0.01)

    def test_only_the_newest_are_kept(self, serve):
        serving = serve(Tagged)
        for number in range(1, 101):
            serving.refuse(ModelRef("m", number), "no")
        assert list(serving.refused) == [ModelRef("m", number) for number in range(37, 101)]


class TestTorch:
    @staticmethod
    def net(width: int = 8) -> Any:
        nn = pytest.importorskip("torch").nn
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    @staticmethod
    def of(net: Any, number: int) -> tuple[ModelRef, dict[str, np.ndarray], ModelGraph]:
        from tensorvine.store.torch import graph_of, tensors_of

        return ModelRef("m", number), tensors_of(net), graph_of(net)

    def test_it_answers_as_the_model_whose_version_it_took(self, serve):
        torch = pytest.importorskip("torch")
        serving, batch = serve(self.net), np.random.default_rng(0).random((5, 4), np.float32)
        for number in range(1, 4):
            net = self.net()
            serving.take(*self.of(net, number))
            with torch.no_grad():
                wanted = net.eval()(torch.from_numpy(batch)).numpy()
            np.testing.assert_array_equal(serving.infer(batch).outputs, wanted)

    @pytest.mark.parametrize(
        ("spoil", "error"),
        [
            (lambda t: t | {"0.weight": t["0.weight"].astype(np.float64)}, TensorMismatchError),
            (lambda t: t | {"0.weight": t["0.weight"][:3]}, TensorMismatchError),
            (lambda t: {k: v for k, v in t.items() if k != "3.bias"}, TensorNotFoundError),
            (lambda t: t | {"9.bias": t["3.bias"]}, TensorNotFoundError),
        ],
    )
    def test_tensors_that_do_not_fit_are_refused_and_nothing_is_written(self, serve, spoil, error):
        serving, net, batch = serve(self.net), self.net(), np.ones((5, 4), np.float32)
        serving.take(*self.of(net, 1))
        before = serving.infer(batch).outputs
        ref, tensors, _ = self.of(self.net(), 2)
        with pytest.raises(error):
            serving.take(ref, spoil(dict(tensors)), NONE)
        answer = serving.infer(batch)
        assert answer.ref.version == 1
        np.testing.assert_array_equal(answer.outputs, before)

    def test_another_architecture_is_refused_and_the_layer_is_named(self, serve):
        serving = serve(self.net)
        serving.take(*self.of(self.net(), 1))
        with pytest.raises(GraphError, match="'out_features': 9"):
            serving.take(*self.of(self.net(9), 2))
        assert serving.infer(np.ones((2, 4), np.float32)).ref.version == 1

    def test_outputs_of_several_heads_come_as_they_are(self, serve):
        torch = pytest.importorskip("torch")

        class Heads(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)

            def forward(self, x: Any) -> dict[str, Any]:
                return {"a": self.a(x), "both": (self.a(x), self.b(x))}

        serving = serve(Heads)
        serving.take(*self.of(Heads(), 1))
        outputs = serving.infer(np.ones((5, 4), np.float32)).outputs
        assert outputs["a"].shape == (5, 2)
        assert [head.shape for head in outputs["both"]] == [(5, 2), (5, 3)]

    def test_batches_are_arrays_dicts_or_tuples_and_keep_their_dtypes(self, serve):
        torch = pytest.importorskip("torch")

        class Tokens(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(9, 2)

            def forward(self, batch: Any) -> Any:
                ids, weights = (batch["ids"], batch["weights"]) if isinstance(batch, dict) else batch
                return (self.embed(ids) * weights[..., None]).sum(-2)

        ids, weights, net = np.int64([[1, 2, 8]]), np.float32([[1.0, 0.5, 0.0]]), Tokens()
        wanted = net({"ids": torch.from_numpy(ids), "weights": torch.from_numpy(weights)}).detach().numpy()
        serving = serve(Tokens)
        serving.take(*self.of(net, 1))
        for batch in ({"ids": ids, "weights": weights}, (ids, weights), {"ids": ids.tolist(), "weights": weights}):
            np.testing.assert_array_equal(serving.infer(batch).outputs, wanted)
        tensors = {"ids": torch.from_numpy(ids), "weights": torch.from_numpy(weights)}
        np.testing.assert_array_equal(serving.infer(tensors).outputs, wanted)

    def test_state_that_is_no_tensor_is_swapped_too(self, serve):
        torch = pytest.importorskip("torch")

        quantize = torch.ao.quantization.quantize_dynamic

        def net() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch moves it to a package of its own
                return quantize(torch.nn.Sequential(torch.nn.Linear(4, 2)), {torch.nn.Linear}, torch.qint8)

        serving, batch = serve(net), np.linspace(0, 1, 20, dtype=np.float32).reshape(5, 4)
        for number in range(1, 4):
            version = net()
            serving.take(*self.of(version, number))
            wanted = version(torch.from_numpy(batch)).numpy()
            np.testing.assert_array_equal(serving.infer(batch).outputs, wanted)

    def test_hooks_that_derive_from_weights_and_state_see_the_versions(self, serve):
        torch = pytest.importorskip("torch")

        class Derived(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.norm, self.extra = torch.nn.Linear(4, 2), torch.zeros(()), 0
                self.register_load_state_dict_post_hook(lambda module, _: module.derive())

            def derive(self) -> None:
                self.norm = self.body.weight.detach().norm()

            def get_extra_state(self) -> int:
                return self.extra

            def set_extra_state(self, state: int) -> None:
                self.extra = state

            def forward(self, x: Any) -> Any:
                return self.body(x) * torch.select(self.norm.expand(2), 0, 0)

        serving, batch = serve(Derived), np.ones((5, 4), np.float32)
        for number in range(1, 4):
            net = Derived()
            net.derive()
            net.norm = net.norm.clone()
            serving.take(ModelRef("m", number), self.of(net, number)[1], NONE)
            wanted = net(torch.from_numpy(batch)).detach().numpy()
            np.testing.assert_array_equal(serving.infer(batch).outputs, wanted)

    def test_a_tied_tensor_may_come_by_one_of_its_names(self, serve):
        torch = pytest.importorskip("torch")

        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
                self.b.weight = self.a.weight

            def forward(self, x: Any) -> Any:
                return self.b(self.a(x))

        serving, net, batch = serve(Tied), Tied(), np.ones((5, 4), np.float32)
        ref, tensors, graph = self.of(net, 1)
        serving.take(ref, {name: array for name, array in tensors.items() if name != "b.weight"}, graph)
        np.testing.assert_array_equal(serving.infer(batch).outputs, net(torch.from_numpy(batch)).detach().numpy())


class TestKeras:
    @staticmethod
    def net() -> Any:
        keras = pytest.importorskip("keras")
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2, activation="softmax")]
        )

    @staticmethod
    def of(net: Any, number: int) -> tuple[ModelRef, dict[str, np.ndarray], ModelGraph]:
        from tensorvine.store.keras import graph_of, tensors_of

        return ModelRef("m", number), tensors_of(net), graph_of(net)

    def test_it_answers_as_the_model_whose_version_it_took_though_keras_numbers_the_layers_otherwise(self, serve):
        serving, batch = serve(self.net), np.random.default_rng(0).random((5, 4), np.float32)
        for number in range(1, 5):
            net = self.net()
            serving.take(*self.of(net, number))
            wanted = net.predict_on_batch(batch)
            np.testing.assert_allclose(serving.infer(batch).outputs, wanted, rtol=1e-6)

    @staticmethod
    def with_state(filled: bool, by: float = 0.0) -> Any:
        keras = pytest.importorskip("keras")
        normal, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
        if filled:
            data = np.random.default_rng(0).normal(30 + by, 5, (20, 4)).astype(np.float32)
            normal.adapt(data)
            bins.adapt((data - data.mean()) / data.std())
        return keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(4), bins])

    def test_state_that_layers_keep_beside_their_weights_is_swapped_too(self, serve):
        built: list[Any] = []

        def build() -> Any:
            built.append(self.with_state(False))
            return built[-1]

        serving = serve(build)
        batch = np.random.default_rng(1).normal(30, 5, (6, 4)).astype(np.float32)
        versions = [self.with_state(True, by) for by in (0.0, 4.0)]
        for number, net in enumerate([*versions, versions[0]], start=1):
            serving.take(*self.of(net, number))
            np.testing.assert_array_equal(serving.infer(batch).outputs, net(batch))
        compiled = [net.predict_function for net in built]
        assert all(compiled)
        changed = versions[0]
        serving.take(*self.of(changed, 4))  # this copy has another state yet
        compiled = [net.predict_function for net in built]
        changed.layers[1].bias.assign_add(np.full(4, 0.5, np.float32))
        for number in (5, 6):
            serving.take(*self.of(changed, number))
            np.testing.assert_array_equal(serving.infer(batch).outputs, changed(batch))
        assert [net.predict_function for net in built] == compiled  # weights alone compile nothing anew

    def test_the_weights_are_filled_in_place(self, serve):
        from tensorvine.store.keras_memory import WeightMemory

        net = self.net()
        memory = WeightMemory(net)
        places = {name: memory.in_place(name) for name in memory.weights}
        assert all(array is not None for array in places.values())
        for array in places.values():
            array[...] = 3
        assert all(float(np.min(weight.numpy())) == 3 for weight in net.weights)
        assert all(memory.in_place(name) is array for name, array in places.items())

    def test_a_weight_that_was_trained_meanwhile_gets_new_memory(self):
        from tensorvine.store.keras_memory import WeightMemory

        net = self.net()
        memory = WeightMemory(net)
        name = next(iter(memory.weights))
        before = memory.in_place(name)
        memory.weights[name].assign(memory.weights[name] + 1)
        after = memory.in_place(name)
        assert after is not before
        after[...] = 5
        assert float(np.max(memory.weights[name].numpy())) == 5
