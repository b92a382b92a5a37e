"""Graphs, state, optimizer state and recipes of PyTorch modules. A recipe is JSON text from which a module is rebuilt.

A module may be wrapped by `DistributedDataParallel`, `DataParallel` or `torch.compile`.
"""

from typing import TYPE_CHECKING

from ..removed import removed
from .factories import register_factory
from .inference import keep_in_inference
from .loading import assign, check_tied, loads_itself, tied
from .optimizer import Restoring, optimizer_tensors_of, restoring
from .recipe import build, recipe_of
from .state import State, is_compiled, lacking, live_tensors, tensors_of
from .tracing import tensors_in
from .vertices import graph_of

__all__ = [
    "Restoring",
    "State",
    "assign",
    "build",
    "check_tied",
    "graph_of",
    "is_compiled",
    "keep_in_inference",
    "lacking",
    "live_tensors",
    "loads_itself",
    "optimizer_tensors_of",
    "recipe_of",
    "register_factory",
    "restoring",
    "tensors_in",
    "tensors_of",
    "tied",
]

if not TYPE_CHECKING:
    __getattr__ = removed(__name__, {"architecture_of": "graph_of, which returns the same graph, without its key"})
