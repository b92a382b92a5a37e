"""Tools for working with repositories: local clusters, lineage reports and the command line.

Each class and function is imported when it is first used. Therefore, `tensorvine --help` works without Ray and Dask.
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
