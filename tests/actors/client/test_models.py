"""Keras and PyTorch models through the repository: save_model and load_model in the place of the frameworks' own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import ray
import torch
from tensorvine.actors import Publisher, Repository
from tensorvine.store import ModelRef
from tensorvine.store.errors import GraphError, TensorMismatchError, TensorNotFoundError
from tensorvine.store.keras import graph_of, optimizer_tensors_of, tensors_of
from tensorvine.store.torch import factories, register_factory


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("models", shards=1, preallocate_bytes=0) as repository:
        yield repository


def nested() -> keras.Model:
    """Two inputs, a shared layer, a shared nested model, and a compiled loss."""
    shared = keras.layers.Dense(6, activation="relu")
    inner = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization()])
    left, right = keras.Input((4,)), keras.Input((4,))
    joined = keras.layers.concatenate([inner(shared(left)), inner(shared(right))])
    model = keras.Model([left, right], keras.layers.Dense(2, activation="softmax")(keras.layers.Dropout(0.1)(joined)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = [rng.random((32, 4), np.float32), rng.random((32, 4), np.float32)]
    return inputs, rng.integers(0, 2, 32)


class TestKeras:
    def test_a_nested_model_with_shared_layers_is_rebuilt_from_the_repository_alone(self, repo: Repository) -> None:
        model = nested()
        inputs, labels = data()
        model.fit(inputs, labels, verbose=0)
        model.layers[2].trainable = False
        saved = repo.save_model("nested", model, quality=0.5)
        assert saved.bytes_written == sum(t.nbytes for t in tensors_of(model).values())
        assert repo.load(saved.ref).keys() == tensors_of(model).keys()
        again = repo.load_model("nested")
        np.testing.assert_array_equal(again.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
        assert again.evaluate(inputs, labels, verbose=0) == model.evaluate(inputs, labels, verbose=0)
        assert [layer.trainable for layer in again.layers] == [layer.trainable for layer in model.layers]
        assert graph_of(again).fingerprint == graph_of(model).fingerprint == repo.graph("nested").fingerprint
        again.fit(inputs, labels, verbose=0)  # its variables are its own: the stored ones are read-only

    def test_another_process_rebuilds_it_too(self, repo: Repository, tmp_path: Path) -> None:
        model = nested()
        repo.save_model("elsewhere", model)
        script = textwrap.dedent("""
            import sys, numpy as np
            from tensorvine.actors import Repository
            repo = Repository.connect("models")
            inputs = [np.full((3, 4), 0.5, np.float32), np.full((3, 4), 0.25, np.float32)]
            np.save(sys.argv[1], repo.load_model("elsewhere").predict(inputs, verbose=0))
            repo.close()
        """)
        answers = tmp_path / "answers.npy"
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        subprocess.run([sys.executable, "-c", script, answers], env=environment, check=True, timeout=100)
        inputs = [np.full((3, 4), 0.5, np.float32), np.full((3, 4), 0.25, np.float32)]
        np.testing.assert_array_equal(np.load(answers), model.predict(inputs, verbose=0))

    def test_training_goes_on_where_it_was_when_the_optimizer_is_saved_too(self, repo: Repository) -> None:
        model, (inputs, labels) = nested(), data()
        model.layers[-2].rate = 0.0
        model.fit(inputs, labels, shuffle=False, verbose=0)
        repo.save_model("training", model, optimizer=True)
        again = repo.load_model("training")
        again.layers[-2].rate = 0.0
        for each in (model, again):
            each.fit(inputs, labels, shuffle=False, verbose=0)
        for name, tensor in tensors_of(model).items():
            np.testing.assert_allclose(tensors_of(again)[name], tensor, rtol=1e-6, err_msg=name)

    def test_a_fine_tuned_model_shares_what_it_froze(self, repo: Repository) -> None:
        base = nested()
        repo.save_model("base", base, quality=0.9)
        again = repo.load_model("base")
        head = again.layers[-1]
        head.set_weights([w + 1 for w in head.get_weights()])
        tuned = repo.save_model("tuned", again, parent="base")
        assert tuned.bytes_written == sum(w.nbytes for w in head.get_weights())
        assert set(repo.contributions("tuned")) == {tuned.ref, ModelRef("base", 1)}

    def test_into_fills_a_model_or_says_what_does_not_fit(self, repo: Repository) -> None:
        model = nested()
        repo.save_model("filled", model)
        other = nested()
        assert repo.load_model("filled", into=other) is other
        inputs, _ = data()
        np.testing.assert_array_equal(other.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
        wrong = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, name="head")])
        repo.save_model("head", wrong)
        bigger = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="head")])
        with pytest.raises(TensorMismatchError, match=r"\(4, 2\)"):
            repo.load_model("head", into=bigger)


class Mute(torch.nn.Module):
    """Does not keep what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Tied(torch.nn.Module):
    """A language model's head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 128), torch.nn.Linear(128, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Unbuildable(keras.Model):
    """A model that Keras cannot build again: its argument is no config."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function, self.dense = function, keras.layers.Dense(2)

    def call(self, x: object) -> object:
        return self.function(self.dense(x))


def words(vocabulary: list[str]) -> keras.Model:
    model = keras.Sequential([keras.Input((1,), dtype="string"), keras.layers.StringLookup(), keras.layers.Flatten()])
    model.layers[0].set_vocabulary(vocabulary)
    return model


def trained(width: int = 4, optimizer: str = "adam") -> keras.Model:
    model = keras.Sequential([keras.layers.Input((width,)), keras.layers.Dense(2, name="head")], name="net")
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(np.ones((2, width), np.float32), np.zeros((2, 2), np.float32))
    return model


def bits(model: keras.Model) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in (tensors_of(model) | optimizer_tensors_of(model)).items()}


class TestWhole:
    """A model comes back whole, or is as it was."""

    def test_a_vocabulary_is_a_tensor_of_its_layer_which_versions_share(self, repo: Repository) -> None:
        model = words(["a", "b"])
        first, second = repo.save_model("words", model), repo.save_model("words", model)
        assert first.bytes_written == second.bytes_inherited == len("[UNK]\na\nb")
        (layer,) = (layer for layer in repo.graph("words").layers if layer.config["class"] == "StringLookup")
        assert layer.tensors == (f"{layer.name}/assets/vocabulary.txt",)
        asked = np.array([["b"], ["zz"]])
        for again in (repo.load_model("words"), repo.load_model("words", into=words(["q", "r"]))):
            np.testing.assert_array_equal(again(asked), [[2], [0]])

    def test_a_training_that_adapts_meanwhile_publishes_what_its_layers_keep_then(self, repo: Repository) -> None:
        binned = keras.layers.Discretization(num_bins=3, output_mode="one_hot")
        model = keras.Sequential([keras.layers.Input((1,)), binned, keras.layers.Dense(2)])
        with Publisher(repo, "adapting", 1) as publisher:
            publisher.publish(model).committed()
            model.layers[0].adapt(np.arange(9.0)[:, None])
            publisher.publish(model).committed()
        (name,) = set(repo.graph("adapting@2").tensors) - set(repo.graph("adapting@1").tensors)
        assert repo.load("adapting@2")[name].tolist() == model.layers[0].bin_boundaries

    @pytest.mark.parametrize("optimizer", ["sgd", None])
    def test_an_optimizer_that_does_not_fit_leaves_the_target_as_it_was(self, repo: Repository, optimizer) -> None:
        repo.save_model("whole", trained(), optimizer=True)
        target = trained(optimizer=optimizer or "adam")
        if optimizer is None:
            target = keras.Sequential([keras.layers.Input((4,)), *target.layers])
        before = bits(target)
        with pytest.raises(TensorNotFoundError, match=r"optimizer=False skips it.*optimizer/adam"):
            repo.load_model("whole", into=target)
        assert bits(target) == before
        repo.load_model("whole", into=target, optimizer=False)
        assert bits(target) != before

    def test_the_optimizers_state_and_compiling_can_be_left_out(self, repo: Repository) -> None:
        model = trained()
        repo.save_model("parts", model, optimizer=True)
        assert bits(repo.load_model("parts")) == bits(model)
        again = repo.load_model("parts", optimizer=False)
        assert (int(model.optimizer.iterations), int(again.optimizer.iterations)) == (1, 0)
        plain = repo.load_model("parts", compile=False)
        assert not plain.compiled
        assert bits(plain) == {name: array.tobytes() for name, array in tensors_of(model).items()}

    def test_an_optimizer_that_begins_with_the_weights_begins_with_those_that_were_stored(self, repo) -> None:
        model = trained(optimizer="schedulefreeadamw")
        repo.save_model("begun", model)
        state = optimizer_tensors_of(repo.load_model("begun"))
        np.testing.assert_array_equal(
            state["optimizer/schedule_free_adam_w/head/kernel/momentum"], model.get_weights()[0]
        )

    def test_custom_objects_are_given_or_in_the_callers_scope(self, repo: Repository) -> None:
        class Mine(keras.layers.Dense):
            pass

        class Other(keras.layers.Dense):
            pass

        model = keras.Sequential([keras.layers.Input((4,)), Mine(2), Other(2)])
        repo.save_model("mine", model)
        with pytest.raises(GraphError, match=r"load_model of mine@1: .*custom_objects=.*'(Mine|Other)'.*pass into="):
            repo.load_model("mine")
        found = [repo.load_model("mine", custom_objects={"Mine": Mine, "Other": Other})]
        with keras.saving.CustomObjectScope({"Mine": Mine}):
            found.append(repo.load_model("mine", custom_objects={"Other": Other}))
        with keras.saving.CustomObjectScope({"Mine": Mine, "Other": Other}):
            found.append(repo.load_model("mine"))
        assert [bits(again) for again in found] == [bits(model)] * 3

    def test_a_model_without_a_config_is_stored_and_filled(self, repo: Repository) -> None:
        x = np.ones((2, 4), np.float32)
        model, other = Unbuildable(abs), Unbuildable(abs)
        model(x), other(x)
        repo.save_model("unbuildable", model)
        with Publisher(repo, "unbuildable", 1) as publisher:
            publisher.publish(model).committed()
        with pytest.raises(GraphError, match=r"Unbuildable.*get_config.*pass into="):
            repo.load_model("unbuildable@1")
        for version in (1, 2):
            other.dense.kernel.assign(np.zeros((4, 2)))
            repo.load_model(f"unbuildable@{version}", into=other)
            np.testing.assert_array_equal(other(x), model(x))

    def test_a_config_that_builds_another_model_says_so(self, repo: Repository) -> None:
        @keras.saving.register_keras_serializable("tests")
        class Forgets(keras.Model):
            def __init__(self, width: int = 2, **kwargs: object) -> None:
                super().__init__(**kwargs)
                self.dense = keras.layers.Dense(width)

            def call(self, x: object) -> object:
                return self.dense(x)

            def get_config(self) -> dict:
                return {}

        model = Forgets(3)
        model(np.ones((2, 4), np.float32))
        repo.save_model("forgets", model)
        with pytest.raises(GraphError, match=r"built again does not fit.*\(4, 2\).*pass into="):
            repo.load_model("forgets")

    def test_a_class_whose_module_is_gone_is_named(self, repo: Repository) -> None:
        Moved = type("Moved", (keras.layers.Dense,), {"__module__": "gone.layers"})  # noqa: N806  a class
        model = keras.Sequential([keras.layers.Input((4,)), Moved(2)])
        repo.save_model("moved", model)
        with pytest.raises(GraphError, match=r"custom_objects=.*'Moved'.*pass into="):
            repo.load_model("moved")
        assert bits(repo.load_model("moved", custom_objects={"Moved": Moved})) == bits(model)

    def test_a_layer_may_be_called_optimizer(self, repo: Repository) -> None:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="optimizer")])
        repo.save_model("named", model)
        assert bits(repo.load_model("named")) == bits(model)


class TestParents:
    """Whose child a model is that was loaded and is saved under another name."""

    def linear(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 3))

    def test_a_loaded_model_is_the_child_of_its_version(
        self, repo: Repository, caplog: pytest.LogCaptureFixture
    ) -> None:
        base = repo.save_model("parents/base", self.linear())
        filled = self.linear(1)
        assert repo.load_model(base, into=filled) is filled
        with caplog.at_level("INFO", "tensorvine"):
            child = repo.save_model("parents/child", filled)
        assert repo.info(child).parent == base.ref
        assert child.bytes_written == 0
        assert "save of 'parents/child': the parent is parents/base@1, from which the model was loaded" in caplog.text
        assert repo.info(repo.save_model("parents/child", filled)).parent == child.ref
        assert repo.info(repo.save_model("parents/alone", filled, parent=None)).parent is None
        assert repo.info(repo.save_model("parents/other", self.linear())).parent is None

    def test_a_version_that_was_retired_is_no_parent(self, repo: Repository) -> None:
        base = repo.save_model("parents/gone", self.linear())
        model = repo.load_model(base)
        repo.retire(base)
        assert repo.info(repo.save_model("parents/orphan", model)).parent is None

    def test_models_are_asked_for_by_their_architecture(self, repo: Repository) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 11))
        refs = [repo.save_model(f"parents/like-{n}", model).ref for n in range(2)]
        assert repo.find(model) == refs
        with repo.longest_prefix(model) or pytest.fail("found none") as match:
            assert match.ref == refs[1]
            assert len(match.layers) == len(repo.graph(match).layers)


class TestTorch:
    def test_a_module_is_saved_and_filled(self, repo: Repository) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8))
        module.to(torch.bfloat16)
        saved = repo.save_model("torch", module, metadata={"step": 1})
        other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8)).to(torch.bfloat16)
        repo.load_model(saved.ref, into=other)
        for mine, theirs in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs)
        with torch.no_grad():
            other[0].weight.add_(1)  # its memory is its own
        assert torch.equal(
            torch.from_numpy(repo.load("torch")["0.weight"].view(np.int16).copy()).view(torch.bfloat16),
            module[0].weight,
        )
        assert [layer.config["class"] for layer in repo.graph("torch").layers][1:] == ["Linear", "ReLU", "BatchNorm1d"]

    def test_a_module_of_torch_nn_is_built_again_from_the_repository_alone(self, repo: Repository) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU()).double().eval()
        optimizer, batch = torch.optim.Adam(net.parameters(), lr=0.1), torch.ones(2, 4).double()
        net(batch).square().sum().backward()
        optimizer.step()
        repo.save_model("again", net, optimizer=optimizer)
        again = repo.load_model("again")
        assert not again.training
        assert torch.equal(again(batch), net(batch))
        again(batch).square().sum().backward()
        torch.optim.SGD(again.parameters()).step()  # its memory is its own
        assert torch.equal(repo.load_model("again")[0].weight, net[0].weight)
        with pytest.raises(GraphError, match=r"optimizer of a torch module that is built again: .*found Adam"):
            repo.load_model("again", optimizer=optimizer)
        for given in ({"compile": False}, {"custom_objects": {"Linear": torch.nn.Linear}}):
            with pytest.raises(GraphError, match=r"=.*: expected a Keras model; found a torch module"):
                repo.load_model("again", **given)

    def test_a_stated_factory_builds_a_module_with_permission(self, repo: Repository) -> None:
        net, batch = Mute(3), torch.ones(2, 3)
        repo.save_model("stated", net, factory=f"{__name__}:Mute", arguments={"width": 3})
        with pytest.raises(
            GraphError, match=rf"load_model of stated@1: factory '{__name__}:Mute': expected permission .*pass into="
        ):
            repo.load_model("stated")
        package = __name__.partition(".")[0]
        given: tuple[dict[str, Any], ...] = ({"factory": Mute}, {"trusted_packages": [package]})
        for permission in given:
            again = repo.load_model("stated", **permission)
            assert type(again) is Mute
            assert torch.equal(again(batch), net(batch))
        register_factory(Mute)
        try:
            assert torch.equal(repo.load_model("stated")(batch), net(batch))
        finally:
            factories._registered.clear()

    def test_a_tied_module_is_tied_again(self, repo: Repository) -> None:
        repo.save_model("tied-again", Tied(), factory=f"{__name__}:Tied")
        again = repo.load_model("tied-again", factory=Tied)
        assert again.embed.weight is again.head.weight

    def test_a_factory_that_builds_another_architecture_is_refused(self, repo: Repository) -> None:
        def other() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())

        def untied() -> torch.nn.Module:
            net = Tied()
            net.head.weight = torch.nn.Parameter(net.embed.weight.detach().clone())
            return net

        repo.save_model("relu", torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), factory="zoo:make")
        with pytest.raises(GraphError, match=r"the layer '1' of the built module differs; pass into="):
            repo.load_model("relu", factory=other)
        repo.save_model("tied-only", Tied(), factory="zoo:make")
        with pytest.raises(GraphError, match=r"'head.weight' differs; pass into="):
            repo.load_model("tied-only", factory=untied)

    def test_a_factory_for_other_models_is_refused(self, repo: Repository) -> None:
        with pytest.raises(GraphError, match="factory=: expected a torch module; found the Keras model Sequential"):
            repo.save_model("keras-factory", trained(), factory="zoo:make")
        with pytest.raises(GraphError, match="arguments=: expected factory= too"):
            repo.save_model("no-factory", Mute(3), arguments={"width": 3})
        with pytest.raises(GraphError, match="argument 'width' of zoo:make: expected numbers"):
            repo.save_model("no-factory", Mute(3), factory="zoo:make", arguments={"width": torch.ones(1)})
        assert repo.models("no-factory") == []
        repo.save_model("keras-factory", trained())
        for given in ({"factory": Mute}, {"trusted_packages": ["zoo"]}):
            with pytest.raises(GraphError, match=f"{next(iter(given))}=: expected a torch module; found a Keras model"):
                repo.load_model("keras-factory", **given)
        repo.save_model("filled-factory", Mute(3), factory="zoo:make")
        with pytest.raises(GraphError, match="factory=: expected no into=, which is filled; found Mute"):
            repo.load_model("filled-factory", into=Mute(3), factory=Mute)
        with pytest.raises(GraphError, match="trusted_packages=: expected a list of packages; found 'zoo'"):
            repo.load_model("filled-factory", trusted_packages="zoo")

    def test_a_module_without_a_recipe_is_filled_or_built_by_the_callers_factory(self, repo: Repository) -> None:
        narrow, wide = Mute(2), Mute(3)
        repo.save_model("mute", wide)
        with Publisher(repo, "mute", 1) as publisher:
            publisher.publish(wide).committed()
        repo.save("bare", tensors={"body.weight": wide.body.weight.detach(), "body.bias": wide.body.bias.detach()})
        reason = r"without one: Mute: expected factory= of save_model.*; pass into= .* or factory="
        for version, found in (("mute@1", reason), ("mute@2", reason), ("bare", "saved by save_model.*pass into=")):
            with pytest.raises(GraphError, match=found):
                repo.load_model(version)
            built = repo.load_model(version, factory=lambda: Mute(3))
            assert torch.equal(built.body.weight, wide.body.weight)
        with pytest.raises(TensorMismatchError):
            repo.load_model("mute", into=narrow)
        with pytest.raises(GraphError, match="the layer 'body' of the built module differs"):
            repo.load_model("mute", factory=lambda: narrow)
        other = Mute(3)
        repo.load_model("mute", into=other)
        assert torch.equal(other.body.weight, wide.body.weight)

    def test_a_tied_tensor_takes_its_bytes_once(self, repo: Repository) -> None:
        net = Tied()
        saved = repo.save_model("tied", net)
        assert saved.bytes_written == repo.info("tied").bytes_total == net.embed.weight.nbytes
        tensors = repo.load("tied")
        assert np.shares_memory(tensors["embed.weight"], tensors["head.weight"])
        again = repo.save_model("tied", net)
        assert (again.bytes_written, again.bytes_inherited) == (0, net.embed.weight.nbytes)
        for number in (1, 2, 3):  # into a buffer of this process, then into memory that waits for it
            with torch.no_grad():
                net.embed.weight.add_(number)
            pending = repo.save_async("tied", {name: item.detach() for name, item in net.state_dict().items()})
            pending.staged()
            value = net.embed.weight.clone()
            with torch.no_grad():
                net.embed.weight.fill_(7)
            assert pending.committed().bytes_written == net.embed.weight.nbytes
            for name in ("embed.weight", "head.weight"):
                np.testing.assert_array_equal(repo.load("tied")[name], value.detach().numpy())
        assert repo.verify() == []

    def test_what_an_adapter_renames_is_shared_with_its_base(self, repo: Repository) -> None:
        base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        repo.save_model("adapted", base)
        adapted = torch.nn.ModuleDict({"base_model": base, "lora_A": torch.nn.Linear(4, 1, bias=False)})
        saved = repo.save_model("lora", adapted, parent="adapted")
        assert saved.bytes_written == adapted["lora_A"].weight.nbytes
        assert saved.bytes_inherited == sum(item.nbytes for item in base.parameters())
        for name, item in adapted.state_dict().items():
            np.testing.assert_array_equal(repo.load("lora")[name], item.numpy())
        assert set(repo.contributions("lora")) == {saved.ref, ModelRef("adapted", 1)}
        repo.retire("adapted")
        np.testing.assert_array_equal(repo.load("lora")["base_model.0.bias"], base[0].bias.detach().numpy())

    def test_training_goes_on_with_the_optimizer_and_its_schedule(self, repo: Repository) -> None:
        nets = [Tied(), Tied()]
        opts = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
        schedules = [torch.optim.lr_scheduler.StepLR(opt, 1) for opt in opts]

        def train(place: int) -> None:
            opts[place].zero_grad()
            nets[place](torch.tensor([1, 2])).square().sum().backward()
            opts[place].step()
            schedules[place].step()

        train(0)
        repo.save_model("trained", nets[0], optimizer=opts[0], scheduler=schedules[0])
        repo.load_model("trained", into=nets[1], optimizer=opts[1], scheduler=schedules[1])
        for place in (0, 1):
            train(place)
        assert torch.equal(nets[0].embed.weight, nets[1].embed.weight)
        assert opts[0].param_groups[0]["lr"] == opts[1].param_groups[0]["lr"] < 0.1
        with pytest.raises(TensorMismatchError, match="expected the state of a SGD; found that of a Adam"):
            repo.load_model("trained", into=nets[1], optimizer=torch.optim.SGD(nets[1].parameters()))
        with pytest.raises(GraphError, match="expected the optimizer itself"):
            repo.save_model("trained", nets[0], optimizer=True)

    def test_a_model_with_more_than_was_saved_is_refused_unless_asked(self, repo: Repository) -> None:
        repo.save_model("less", torch.nn.Sequential(torch.nn.Linear(2, 2)))
        more = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        before = more[0].weight.clone()
        with pytest.raises(TensorNotFoundError, match=r"strict=False; found none for \['1.weight', '1.bias'\]"):
            repo.load_model("less", into=more)
        assert torch.equal(more[0].weight, before)
        repo.load_model("less", into=more, strict=False)
        np.testing.assert_array_equal(more[0].weight.detach().numpy(), repo.load("less")["0.weight"])

    def test_what_was_saved_in_a_wrapper_fills_the_module(self, repo: Repository) -> None:
        net = Tied()
        repo.save("wrapped", {f"module.{name}": item for name, item in net.state_dict().items()})
        other = Tied()
        repo.load_model("wrapped", into=other)
        assert torch.equal(other.head.weight, net.head.weight)
        repo.load_model("wrapped", into=torch.nn.DataParallel(other))

    def test_a_module_on_meta_gets_memory(self, repo: Repository) -> None:
        net = Tied()
        repo.save_model("whole", net)
        with torch.device("meta"):
            empty = Tied()
        repo.load_model("whole", into=empty)
        assert empty.head.weight is empty.embed.weight
        assert torch.equal(empty.embed.weight, net.embed.weight)

    @pytest.mark.parametrize("given", [{"compile": False}, {"custom_objects": {"A": object}}])
    def test_what_only_keras_has_is_refused(self, repo: Repository, given: dict) -> None:
        repo.save_model("linear", torch.nn.Linear(2, 2))
        with pytest.raises(GraphError, match=f"{next(iter(given))}=.*expected a Keras model; found Linear"):
            repo.load_model("linear", into=torch.nn.Linear(2, 2), **given)

    def test_what_is_no_model_is_refused(self, repo: Repository) -> None:
        with pytest.raises(GraphError, match="expected a Keras model or a torch module; found dict"):
            repo.save_model("x", {})


def test_actors_are_called_directly(repo: Repository) -> None:
    repo.save("direct", {"t": np.ones(3)})
    catalog = ray.get_actor("models/catalog", namespace="tensorvine")
    assert ModelRef("direct", 1) in ray.get(catalog.models.remote("direct"), timeout=30)
    assert ray.get(catalog.topology.remote(), timeout=30).shards == (0,)
    shard = ray.get_actor("models/shard-0", namespace="tensorvine")
    assert ray.get(shard.stats.remote(), timeout=30).shard == 0
