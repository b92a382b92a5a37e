"""How a cluster comes up, and the command line.

Names are imported when they are first used: `tensorvine --help` needs no engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lineage import Lineage, Relative, lineage_of
    from .lineage_picture import draw_lineage
    from .lineage_tree import lineage_tree
    from .local import LocalCluster

__all__ = ["Lineage", "LocalCluster", "Relative", "draw_lineage", "lineage_of", "lineage_tree"]

_MODULES = {
    "Lineage": "lineage",
    "LocalCluster": "local",
    "Relative": "lineage",
    "draw_lineage": "lineage_picture",
    "lineage_of": "lineage",
    "lineage_tree": "lineage_tree",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
