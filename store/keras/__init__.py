"""Graphs, tensors, optimizer state and recipes of Keras models. A recipe is JSON text from which a model is rebuilt.

Layer state means all state that a layer stores outside its weights, such as a vocabulary.
"""

from .optimizers import assign_optimizer, optimizer_state_of, optimizer_tensors_of
from .recipe import all_layers, build, knowing, recipe_of
from .state import ModelState, snapshot
from .vertices import graph_of
from .weights import assign, fill, tensors_of, weights_in_call_order, weights_of

__all__ = [
    "ModelState",
    "all_layers",
    "assign",
    "assign_optimizer",
    "build",
    "fill",
    "graph_of",
    "knowing",
    "optimizer_state_of",
    "optimizer_tensors_of",
    "recipe_of",
    "snapshot",
    "tensors_of",
    "weights_in_call_order",
    "weights_of",
]
