"""TensorVine: a model repository and model-delivery engine for training coupled to inference, search and fine-tuning.

This folder is installed as the package `tensorvine` itself; `tensorvine.store`, `.planner`, `.actors` and `.clusters`
are the folders beside `clusters/`. Names are imported when they are first used.
"""

# its siblings are found where it is installed, not from this folder
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors.client.repository import Repository

    __version__: str
    __all__ = ["Repository", "__version__", "connect"]


def connect(name: str | None = None) -> Repository:
    """Connect to a running repository from any process of its cluster, as `Repository.connect` does.

    Args:
        name: the repository's name; None means `"default"`.

    Raises:
        RepositoryNotFoundError: no cluster runs, or no repository of that name runs on it.
        ForeignRepositoryError: no name is given, and the repository is another user's.

    >>> with connect() as repo:                                       # doctest: +SKIP
    ...     repo.models()
    [ModelRef('digits@1')]
    """
    from .actors.client.repository import Repository

    return Repository.connect(name)


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    if name == "__version__":
        from importlib.metadata import version

        return version("tensorvine")
    if name == "Repository":
        from .actors.client.repository import Repository

        return Repository
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["Repository", "__version__", "connect"]
