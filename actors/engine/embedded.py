"""The Ray that this process uses: the running one where there is one, else one embedded in this process.

Rules
- Running means: initialised in this process, named by RAY_ADDRESS, or started on this machine with `ray start`. A Ray
  that another process embedded ends with that process, so nothing is started on it; `Repository.connect` does find it.
- An embedded Ray ends with the process that started it, however that ends: its processes watch for that.
- Its object store is sized like Ray's own default, 30% of the memory, unless told otherwise. It carries messages and
  what goes to other nodes; models lie in the shards' own memory (`memory`), which is preallocated there.
- Its actors run at the priority of this process, which may train on all cores. At Ray's default, nice 15, a shard would
  get 3% of a core beside it, and a message of a microsecond's work would wait for hundreds of milliseconds.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, cast

import ray
from ray._private import services  # the only place that knows what `ray start` left for others to find
from ray._private.authentication import authentication_token_setup

from ...store.errors import RepositoryNotFoundError
from .engine import Engine
from .ray import RayEngine

log = logging.getLogger(__name__)

REACH_S = 5.0
"""How long a Ray at a given address may take to accept a connection."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def attach(address: str | None = None) -> None:
    """Use the Ray of this process, or another one that runs.

    Args:
        address: HOST:PORT of its control service; None: the one that RAY_ADDRESS names, or any on this machine.

    Raises:
        RepositoryNotFoundError: no Ray runs there.
        ValueError: the address is none.
    """
    if ray.is_initialized():
        return
    try:
        chosen = address or cast(str, _found("auto"))
        if chosen != "local":
            _reach(chosen)
        ray.init(address=address or "auto", **_QUIET)  # Ray looks for its token where it finds the address itself
    except ConnectionError as exc:
        raise RepositoryNotFoundError(f"expected a running Ray (`ray start --head`); {_reason(exc)}") from exc


def running() -> str | None:
    """Return the address of the Ray that RAY_ADDRESS names or `ray start` started on this machine; None: there is none.

    One that a process embedded is not told: it ends with that process.
    """
    found = _found(None)
    if found is None or found == "local":
        return None
    if not os.environ.get("RAY_ADDRESS"):
        try:
            _reach(found)
        except ConnectionError as exc:  # what `ray start` wrote down stays when its Ray is killed
            log.warning("the Ray that was started on this machine is gone: %s", exc)
            return None
    return found


def default_engine() -> Engine:
    """Return the engine of the running Ray.

    Raises:
        RepositoryNotFoundError: no Ray runs.
    """
    attach()
    return RayEngine()


def attach_or_start(object_store_bytes: int | None = None, cpus: int | None = None) -> bool:
    """Use the running Ray, or start one on this machine; True when it was started here.

    Args:
        object_store_bytes: capacity of a new Ray's object store; None: Ray's default, 30% of the memory.
        cpus: CPU slots of a new Ray; None: all cores.
    """
    if ray.is_initialized():
        return False
    found = running()
    if found is not None:
        attach()
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=cpus, object_store_memory=object_store_bytes, include_dashboard=False, **_QUIET)
    log.info("started a Ray in this process")
    return True


def take_token() -> None:
    """Use the token of this user's Rays if there is one and RAY_AUTH_MODE says nothing: `ray start` does so.

    So does `attach` where Ray finds the address itself, but not where one is given.
    """
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _found(address: str | None) -> str | None:
    """Return the address that Ray finds for "auto" or for None, of the Rays that run now.

    Ray looks once per process which run on this machine, and would go on naming one that has ended.
    """
    services.find_gcs_addresses.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    return cast("str | None", services.get_ray_address_from_environment(cast(Any, address), None))


def _reach(address: str) -> None:
    """Look whether anybody listens at HOST:PORT: Ray itself would try for minutes.

    Raises:
        ConnectionError: nobody does.
        ValueError: the address is none.
    """
    if "://" in address:
        return  # not a plain address: Ray knows what it is
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address of a Ray: expected HOST:PORT; found {address!r}")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, OverflowError) as exc:
        raise ConnectionError(f"nobody answers at {address} ({exc})") from exc


def _reason(exc: ConnectionError) -> str:
    """Say why there is no connection; Ray hides a refused token in the cause."""
    refused = next((line for line in str(exc.__cause__).splitlines() if "AuthenticationError" in line), None)
    return f"found none: {exc}" if refused is None else f"it refused this process: {refused}"


def stop() -> None:
    """End the embedded Ray, or leave the cluster that this process attached to."""
    ray.shutdown()
