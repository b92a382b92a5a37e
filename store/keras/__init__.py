"""Keras models: their graph, their tensors, and a recipe from which the model is built again.

From outside: the names below. It stands on the arrays, facts and graphs of `store`.
"""

from .recipe import all_layers, build, recipe_of
from .vertices import graph_of
from .weights import (
    assign,
    assign_optimizer,
    assign_to,
    optimizer_state_of,
    optimizer_tensors_of,
    snapshot,
    tensors_of,
    weights_in_call_order,
    weights_of,
)

__all__ = [
    "all_layers",
    "assign",
    "assign_optimizer",
    "assign_to",
    "build",
    "graph_of",
    "optimizer_state_of",
    "optimizer_tensors_of",
    "recipe_of",
    "snapshot",
    "tensors_of",
    "weights_in_call_order",
    "weights_of",
]
