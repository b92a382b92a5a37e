"""Architecture search on a repository: candidates that inherit, a population that retires, and search libraries.

What serves one library is in a module of its own, which needs that library: `deephyper`, `tune`, `optuna`.
"""

from ..tasks.connection import connected, disconnect
from .candidate import Candidate
from .retirement import Population

__all__ = ["Candidate", "Population", "connected", "disconnect"]
