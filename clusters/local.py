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
    """A context manager that connects to a running Ray cluster, or starts Ray on this machine if none is running.

    Args:
        object_store_bytes: Capacity of the object store in bytes, if Ray is started. None means a tenth of the
            available memory, at least 80 MiB and at most 2 GiB.
        cpus: Number of CPU slots, if Ray is started. None means all cores.

    >>> with LocalCluster(object_store_bytes=1 << 30) as cluster:     # doctest: +SKIP
    ...     repo = Repository.start()
    """

    def __init__(self, *, object_store_bytes: int | None = None, cpus: int | None = None) -> None:
        self._opened = Opened("LocalCluster")
        self.started = embedded.attach_or_start(object_store_bytes, cpus)
        """Whether this object started the Ray that it uses."""

    def close(self) -> None:
        """Stop Ray, if this object started Ray. Does nothing in a forked child process."""
        if self._opened.close() and self.started:
            self.started = False
            RayEngine().leave()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
