"""Architecture search with a repository. Candidates inherit layers from stored models and are saved as new versions.

The modules `deephyper`, `tune` and `optuna` support the search libraries DeepHyper, Ray Tune and Optuna. Each module
needs its library.
"""

from ..tasks.connection import connected, disconnect
from .candidate import Candidate
from .retirement import Population

__all__ = ["Candidate", "Population", "connected", "disconnect"]
