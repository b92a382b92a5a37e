"""The Ray that this process uses: the running one where there is one, else one embedded in this process.

Rules
- Running means: initialised in this process, named by RAY_ADDRESS, or started on this machine with `ray start`. A Ray
  that another process embedded ends with that process, so nothing is started on it; `Repository.connect` does find it.
- An embedded Ray ends with the process that started it, however that ends: its processes watch for that.
- Its object store is sized like Ray's own default, 30% of the memory, unless told otherwise. It carries messages and
  what goes to other nodes; models lie in the shards' own memory (`memory`), which is preallocated there.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray._private import services  # the only place that knows what `ray start` left for others to find

from ..store.errors import RepositoryNotFoundError

log = logging.getLogger(__name__)

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def attach() -> None:
    """Use the Ray of this process, or any that runs on this machine or that RAY_ADDRESS names.

    Raises:
        RepositoryNotFoundError: no Ray runs.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", **_QUIET)
    except ConnectionError as exc:
        raise RepositoryNotFoundError(f"expected a running Ray (`ray start --head`); found none: {exc}") from exc


def attach_or_start(object_store_bytes: int | None = None, cpus: int | None = None) -> bool:
    """Use the running Ray, or start one on this machine; True when it was started here.

    Args:
        object_store_bytes: capacity of a new Ray's object store; None: Ray's default, 30% of the memory.
        cpus: CPU slots of a new Ray; None: all cores.
    """
    if ray.is_initialized():
        return False
    running = services.get_ray_address_from_environment(None, None)  # pyright: ignore[reportArgumentType]
    if running is not None and running != "local":
        try:
            ray.init(address=running, **_QUIET)
        except ConnectionError as exc:
            if os.environ.get("RAY_ADDRESS"):
                raise RepositoryNotFoundError(f"expected a Ray at RAY_ADDRESS={running}; found none: {exc}") from exc
            log.warning("the Ray that was started at %s is gone: starting one in this process (%s)", running, exc)
        else:
            return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=cpus, object_store_memory=object_store_bytes, include_dashboard=False, **_QUIET)
    log.info("started a Ray in this process")
    return True


def stop() -> None:
    """End the embedded Ray, or leave the cluster that this process attached to."""
    ray.shutdown()
