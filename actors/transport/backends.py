"""What the back ends of groups need to be transports of updates: loaded before anybody waits for it.

Rules
- Nothing is imported before somebody asks for a transport by name: PyTorch takes seconds, and hundreds of megabytes.
"""

from __future__ import annotations

from importlib.util import find_spec

from ...store.errors import ShardUnavailableError, TensorVineError
from ..collective.group import Group
from ..collective.rendezvous import Rendezvous

BACKENDS = ("gloo", "nccl")
"""Back ends that are transports; `transport=` calls them so."""
TROUBLE = (TensorVineError, OSError, RuntimeError, ValueError)
"""What connecting and using a group may raise."""


def load(backend: str, where: str) -> None:
    """Import what a back end needs in this process.

    Args:
        backend: its name.
        where: names the process in errors.

    Raises:
        ShardUnavailableError: it is not there.
    """
    try:
        if backend == "gloo":
            from ..collective.gloo import library as gloo_library

            gloo_library.load()
        elif backend == "nccl":
            from ..collective.nccl.cuda import Cuda

            Cuda()
    except (ImportError, RuntimeError) as exc:
        raise ShardUnavailableError(f"{where}: expected the packages of {backend!r}; {exc}") from exc


def is_here(backend: str) -> bool:
    """Tell whether a back end can be used from this process; PyTorch is only looked for."""
    if backend == "gloo":
        return find_spec("torch") is not None
    try:
        load(backend, "here")
    except ShardUnavailableError:
        return False
    return True


def connect_pair(name: str, rank: int, backend: str, timeout: float, rendezvous: Rendezvous) -> Group:
    """Join a group of two, as the shard (rank 0) or its reader (1); errors as in `collective.connect.connect`."""
    from ..collective.connect import connect

    return connect(name, rank, 2, backend=backend, timeout=timeout, rendezvous=rendezvous)
