"""Keras models become graphs of leaf layers, give their weights, and are built again from a recipe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from tensorvine.store.errors import CorruptDataError, GraphError, TensorMismatchError, TensorNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.keras import (
    assign,
    assign_optimizer,
    build,
    fill,
    graph_of,
    optimizer_tensors_of,
    recipe_of,
    tensors_of,
)


@keras.saving.register_keras_serializable("tests")
class Scale(layers.Layer):
    """A layer of one's own with a weight that has no name, and a layer inside."""

    def __init__(self, units: int = 2, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units)
        self.second = layers.Dense(units)

    def build(self, input_shape) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")
        self.first.build(input_shape)
        self.second.build((*input_shape[:-1], self.units))

    def call(self, x):
        return self.second(self.first(x)) * self.factor

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model whose graph Keras cannot know."""

    def __init__(self, units: int = 3, **kwargs) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units)
        self.blocks = [layers.Dense(units), keras.Sequential([layers.Dense(units), layers.ReLU()])]
        self.shift = self.add_weight(shape=(units,), name="shift")

    def call(self, x):
        for block in (self.first, *self.blocks):
            x = block(x)
        return x + self.shift

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units}


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def built_late() -> keras.Model:
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])
    model.build((None, 5))
    return model


def residual() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Add()([inputs, x])))


def nested() -> keras.Model:
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, layers.Dense(3)(layers.Dense(5)(inner_in)))
    middle = keras.Sequential([keras.Input((4,)), inner, layers.LayerNormalization()])
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(middle(layers.Dense(4)(inputs))))


def shared_layer() -> keras.Model:
    left, right = keras.Input((4,)), keras.Input((4,))
    dense = layers.Dense(3)
    return keras.Model([left, right], layers.Concatenate()([dense(left), dense(right)]))


def shared_model() -> keras.Model:
    tower = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.ReLU()])
    left, right = keras.Input((4,)), keras.Input((4,))
    return keras.Model([left, right], layers.Subtract()([tower(left), tower(right)]))


def many_in_many_out() -> keras.Model:
    image, words = keras.Input((6, 6, 1), name="image"), keras.Input((5,), name="words", dtype="int32")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(image))
    y = layers.GRU(3)(layers.Embedding(10, 4, mask_zero=True)(words))
    both = layers.Multiply()([x, y])
    return keras.Model({"image": image, "words": words}, {"a": layers.Dense(1)(both), "b": layers.Dense(2)(x)})


def wrappers() -> keras.Model:
    block = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(4)),
            layers.TimeDistributed(block),
            layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)], return_sequences=True),
            layers.Bidirectional(layers.GRU(2)),
        ]
    )


def attention() -> keras.Model:
    query, value = keras.Input((3, 4)), keras.Input((5, 4))
    return keras.Model([query, value], layers.MultiHeadAttention(2, 2)(query, value))


def operations() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    x = ops.relu(x + inputs * 2.0)[:, 1:3]
    return keras.Model(inputs, ops.concatenate([x, ops.cast(x > 0, "float32")], axis=-1))


def states() -> keras.Model:
    inputs = keras.Input((5, 2))
    _, hidden, cell = layers.LSTM(3, return_state=True)(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([cell, hidden])))


def custom() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Scale(2), Scale(3)])


def subclassed() -> keras.Model:
    model = Subclassed(3)
    model(np.ones((2, 4), "float32"))
    return model


def subclassed_inside() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(Subclassed(3)(inputs)))


MODELS: list[Callable[[], keras.Model]] = [
    sequential,
    built_late,
    residual,
    nested,
    shared_layer,
    shared_model,
    many_in_many_out,
    wrappers,
    attention,
    operations,
    states,
    custom,
    subclassed,
    subclassed_inside,
]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def by_class(graph: ModelGraph, name: str) -> list[Layer]:
    return [layer for layer in graph.layers if layer.config["class"] == name]


def edges(graph: ModelGraph) -> set[tuple[str, str]]:
    return {
        (graph.by_name[source].config["class"], layer.config["class"])
        for layer in graph.layers
        for source in layer.inputs
    }


@every_model
def test_graph_and_weights_name_the_same_tensors(make) -> None:
    model = make()
    tensors = tensors_of(model)
    assert set(tensors) == set(graph_of(model).tensors)
    assert [array.shape for array in tensors.values()] == [tuple(w.shape) for w in model.weights]
    assert all(np.array_equal(a, w.numpy()) for a, w in zip(tensors.values(), model.weights, strict=True))


@every_model
def test_a_model_made_twice_has_one_fingerprint(make) -> None:
    assert graph_of(make()).fingerprint == graph_of(make()).fingerprint


@every_model
def test_a_model_built_from_its_recipe_is_the_same(make) -> None:
    model = make()
    model.layers[-1].trainable = False
    model.compile("adam", loss="mse")
    again = build(recipe_of(model))
    assert again.name == model.name
    assert graph_of(again) == graph_of(model)
    assert [layer.trainable for layer in again.layers] == [layer.trainable for layer in model.layers]
    assert len(again.trainable_variables) == len(model.trainable_variables) <= len(model.variables)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assign(again, tensors_of(model))
    assert all(np.array_equal(a, b) for a, b in zip(again.get_weights(), model.get_weights(), strict=True))


@every_model
def test_a_graph_survives_json(make) -> None:
    graph = graph_of(make())
    assert ModelGraph.from_json(graph.to_json()) == graph


def test_models_differ_pairwise() -> None:
    prints = {graph_of(make()).fingerprint for make in MODELS}
    assert len(prints) == len(MODELS)


def test_a_config_is_the_layers_own_without_name_trainable_and_dtype() -> None:
    model = keras.Sequential([keras.Input((4,), name="x"), layers.Dense(3, "relu", name="d", trainable=False)])
    entry, dense = graph_of(model).layers
    assert entry.config["class"] == "InputLayer"
    assert entry.config["batch_shape"] == [None, 4]
    assert dense.config["class"] == "Dense"
    assert (dense.config["units"], dense.config["activation"]) == (3, "relu")
    assert not {"name", "trainable", "dtype", "call"} & {*dense.config, *entry.config} - {"dtype"}
    assert "dtype" not in dense.config


@pytest.mark.parametrize(
    "change",
    [
        lambda: layers.Dense(3, name="other"),
        lambda: layers.Dense(3, trainable=False),
        lambda: layers.Dense(3, dtype="mixed_bfloat16"),
    ],
    ids=["name", "trainable", "policy"],
)
def test_name_trainable_flag_and_dtype_policy_leave_the_fingerprint(change) -> None:
    def of(layer: layers.Layer) -> bytes:
        return graph_of(keras.Sequential([keras.Input((4,)), layer])).fingerprint

    assert of(change()) == of(layers.Dense(3))
    wrapped = layers.TimeDistributed(change())
    inner = graph_of(keras.Sequential([keras.Input((2, 4)), wrapped])).fingerprint
    plain = layers.TimeDistributed(layers.Dense(3))
    assert inner == graph_of(keras.Sequential([keras.Input((2, 4)), plain])).fingerprint


def test_units_and_input_shape_change_the_fingerprint() -> None:
    def of(width: int, units: int) -> bytes:
        return graph_of(keras.Sequential([keras.Input((width,)), layers.Dense(units)])).fingerprint

    assert len({of(4, 3), of(5, 3), of(4, 2)}) == 3


def test_a_nested_model_is_replaced_by_its_layers() -> None:
    graph = graph_of(nested())
    classes = [layer.config["class"] for layer in graph.layers]
    assert classes == ["InputLayer", "Dense", "Dense", "Dense", "LayerNormalization", "Dense"]
    assert [len(layer.inputs) for layer in graph.layers] == [0, 1, 1, 1, 1, 1]
    inputs = keras.Input((4,))
    x = layers.LayerNormalization()(layers.Dense(3)(layers.Dense(5)(layers.Dense(4)(inputs))))
    flat = graph_of(keras.Model(inputs, layers.Dense(1)(x)))
    assert graph.fingerprint == flat.fingerprint


def test_a_shared_layer_is_a_vertex_per_use_with_the_same_tensors() -> None:
    first, second = by_class(graph_of(shared_layer()), "Dense")
    assert second.name == f"{first.name}#2"
    assert first.tensors == second.tensors
    assert first.inputs != second.inputs


def test_a_shared_model_is_flattened_once_per_use() -> None:
    graph = graph_of(shared_model())
    dense = by_class(graph, "Dense")
    assert len(dense) == 2
    assert dense[0].tensors == dense[1].tensors
    assert len(by_class(graph, "ReLU")) == 2
    assert len(by_class(graph, "InputLayer")) == 2
    (last,) = by_class(graph, "Subtract")
    assert {graph.by_name[name].config["class"] for name in last.inputs} == {"ReLU"}


def test_a_fork_and_a_residual_are_edges() -> None:
    graph = graph_of(residual())
    (add,) = by_class(graph, "Add")
    assert [graph.by_name[name].config["class"] for name in add.inputs] == ["InputLayer", "Dense"]


def test_a_wrapper_is_one_vertex_with_all_its_weights() -> None:
    graph = graph_of(wrappers())
    classes = [layer.config["class"] for layer in graph.layers]
    assert classes == [
        "InputLayer",
        "Bidirectional",
        "TimeDistributed",
        "TimeDistributed",
        "RNN",
        "Bidirectional",
    ]
    assert [len(layer.tensors) for layer in graph.layers] == [0, 6, 2, 4, 6, 6]
    (layer,) = by_class(graph_of(attention()), "MultiHeadAttention")
    assert len(layer.tensors) == 8


def test_the_order_and_the_names_of_a_calls_arguments_matter() -> None:
    def of(call: Callable) -> bytes:
        query, value = keras.Input((3, 4)), keras.Input((5, 4))
        return graph_of(keras.Model([query, value], call(layers.MultiHeadAttention(2, 2), query, value))).fingerprint

    same = {
        of(lambda layer, q, v: layer(q, v)),
        of(lambda layer, q, v: layer(query=q, value=v)),
        of(lambda layer, q, v: layer(value=v, query=q)),
    }
    others = {
        of(lambda layer, q, v: layer(v, q)),
        of(lambda layer, q, v: layer(q, v, key=v)),
        of(lambda layer, q, v: layer(q, v, use_causal_mask=True)),
    }
    assert len(same) == 1
    assert len(same | others) == 4


def test_operations_are_vertices_and_their_constants_matter() -> None:
    def of(call: Callable) -> ModelGraph:
        inputs = keras.Input((4,))
        return graph_of(keras.Model(inputs, call(inputs)))

    graph = graph_of(operations())
    assert {"Add", "Multiply", "Relu", "GetItem", "Greater", "Cast", "Concatenate"} <= {
        layer.config["class"] for layer in graph.layers
    }
    calls = [
        lambda x: x * 2.0,
        lambda x: x * 3.0,
        lambda x: x[:, :1],
        lambda x: x[:, 1:],
        lambda x: ops.cast(x, "int32"),
        lambda x: ops.cast(x, "float16"),
        lambda x: x * np.ones(4, "float32"),
        lambda x: x * np.full(4, 2, "float32"),
        lambda x: ops.transpose(x, (0, 1)),
        lambda x: ops.transpose(x, (1, 0)),
    ]
    assert len({of(call).fingerprint for call in calls}) == len(calls)
    assert [of(call).fingerprint for call in calls] == [of(call).fingerprint for call in calls]


def test_which_output_of_a_layer_is_used_matters() -> None:
    def of(index: int) -> bytes:
        inputs = keras.Input((5, 2))
        outputs = layers.LSTM(3, return_state=True)(inputs)
        return graph_of(keras.Model(inputs, layers.Dense(1)(outputs[index]))).fingerprint

    assert len({of(0), of(1), of(2)}) == 3


def test_a_lambda_is_told_by_what_its_function_does() -> None:
    def of(function: Callable) -> bytes:
        layer = layers.Lambda(function, output_shape=(4,))
        return graph_of(keras.Sequential([keras.Input((4,)), layer])).fingerprint

    assert of(lambda x: x * 2) == of(lambda x: x * 2)
    assert of(lambda x: x * 2) != of(lambda x: x * 3)


def test_a_layer_without_a_config_is_told_by_its_constructor_arguments() -> None:
    class Shift(layers.Layer):
        def __init__(self, by) -> None:
            super().__init__()
            self.by = by

        def call(self, x):
            return x + self.by

    def of(by: float) -> ModelGraph:
        return graph_of(keras.Sequential([keras.Input((2,)), Shift(np.full(2, by, "float32"))]))

    assert of(1.0).fingerprint == of(1.0).fingerprint
    assert of(1.0).fingerprint != of(2.0).fingerprint


def test_a_subclassed_model_is_a_chain_and_says_so_once(caplog) -> None:
    class Own(Subclassed):
        pass

    with caplog.at_level(logging.WARNING, "tensorvine.store.keras"):
        for _ in range(2):
            model = Own(3)
            model(np.ones((2, 4), "float32"))
            graph = graph_of(model)
    assert [layer.config["class"] for layer in graph.layers] == ["Dense", "Dense", "Dense", "ReLU", "Own"]
    assert edges(graph) == {("Dense", "Dense"), ("Dense", "ReLU")}
    assert [record.message for record in caplog.records if "Own has no functional graph" in record.message] == [
        caplog.records[0].message
    ]


def test_a_chains_fingerprints_tell_the_shapes_of_its_weights() -> None:
    narrow, wide = Subclassed(3), Subclassed(3)
    narrow(np.ones((2, 4), "float32"))
    wide(np.ones((2, 5), "float32"))
    chains = [
        {graph.fingerprints[layer.name] for layer in graph.layers if layer.config["class"] != "Subclassed"}
        for graph in (graph_of(narrow), graph_of(wide))
    ]
    assert len(chains[0]) == 4
    assert not chains[0] & chains[1]


@pytest.mark.parametrize("make", [lambda: Subclassed(3), lambda: keras.Sequential([layers.Dense(2)])])
def test_a_model_that_is_not_built_is_refused(make) -> None:
    with pytest.raises(GraphError, match=r"expected one that is built.*call it on data"):
        graph_of(make())


def test_a_layer_attached_to_a_model_but_not_called_keeps_its_weights() -> None:
    model = residual()
    model.extra = layers.Dense(2)
    model.extra.build((None, 3))
    assert len(tensors_of(model)) == len(model.weights) == 6
    assert set(tensors_of(model)) == set(graph_of(model).tensors)


def test_a_dictionary_reaches_the_inputs_of_a_nested_model_by_name() -> None:
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    inner = keras.Model([b, a], layers.Concatenate()([layers.Dense(1)(b), layers.Dense(1)(a)]))
    x, y = keras.Input((2,)), keras.Input((3,))
    graph = graph_of(keras.Model([x, y], inner({"a": x, "b": y})))
    (last,) = by_class(graph, "Concatenate")
    sources = [graph.by_name[graph.by_name[name].inputs[0]].config["batch_shape"] for name in last.inputs]
    assert sources == [[None, 3], [None, 2]]


def test_arrays_share_the_variables_memory_and_are_read_only() -> None:
    model = residual()
    one, two = tensors_of(model), tensors_of(model)
    assert all(np.shares_memory(one[name], two[name]) for name in one)
    assert not any(array.flags.writeable for array in one.values())


def test_arrays_are_snapshots_that_training_does_not_change() -> None:
    model = residual()
    model.compile("adam", "mse")
    arrays = tensors_of(model)
    before = {name: array.copy() for name, array in arrays.items()}
    model.fit(np.ones((8, 4)), np.ones((8, 2)), epochs=2, verbose=0)
    model.weights[0].assign_add(np.ones_like(before[next(iter(before))]))
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)
    assert not any(np.array_equal(array, before[name]) for name, array in tensors_of(model).items())


def test_assign_copies_and_takes_a_part() -> None:
    model = residual()
    name = next(iter(tensors_of(model)))
    given = np.full(tensors_of(model)[name].shape, 7, "float32")
    others = {key: array for key, array in tensors_of(model).items() if key != name}
    assign(model, {name: given})
    model.weights[0].assign_add(given)
    assert given.max() == 7
    assert tensors_of(model)[name].min() == 14
    assert all(np.array_equal(tensors_of(model)[key], array) for key, array in others.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_weights_of_other_dtypes_come_and_go(dtype: str) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype=dtype, name="d")])
    array = tensors_of(model)["d/kernel"]
    assert array.dtype.name == dtype
    assign(model, {"d/kernel": np.ones_like(array)})
    assert np.array_equal(tensors_of(model)["d/kernel"], np.ones((4, 3), array.dtype))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"no/such": np.zeros(1)}, TensorNotFoundError, "'no/such'"),
        (
            {"d/bias": np.zeros(4, "float32")},
            TensorMismatchError,
            r"'d/bias': expected float32 of shape \(3,\)",
        ),
        ({"d/bias": np.zeros(3)}, TensorMismatchError, r"'d/bias': expected float32 .* found float64"),
        ({"d/bias": "text"}, TensorMismatchError, r"'d/bias': expected an array"),
    ],
)
def test_assign_writes_nothing_if_anything_is_wrong(wrong, error, message) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="d")])
    before = tensors_of(model)
    with pytest.raises(error, match=message):
        assign(model, {"d/kernel": np.ones((4, 3), "float32"), **wrong})
    assert all(np.array_equal(array, before[name]) for name, array in tensors_of(model).items())


ONES = np.ones((2, 4), "float32")


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (residual, ONES),
        (wrappers, np.ones((2, 6, 4), "float32")),
        (shared_model, [ONES, ONES]),
        (subclassed, ONES),
    ],
    ids=["residual", "wrappers", "shared_model", "subclassed"],
)
def test_training_goes_on_from_the_optimizers_state(make, x) -> None:
    model = make()
    model.compile("adam", "mse", run_eagerly=True)
    assert optimizer_tensors_of(model) == {}
    y = np.zeros(tuple(model(x).shape), "float32")
    model.train_on_batch(x, y)
    state = optimizer_tensors_of(model)
    assert {f"optimizer/adam/{name}/momentum" for name in tensors_of(model)} <= set(state), list(state)
    again = build(recipe_of(model))
    assign(again, tensors_of(model))
    assign_optimizer(again, state)
    model.train_on_batch(x, y)
    again.train_on_batch(x, y)
    assert list(optimizer_tensors_of(again)) == list(state)
    for one, two in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_model_without_an_optimizer_has_no_optimizer_state() -> None:
    model = residual()
    assert optimizer_tensors_of(model) == {}
    assign_optimizer(model, {})
    with pytest.raises(TensorNotFoundError, match="optimizer/adam/iteration"):
        assign_optimizer(model, {"optimizer/adam/iteration": np.int64(1)})


@pytest.mark.parametrize("recipe", ["", "[]", "{}", "3", '{"class_name": "Nothing", "config": {}}'])
def test_what_is_no_recipe_is_refused(recipe: str) -> None:
    with pytest.raises(GraphError, match="recipe: expected"):
        build(recipe)


def test_a_recipe_with_code_is_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2, output_shape=(4,))])
    with pytest.raises(GraphError, match="recipe: expected"):
        build(recipe_of(model))


def test_classes_that_are_not_registered_are_given_by_name() -> None:
    class Mine(layers.Dense):
        pass

    model = keras.Sequential([keras.Input((4,)), Mine(3)])
    recipe = recipe_of(model)
    with pytest.raises(GraphError, match="Mine"):
        build(recipe)
    assert graph_of(build(recipe, {"Mine": Mine})) == graph_of(model)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
}


def optimizer_of(name: str) -> keras.optimizers.Optimizer:
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9)
    if name == "MultiOptimizer":
        return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(adam, {".*kernel": sgd}))
    return keras.optimizers.LossScaleOptimizer(adam) if name == "LossScaleOptimizer" else OPTIMIZERS[name]()


def step(model: keras.Model) -> None:
    model.train_on_batch(ONES, np.zeros((2, 2), "float32"))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Optimizer"}))
def test_every_optimizer_goes_on_bit_for_bit_in_a_model_that_was_built_again(name: str, policy: str) -> None:
    if policy == "mixed_float16" and name == "MultiOptimizer":
        pytest.skip("Keras refuses it under a LossScaleOptimizer")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype=policy), layers.Dense(2, dtype=policy)])
    optimizer = optimizer_of(name)
    if policy == "mixed_float16" and name != "LossScaleOptimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model.compile(optimizer, "mse", run_eagerly=True)
    step(model)
    step(model)
    again = build(recipe_of(model))
    fill(again, tensors_of(model), graph_of(model), optimizer_tensors_of(model))
    for _ in range(2):
        one, two = ({**tensors_of(each), **optimizer_tensors_of(each)} for each in (model, again))
        assert list(one) == list(two)
        assert [array.tobytes() for array in one.values()] == [array.tobytes() for array in two.values()]
        step(model)
        step(again)


def test_an_optimizers_variable_that_was_stored_under_keras_number_is_found() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("nadam", "mse", run_eagerly=True)
    step(model)
    state = optimizer_tensors_of(model)
    old = {"optimizer/nadam/variable_7" if name.endswith("/variable") else name: a for name, a in state.items()}
    assert old.keys() != state.keys()
    again = build(recipe_of(model))
    assign_optimizer(again, old)
    assert all(np.array_equal(array, state[name]) for name, array in optimizer_tensors_of(again).items())


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
    with pytest.raises(GraphError, match=r"StringLookup.*end of a line"):
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
    assert [record.message for record in caplog.records if "Known keeps more than weights" in record.message]


def test_a_model_that_has_more_weights_than_a_version_is_refused() -> None:
    small = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a")])
    large = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(2, name="b")])
    before = [a.tobytes() for a in large.get_weights()]
    with pytest.raises(TensorNotFoundError, match=r"'b/bias', 'b/kernel'. are missing"):
        fill(large, tensors_of(small), graph_of(small), {})
    assert [a.tobytes() for a in large.get_weights()] == before
    fill(large, tensors_of(small), graph_of(small), {}, strict=False)
    assert [a.tobytes() for a in large.get_weights()] == [a.tobytes() for a in small.get_weights()] + before[2:]
