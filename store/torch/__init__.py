"""PyTorch modules: their graph, their state, and that of their optimizers.

From outside: the names below. It stands on the arrays, facts and graphs of `store`.
"""

from .copies import is_compiled
from .optimizer import Restoring, optimizer_tensors_of, restoring
from .state import State, assign, lacking, live_tensors, tensors_of
from .tracing import tensors_in
from .vertices import graph_of

__all__ = [
    "Restoring",
    "State",
    "assign",
    "graph_of",
    "is_compiled",
    "lacking",
    "live_tensors",
    "optimizer_tensors_of",
    "restoring",
    "tensors_in",
    "tensors_of",
]
