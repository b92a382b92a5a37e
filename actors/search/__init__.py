"""Architecture search on a repository: candidates that inherit, and a population whose former members are retired.

The modules `deephyper`, `tune` and `optuna` connect search libraries. Each one needs its library.
"""

from ..tasks.connection import connected, disconnect
from .candidate import Candidate
from .retirement import Population

__all__ = ["Candidate", "Population", "connected", "disconnect"]
