"""The Ray that this process uses: the running one where there is one, else one embedded in this process.

Rules
- An embedded Ray ends with the process that started it, however that ends: its processes watch for that.
- Its object store is sized like Ray's own default, 30% of the memory, unless told otherwise. Touching its pages is
  left to the shards (`staging.touch_store`): `RAY_preallocate_plasma_memory` does it inside the raylet's start,
  which Ray gives 30 s, and 3 GiB of fresh pages took longer than that (docs/design/memory.md).
"""

from __future__ import annotations

import logging
import os

import ray

from ..store.errors import RepositoryNotFoundError

log = logging.getLogger(__name__)


def attach() -> None:
    """Use the Ray of this process, or the cluster that RAY_ADDRESS or this machine's `ray start` names.

    Raises:
        RepositoryNotFoundError: no Ray runs.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ConnectionError as exc:
        raise RepositoryNotFoundError("expected a running Ray (`ray start --head`); found none") from exc


def attach_or_start(object_store_bytes: int | None = None, cpus: int | None = None) -> bool:
    """Use the running Ray, or start one on this machine; True when it was started here.

    Args:
        object_store_bytes: capacity of a new Ray's object store; None: Ray's default, 30% of the memory.
        cpus: CPU slots of a new Ray; None: all cores.
    """
    if ray.is_initialized():
        return False
    try:
        attach()
    except RepositoryNotFoundError:
        pass
    else:
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    log.info("started a Ray on this machine")
    return True


def stop() -> None:
    """End the embedded Ray, or leave the cluster that this process attached to."""
    ray.shutdown()
