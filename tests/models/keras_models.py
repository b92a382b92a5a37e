"""Keras: applications are trained for a step, saved with their optimizers, and built again from the repository alone.

The control is a `.keras` file.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import keras
import numpy as np
from tensorvine.actors import Repository
from tensorvine.store.keras import optimizer_tensors_of, tensors_of

from .row import Failed, Row, names_in

SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71, "NASNetMobile": 224}
"""Where images may not be of 64 pixels."""
APPLICATIONS = names_in(
    """
    ConvNeXtTiny DenseNet121 DenseNet169 EfficientNetB0 EfficientNetV2B0 EfficientNetV2S InceptionResNetV2
    InceptionV3 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetMobile ResNet50 ResNet50V2 VGG16
    Xception
    """
)


def measure(repo: Repository, name: str) -> Row | Failed:
    """Save, load and compare one."""
    try:
        return _measured(repo, name)
    except Exception as exc:  # noqa: BLE001  a line of the table
        return Failed(f"keras {name}", f"{type(exc).__name__}: {exc}"[:200])
    finally:
        keras.backend.clear_session()
        gc.collect()


def _measured(repo: Repository, name: str) -> Row:
    keras.utils.set_random_seed(1)
    size = SIZES.get(name, 64)
    body = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3)
    )
    model = keras.Sequential([keras.Input((size, size, 3)), body, keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(1e-3), "mse", run_eagerly=True)
    batch = np.linspace(0, 1, 2 * size * size * 3, dtype=np.float32).reshape(2, size, size, 3)
    model.train_on_batch(batch, np.ones((2, 3), np.float32))
    only = repo.save_model(name, model)
    repo.save_model(name, model, optimizer=True)
    again = repo.load_model(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        control = keras.models.load_model(path)
    tensors = tensors_of(model)
    graph = repo.graph(name)
    repo.retire(f"{name}@1")
    repo.retire(f"{name}@2")
    answers = model.predict_on_batch(batch).tobytes()
    return Row(
        name=f"keras {name}",
        tensors=len(tensors),
        state_mib=sum(item.nbytes for item in tensors.values()) / 2**20,
        stored_mib=only.bytes_written / 2**20,
        graph=str(len(graph)),
        state=_weights(again) == _weights(model),
        optimizer=_optimizer(again) == _optimizer(model),
        answers=again.predict_on_batch(batch).tobytes() == answers,
        alone=True,
        control=_weights(control) == _weights(model)
        and _optimizer(control) == _optimizer(model)
        and control.predict_on_batch(batch).tobytes() == answers,
    )


def _weights(model: keras.Model) -> list[bytes]:
    return [array.tobytes() for array in model.get_weights()]


def _optimizer(model: keras.Model) -> list[bytes]:
    return [array.tobytes() for array in optimizer_tensors_of(model).values()]
