"""The embedded default: one machine.

Rules
- Attaches to the Ray that runs; starts one only where there is none, and stops only what it started.
- The embedded Ray belongs to this process: its daemons watch for the end of this process and follow it, after
  Ctrl-C and after a kill too. `close` is clean and quick.
"""

from __future__ import annotations

from types import TracebackType

from ..actors.engine.opened import Opened
from ..actors.engine.ray import embedded
from ..actors.engine.ray.engine import RayEngine


class LocalCluster:
    """A Ray on this machine, as a context manager.

    Args:
        object_store_bytes: capacity of the object store; None: a tenth of the memory, at most 2 GiB.
        cpus: CPU slots; None: all cores.

    >>> with LocalCluster(object_store_bytes=1 << 30) as cluster:     # doctest: +SKIP
    ...     repo = Repository.start()
    """

    def __init__(self, *, object_store_bytes: int | None = None, cpus: int | None = None) -> None:
        self._opened = Opened("LocalCluster")
        self.started = embedded.attach_or_start(object_store_bytes, cpus)
        """True when this object started the Ray that it uses."""

    def close(self) -> None:
        """Stop the Ray that this object started. Does nothing in a forked child."""
        if self._opened.close() and self.started:
            self.started = False
            RayEngine().leave()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
