"""Tools for users of a repository: local clusters, lineage reports and the command line.

Names are imported when they are first used, so `tensorvine --help` needs no engine (Ray or Dask).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store.lazy import lazy

if TYPE_CHECKING:
    from .lineage.lineage import Lineage, Relative, lineage_of
    from .lineage.picture import draw_lineage
    from .lineage.tree import lineage_tree
    from .local import LocalCluster

    __all__ = ["Lineage", "LocalCluster", "Relative", "draw_lineage", "lineage_of", "lineage_tree"]

_MODULES = {
    "Lineage": "lineage.lineage",
    "LocalCluster": "local",
    "Relative": "lineage.lineage",
    "draw_lineage": "lineage.picture",
    "lineage_of": "lineage.lineage",
    "lineage_tree": "lineage.tree",
}

__getattr__, __dir__ = lazy(__name__, _MODULES)
