"""The repository client, online model updates, data-parallel training, and loading and saving of Dask arrays.

Each class and function is imported when it is first used. Therefore, `EdgeConsumer` works without Ray, and only some
classes, such as `CheckpointCallback`, need Keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.lazy import lazy

if TYPE_CHECKING:
    from .client.diff import Diff
    from .client.match import PrefixMatch
    from .client.repository import Repository
    from .client.save.pending import PendingSave
    from .client.save.request import Saved
    from .client.stats import RepositoryStats
    from .client.traffic import Traffic
    from .client.verifier import Problem
    from .edge.consumer import EdgeConsumer
    from .planner.resizing import ScaleReport
    from .planner.streams import Fitted, TrainingStatus
    from .tasks.arrays import load_arrays
    from .tasks.saving import save_arrays
    from .training.directing import ForkReport
    from .training.forks import fork, fork_many, fork_version
    from .training.keras.callback import ForkCallback
    from .training.keras.training import KerasTraining
    from .training.mailbox import find_trainers
    from .training.numpy import NumpyTraining, StepContext
    from .training.report import RankReport
    from .training.start import start_trainers
    from .training.torch.rank import ForkableRank
    from .training.torch.training import TorchTraining
    from .training.trainers import Trainers
    from .training.training import RankContext, Training
    from .updates.callback import CheckpointCallback
    from .updates.consumer import Consumer
    from .updates.follower import ConsumerStatus, Delivery
    from .updates.producer import Producer
    from .updates.published import PublishReport, Update
    from .updates.publisher import Publisher
    from .updates.ray_serve import serve_application
    from .updates.rollout import Waves
    from .updates.serving import Inference, Servable, Serving
    from .updates.weights import load_weights, save_weights

    __all__ = [
        "CheckpointCallback",
        "Consumer",
        "ConsumerStatus",
        "Delivery",
        "Diff",
        "EdgeConsumer",
        "Fitted",
        "ForkCallback",
        "ForkReport",
        "ForkableRank",
        "Inference",
        "KerasTraining",
        "NumpyTraining",
        "PendingSave",
        "PrefixMatch",
        "Problem",
        "Producer",
        "PublishReport",
        "Publisher",
        "RankContext",
        "RankReport",
        "Repository",
        "RepositoryStats",
        "Saved",
        "ScaleReport",
        "Servable",
        "Serving",
        "StepContext",
        "TorchTraining",
        "Traffic",
        "Trainers",
        "Training",
        "TrainingStatus",
        "Update",
        "Waves",
        "find_trainers",
        "fork",
        "fork_many",
        "fork_version",
        "load_arrays",
        "load_weights",
        "save_arrays",
        "save_weights",
        "serve_application",
        "start_trainers",
    ]

_MODULES = {
    "CheckpointCallback": "updates.callback",
    "Consumer": "updates.consumer",
    "ConsumerStatus": "updates.follower",
    "Delivery": "updates.follower",
    "Diff": "client.diff",
    "EdgeConsumer": "edge.consumer",
    "Fitted": "planner.streams",
    "ForkCallback": "training.keras.callback",
    "ForkReport": "training.directing",
    "ForkableRank": "training.torch.rank",
    "Inference": "updates.serving",
    "KerasTraining": "training.keras.training",
    "NumpyTraining": "training.numpy",
    "PendingSave": "client.save.pending",
    "PrefixMatch": "client.match",
    "Problem": "client.verifier",
    "Producer": "updates.producer",
    "PublishReport": "updates.published",
    "Publisher": "updates.publisher",
    "RankContext": "training.training",
    "RankReport": "training.report",
    "Repository": "client.repository",
    "RepositoryStats": "client.stats",
    "Saved": "client.save.request",
    "ScaleReport": "planner.resizing",
    "Servable": "updates.serving",
    "Serving": "updates.serving",
    "StepContext": "training.numpy",
    "TorchTraining": "training.torch.training",
    "Traffic": "client.traffic",
    "Trainers": "training.trainers",
    "Training": "training.training",
    "TrainingStatus": "planner.streams",
    "Update": "updates.published",
    "Waves": "updates.rollout",
    "find_trainers": "training.mailbox",
    "fork": "training.forks",
    "fork_many": "training.forks",
    "fork_version": "training.forks",
    "load_arrays": "tasks.arrays",
    "load_weights": "updates.weights",
    "save_arrays": "tasks.saving",
    "save_weights": "updates.weights",
    "serve_application": "updates.ray_serve",
    "start_trainers": "training.start",
}

_NEEDS = {
    "CheckpointCallback": "keras",
    "ForkCallback": "keras",
    "ForkableRank": "torch",
    "KerasTraining": "keras",
    "TorchTraining": "torch",
}

__getattr__, __dir__ = lazy(__name__, _MODULES, _NEEDS)
