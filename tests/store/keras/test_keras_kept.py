"""What Keras layers keep beside their weights comes back: vocabularies, what `adapt` learns, files and arrays."""

from __future__ import annotations

import logging
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from tensorvine.store.errors import CorruptDataError, GraphError, TensorMismatchError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.keras import assign, build, fill, graph_of, recipe_of, tensors_of


@keras.saving.register_keras_serializable("tests")
class Remembers(layers.Layer):
    """A layer of one's own that keeps an array, a file in a folder, and a value that it derives from its weight."""

    table, text, doubled = None, "", None

    def build(self, input_shape) -> None:
        self.factor = self.add_weight(name="factor", initializer="ones")
        self.finalize_state()

    def call(self, x):
        return x * self.doubled + len(self.text) + (0 if self.table is None else self.table.sum())

    def finalize_state(self) -> None:
        self.doubled = float(self.factor.numpy()) * 2

    def save_own_variables(self, store) -> None:
        super().save_own_variables(store)
        if self.table is not None:
            store["table"] = self.table

    def load_own_variables(self, store) -> None:
        super().load_own_variables({key: store[key] for key in store.keys() - {"table"}})
        self.table = store["table"]

    def save_assets(self, path: str) -> None:
        Path(path, "deep").mkdir()
        Path(path, "deep", "words.txt").write_text(self.text)
        Path(path, "empty").touch()

    def load_assets(self, path: str) -> None:
        assert not Path(path, "empty").read_bytes()
        self.text = Path(path, "deep", "words.txt").read_text()
        if "bad" in self.text:
            raise RuntimeError("no bad words")


NUMBERS = np.random.default_rng(0).normal(30, 5, (20, 4)).astype("float32")
WORDS = ops.convert_to_tensor([["a"], ["b"], ["zz"]], dtype="string")
LINES = ["a b c", "b c d"]


def flat(layer: layers.Layer, x, dtype: str = "float32") -> tuple[keras.Model, object]:
    return keras.Sequential([keras.Input(x.shape[1:], dtype=dtype), layer]), x


def adapted(layer: layers.Layer, data, filled: bool) -> layers.Layer:
    if filled:
        layer.adapt(data)
    return layer


def normalized(filled: bool):
    return flat(adapted(layers.Normalization(), NUMBERS, filled), NUMBERS)


def normalized_inside(filled: bool):
    inner, x = normalized(filled)
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(inner(inputs))), x


def strings(filled: bool):
    return flat(adapted(layers.StringLookup(), [["a"], ["b"], ["a"]], filled), WORDS, "string")


def integers(filled: bool):
    data = np.array([[5], [7], [9]])
    return flat(adapted(layers.IntegerLookup(output_mode="multi_hot", max_tokens=9), data[:2], filled), data, "int64")


def texts(filled: bool):
    layer = adapted(layers.TextVectorization(output_sequence_length=3), LINES, filled)
    return flat(layer, ops.convert_to_tensor(["a d", "q c b"], dtype="string"), "string")


def weighted_texts(filled: bool):
    layer = layers.TextVectorization(output_mode="tf_idf", max_tokens=20, pad_to_max_tokens=True)
    return flat(adapted(layer, LINES, filled), ops.convert_to_tensor(["a d", "q c b"], dtype="string"), "string")


def bins(filled: bool):
    return flat(adapted(layers.Discretization(num_bins=4), NUMBERS[:, :1], filled), NUMBERS[:, :1])


def hashes(filled: bool):
    return flat(layers.Hashing(5), WORDS, "string")


def own(filled: bool):
    layer = Remembers()
    model, x = flat(layers.TimeDistributed(layer), NUMBERS[None])
    if filled:
        layer.table, layer.text = np.arange(3.0), "seven"
        layer.factor.assign(3.0)
        layer.finalize_state()
    return model, x


@keras.saving.register_keras_serializable("tests")
class Words(keras.Model):
    """A subclassed model with a vocabulary inside, and a file of its own."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.lookup, self.embedding, self.shift = layers.StringLookup(), layers.Embedding(4, 2), 0

    def call(self, x):
        return self.embedding(self.lookup(x)) + self.shift

    def save_assets(self, path: str) -> None:
        Path(path, "shift").write_text(str(self.shift))

    def load_assets(self, path: str) -> None:
        self.shift = int(Path(path, "shift").read_text())


def subclassed_words(filled: bool):
    model = Words()
    if filled:
        model.lookup.adapt([["a"], ["b"], ["a"]])
        model.shift = 5
    else:
        model.lookup.set_vocabulary(["q", "r"])
    model(WORDS)
    return model, WORDS


KEPT = [
    normalized,
    normalized_inside,
    strings,
    integers,
    texts,
    weighted_texts,
    bins,
    hashes,
    own,
    subclassed_words,
]


@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", ["rebuilt", "into"])
def test_what_layers_keep_beside_their_weights_comes_back(make, way: str) -> None:
    model, x = make(True)
    tensors, graph = tensors_of(model), graph_of(model)
    assert set(tensors) == set(graph.tensors)
    other = build(recipe_of(model)) if way == "rebuilt" else make(False)[0]
    fill(other, tensors, graph, {})
    assert np.array_equal(other(x), model(x))
    assert {name: a.tobytes() for name, a in tensors.items()} == {
        name: a.tobytes() for name, a in zip(tensors, tensors_of(other).values(), strict=True)
    }


def test_what_adapt_learns_is_no_architecture() -> None:
    for make in KEPT:
        assert graph_of(make(True)[0]).fingerprint == ModelGraph.from_json(state_graph(make(False)[0])).fingerprint


def state_graph(model: keras.Model) -> str:
    from tensorvine.store.keras import ModelState

    return ModelState(model).architecture.to_json()


def test_names_of_what_is_kept_are_the_layers_and_collide_with_none() -> None:
    @keras.saving.register_keras_serializable("tests")
    class Colliding(Remembers):
        def build(self, input_shape) -> None:
            super().build(input_shape)
            self.assets = layers.Dense(2, name="assets")
            self.assets.build((None, 4))
            self.words = layers.StringLookup(name="state")
            self.words.set_vocabulary(["a"])

    model = keras.Sequential([keras.Input((4,)), Colliding(name="c")])
    model.layers[0].table = np.arange(2.0)
    assert graph_of(model).by_name["c"].tensors == (
        "c/factor",
        "c/assets/kernel",
        "c/assets/bias",
        "c/assets#2/deep/words.txt",
        "c/assets#2/empty",
        "c/state#2/table",
        "c/state/assets/vocabulary.txt",
    )
    again = build(recipe_of(model), {"Colliding": Colliding})
    fill(again, tensors_of(model), graph_of(model), {})
    assert np.array_equal(again(NUMBERS), model(NUMBERS))


def test_what_was_compiled_before_does_not_answer_with_the_state_from_then() -> None:
    model, x = normalized(True)
    other = keras.Sequential([keras.Input((4,)), layers.Normalization()])
    other.layers[0].adapt(NUMBERS + 100)
    assert not np.allclose(other.predict_on_batch(x), model(x))
    fill(other, tensors_of(model), graph_of(model), {})
    np.testing.assert_allclose(other.predict_on_batch(x), model(x), rtol=1e-5)


@pytest.mark.parametrize("path", ["../x", "/x", "deep/../../x", "", ".", "deep//x", "nul\0"])
def test_a_path_that_leads_out_of_a_layers_assets_is_refused(path: str) -> None:
    model = keras.Sequential([keras.Input((4,)), Remembers(name="r")])
    with pytest.raises(CorruptDataError, match="expected a path within the layer's assets"):
        assign(model, {f"r/assets/{path}": np.zeros(1, np.uint8)})
    with pytest.raises(TensorMismatchError, match="a file's bytes"):
        assign(model, {"r/assets/deep/words.txt": np.zeros((1, 1), np.uint8)})


def test_a_layer_that_refuses_its_state_leaves_the_model_as_it_was() -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Normalization(), Remembers(), layers.Dense(2)])
        model.layers[1].table = np.ones(2)
        return model

    spoiled, model = make(), make()
    spoiled.layers[0].adapt(NUMBERS + 7)
    spoiled.layers[1].text = "bad words"
    model.layers[0].adapt(NUMBERS)
    model.layers[1].text, model.layers[1].table = "good", np.full(2, 5.0)
    before, answer = {name: a.tobytes() for name, a in tensors_of(model).items()}, np.array(model(NUMBERS))
    with pytest.raises(GraphError, match=r"layer 'remembers.*load_assets.*RuntimeError: no bad words"):
        fill(model, tensors_of(spoiled), graph_of(spoiled), {})
    assert {name: a.tobytes() for name, a in tensors_of(model).items()} == before
    assert np.array_equal(model(NUMBERS), answer)


@pytest.mark.parametrize("tokens", [["a", "line\nbreak"], ["a", "x\ny", ""], ["a", "z\x1c"], ["a", "\x1c"]])
def test_a_vocabulary_that_keras_file_cannot_hold_is_refused_when_it_is_stored(tokens: list[str]) -> None:
    model, _ = flat(layers.StringLookup(), WORDS, "string")
    model.layers[0].set_vocabulary(tokens)
    with pytest.raises(GraphError, match=r"StringLookup.*line break"):
        tensors_of(model)


@pytest.mark.parametrize("make", [strings, weighted_texts, bins], ids=lambda make: make.__name__)
def test_a_layer_that_was_not_adapted_yet_comes_back_so(make) -> None:
    model, _ = make(False)
    assert tensors_of(model) == {}
    again = build(recipe_of(model))
    fill(again, {}, graph_of(model), {})
    assert tensors_of(again) == {}


def test_a_version_from_before_vocabularies_were_stored_loads_and_says_so(caplog) -> None:
    @keras.saving.register_keras_serializable("tests")
    class Known(layers.StringLookup):
        pass

    model = keras.Sequential([keras.Input((1,), dtype="string"), Known(), layers.Embedding(9, 2)])
    model.layers[0].set_vocabulary(["a"])
    again = build(recipe_of(model))
    again.layers[0].set_vocabulary(["b"])
    with caplog.at_level(logging.WARNING, "tensorvine.store.keras"):
        old = {name: array for name, array in tensors_of(model).items() if "/assets/" not in name}
        fill(again, old, graph_of(model), {})
    assert [record.message for record in caplog.records if "Known has state outside its weights" in record.message]


@pytest.mark.parametrize("cell", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_states_of_stateful_recurrent_layers_are_not_stored_and_stay_as_they_are(cell: type[layers.RNN]) -> None:
    def made() -> keras.Model:
        return keras.Sequential([keras.Input(batch_shape=(2, 3, 4)), cell(5, stateful=True, name="cell")])

    def states_of(model: keras.Model) -> list[np.ndarray]:
        return [np.array(state.numpy()) for state in model.layers[0].states]

    one, other = made(), made()
    one(np.ones((2, 3, 4), "float32"))
    assert all(state.any() for state in states_of(one))
    assert len(tensors_of(one)) == len(one.weights)
    assert not any(state.any() for state in states_of(build(recipe_of(one))))
    before = states_of(one)
    assign(one, tensors_of(other))
    np.testing.assert_equal(states_of(one), before)
