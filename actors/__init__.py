"""The store and the planner brought to life: actors, transports and the client.

Names are imported when they are first used: a consumer outside the cluster imports `edge`, and no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.lazy import lazy

if TYPE_CHECKING:
    from .callback import CheckpointCallback
    from .consumer import Consumer
    from .edge import EdgeConsumer
    from .follower import ConsumerStatus, Delivery
    from .forking.fork import ForkReport, fork, fork_many, fork_version
    from .match import PrefixMatch
    from .pending import PendingSave
    from .producer import Producer
    from .publisher import Publisher, PublishReport, Update
    from .ray_serve import serve_application
    from .repository import Repository, RepositoryStats
    from .resizing import ScaleReport
    from .save_request import Saved
    from .serving import Inference, Servable, Serving
    from .streams import Fitted
    from .training.keras import KerasTraining
    from .training.keras_callback import ForkCallback
    from .training.numpy import NumpyTraining, StepContext
    from .training.post import find_trainers
    from .training.report import RankReport
    from .training.start import Trainers, start_trainers
    from .training.torch import TorchTraining
    from .training.torch_rank import ForkableRank
    from .training.training import RankContext, Training
    from .verifier import Problem
    from .weights import load_weights, save_weights

__all__ = [
    "CheckpointCallback",
    "Consumer",
    "ConsumerStatus",
    "Delivery",
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
    "Trainers",
    "Training",
    "Update",
    "find_trainers",
    "fork",
    "fork_many",
    "fork_version",
    "load_weights",
    "save_weights",
    "serve_application",
    "start_trainers",
]

_MODULES = {
    "CheckpointCallback": "callback",
    "Consumer": "consumer",
    "ConsumerStatus": "follower",
    "Delivery": "follower",
    "EdgeConsumer": "edge",
    "Fitted": "streams",
    "ForkCallback": "training.keras_callback",
    "ForkReport": "forking.fork",
    "ForkableRank": "training.torch_rank",
    "Inference": "serving",
    "KerasTraining": "training.keras",
    "NumpyTraining": "training.numpy",
    "PendingSave": "pending",
    "PrefixMatch": "match",
    "Problem": "verifier",
    "Producer": "producer",
    "PublishReport": "publisher",
    "Publisher": "publisher",
    "RankContext": "training.training",
    "RankReport": "training.report",
    "Repository": "repository",
    "RepositoryStats": "repository",
    "Saved": "save_request",
    "ScaleReport": "resizing",
    "Servable": "serving",
    "Serving": "serving",
    "StepContext": "training.numpy",
    "TorchTraining": "training.torch",
    "Trainers": "training.start",
    "Training": "training.training",
    "Update": "publisher",
    "find_trainers": "training.post",
    "fork": "forking.fork",
    "fork_many": "forking.fork",
    "fork_version": "forking.fork",
    "load_weights": "weights",
    "save_weights": "weights",
    "serve_application": "ray_serve",
    "start_trainers": "training.start",
}

__getattr__, __dir__ = lazy(__name__, _MODULES)
