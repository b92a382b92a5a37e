"""Keras models become graphs of leaf layers, whose fingerprints tell what is computed and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers, ops
from tensorvine.store.errors import GraphError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.keras import graph_of

from tests.support.keras_models import (
    MODELS,
    Subclassed,
    attention,
    every_model,
    nested,
    operations,
    residual,
    shared_layer,
    shared_model,
    wrappers,
)


def by_class(graph: ModelGraph, name: str) -> list[Layer]:
    return [layer for layer in graph.layers if layer.config["class"] == name]


def edges(graph: ModelGraph) -> set[tuple[str, str]]:
    return {
        (graph.by_name[source].config["class"], layer.config["class"])
        for layer in graph.layers
        for source in layer.inputs
    }


@every_model
def test_a_model_made_twice_has_one_fingerprint(make) -> None:
    assert graph_of(make()).fingerprint == graph_of(make()).fingerprint


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
    with pytest.raises(GraphError, match=r"expected a built model.*call it on data"):
        graph_of(make())


def test_a_dictionary_reaches_the_inputs_of_a_nested_model_by_name() -> None:
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    inner = keras.Model([b, a], layers.Concatenate()([layers.Dense(1)(b), layers.Dense(1)(a)]))
    x, y = keras.Input((2,)), keras.Input((3,))
    graph = graph_of(keras.Model([x, y], inner({"a": x, "b": y})))
    (last,) = by_class(graph, "Concatenate")
    sources = [graph.by_name[graph.by_name[name].inputs[0]].config["batch_shape"] for name in last.inputs]
    assert sources == [[None, 3], [None, 2]]
