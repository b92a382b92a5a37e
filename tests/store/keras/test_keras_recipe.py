"""A recipe names parts of models and functions of tensors: other functions of Keras are not called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.api_export import REGISTERED_NAMES_TO_OBJS
from tensorvine.store.errors import GraphError
from tensorvine.store.keras import build, recipe_of


@keras.saving.register_keras_serializable("tests")
def doubled(x: Any) -> Any:
    return x * 2


@keras.saving.register_keras_serializable("tests")
class RaisingLayer(layers.Layer):
    raises: BaseException | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.raises is not None:
            raise self.raises


def plain() -> dict[str, Any]:
    inputs = keras.Input((4,), name="i")
    return json.loads(recipe_of(keras.Model(inputs, layers.Dense(2, name="d")(inputs))))


def calling(function: Mapping[str, object], args: list[object], arguments: Mapping[str, object]) -> str:
    """Write a recipe of which a Lambda layer calls a function when the model is built."""
    recipe = plain()
    config = {"name": "L", "trainable": True, "dtype": "float32", "function": function, "arguments": arguments}
    layer = {"module": "keras.layers", "class_name": "Lambda", "registered_name": None, "name": "L", "config": config}
    recipe["config"]["layers"].insert(1, {**layer, "inbound_nodes": [{"args": args, "kwargs": {}}]})
    recipe["trainable_flags"].append(True)
    return json.dumps(recipe)


def function(module: str, name: str, **more: object) -> dict[str, object]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name, **more}


def array(value: object) -> dict[str, object]:
    return {"class_name": "__numpy__", "config": {"value": value, "dtype": "float32"}}


def test_a_function_that_writes_a_file_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    image, path = array(np.zeros((1, 4, 4, 3)).tolist()), tmp_path / "figure.png"
    options = {"path": str(path), "value_range": [0, 255], "rows": 1, "cols": 1}
    with pytest.raises(GraphError, match=r"found keras\.visualization\.plot_image_gallery"):
        build(calling(function("keras.visualization", "plot_image_gallery"), [image], options))
    assert not path.exists()


@pytest.mark.parametrize("place", ["activation", "loss", "build config", "class", "other name"])
def test_wherever_it_stands(place: str) -> None:
    found = function("keras.config", "set_floatx")
    recipe = plain()
    dense = recipe["config"]["layers"][1]
    if place == "activation":
        dense["config"]["activation"] = found
    elif place == "loss":
        recipe["compile_config"] = {"optimizer": "sgd", "loss": [{"a": found}]}
    elif place == "build config":
        dense["build_config"] = {"input_shape": found}
    elif place == "class":
        dense["config"]["kernel_initializer"] = {**found, "class_name": "set_floatx", "config": {}}
    else:
        dense["config"]["activation"] = {**found, "registered_name": "tests>doubled"}
    with pytest.raises(GraphError, match=r"found keras\.config\.set_floatx"):
        build(json.dumps(recipe))


OTHERS = sorted(
    name
    for name, item in REGISTERED_NAMES_TO_OBJS.items()
    if name.startswith("keras.") and not isinstance(item, type) and not name.endswith(".preprocess_input")
    if name.split(".")[1] not in ("activations", "losses", "metrics", "ops", "quantizers", "random")
    if not name.startswith("keras.utils.bounding_boxes.")
)


def test_all_functions_of_other_packages_are_refused() -> None:
    assert len(OTHERS) > 100
    for name in OTHERS:
        module, _, own = name.rpartition(".")
        with pytest.raises(GraphError, match=f"found {name}"):
            build(calling(function(module, own), [], {}))


@pytest.mark.parametrize("name", ["keras.losses.deserialize", "keras.activations.get", "keras.metrics.serialize"])
def test_what_finds_others_by_name_is_refused(name: str) -> None:
    module, _, own = name.rpartition(".")
    with pytest.raises(GraphError, match=f"found {name}"):
        build(calling(function(module, own), [], {}))


def test_a_program_is_not_imported() -> None:
    recipe = plain()
    recipe["config"]["layers"][1]["config"]["kernel_initializer"]["module"] = "json.__main__"
    with pytest.raises(GraphError, match=r"found the program 'json\.__main__'"):
        build(json.dumps(recipe))


def test_functions_of_tensors_and_own_ones_come_back() -> None:
    inputs = keras.Input((4,), name="i")
    net = keras.Model(inputs, layers.Dense(2, activation=doubled)(layers.Activation("relu")(inputs)))
    net.compile("adam", loss=keras.losses.mean_squared_error, metrics=[keras.metrics.mean_absolute_error])
    built = build(recipe_of(net))
    assert built.layers[-1].activation is doubled
    images = array(np.zeros((1, 4, 4, 3)).tolist())
    with pytest.raises(GraphError, match="configs of 3 layers"):  # it was called: its result is no symbol
        build(calling(function("keras.applications.resnet50", "preprocess_input"), [images], {}))


def test_one_that_is_given_goes_before() -> None:
    built = {"normalize": lambda x: x * 3}
    recipe = plain()
    recipe["config"]["layers"][1]["config"]["activation"] = function("keras.utils", "normalize")
    with pytest.raises(GraphError, match=r"found keras\.utils\.normalize"):
        build(json.dumps(recipe))
    assert build(json.dumps(recipe), built).layers[-1].activation is built["normalize"]


@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit(), OSError("no"), AssertionError()])
def test_whatever_a_layer_raises_is_an_error_of_ours(raised: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(keras.Sequential([keras.Input((4,)), RaisingLayer()]))
    monkeypatch.setattr(RaisingLayer, "raises", raised)
    with pytest.raises(GraphError, match="recipe: expected a text from recipe_of"):
        build(recipe)
    monkeypatch.setattr(RaisingLayer, "raises", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build(recipe)
