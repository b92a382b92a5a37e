"""TensorVine: model repository and model delivery for fine-tuning, architecture search and online updates.

`Repository` is imported on first use. In the source tree, this file is `clusters/package/__init__.py`, and the
subpackages `store`, `planner`, `actors` and `clusters` of `tensorvine` are top-level folders.
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
    """Connect to a running repository from any process of its cluster. This is a shortcut for `Repository.connect`.

    Args:
        name: Name of the repository. None means `"default"`.

    Raises:
        RepositoryNotFoundError: if no cluster is running, or the cluster has no repository of this name.
        ForeignRepositoryError: if `name` is None, and the repository belongs to another user.

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
