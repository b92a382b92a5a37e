"""The Ray that this process uses: the running one where there is one, else one embedded in this process.

Rules
- Running means: initialised in this process, named by RAY_ADDRESS, or started on this machine with `ray start`, by this
  user or root (`discovery`). A Ray that another process embedded ends with that process, so nothing is started on it;
  `Repository.connect` does find it.
- A Ray that is started here asks for this user's token (`auth_token`). The token is presented to Rays of this user and
  root on this machine that ask for one, and wherever RAY_AUTH_MODE=token says so. Of a Ray that asks for none, one
  warning is logged.
- An embedded Ray ends with the process that started it, however that ends: its processes watch for that.
- Its object store is small unless told otherwise, and the rest of the memory may be reserved (`room`). It carries
  messages and what goes to other nodes; models lie in the shards' own memory (`memory`).
- Threads that want a Ray at one time initialise one: Ray itself does not see to that.
- Its actors run at the priority of this process, which may train on all cores. At Ray's default, nice 15, a shard would
  get 3% of a core beside it, and a message of a microsecond's work would wait for hundreds of milliseconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import ray

from ....store.errors import RepositoryNotFoundError
from ..engine import Engine
from ..room import MONITOR_OFF, available
from ..warned import warn_once
from . import auth_token, control_service, discovery
from .engine import RayEngine

log = logging.getLogger(__name__)

HERE = "local"
"""What RAY_ADDRESS says to have a Ray embedded."""
_joining = threading.RLock()
"""Held by the thread that initialises Ray in this process."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


def attach(address: str | None = None, runtime_env: Mapping[str, object] | None = None) -> None:
    """Use the Ray of this process, or another one that runs.

    Args:
        address: HOST:PORT of its control service; None: the one that RAY_ADDRESS names, or any on this machine.
        runtime_env: what Ray is to give this process's actors, beside what its job has; not where this process has
            a Ray already.

    Raises:
        RepositoryNotFoundError: no Ray runs there, or it refuses this process.
        StorageError: this user's token cannot be read.
        ValueError: the address is none.
    """
    with _joining:
        if not ray.is_initialized():
            _attach(address, runtime_env)


def _attach(address: str | None, runtime_env: Mapping[str, object] | None) -> None:
    try:
        chosen = address or discovery.named() or discovery.find(embedded=True)
        if chosen is None:
            raise ConnectionError("no Ray runs on this machine")
        if chosen == HERE:
            auth_token.guard()
        elif "://" not in chosen:  # Ray knows what the others are
            _introduce(chosen)
        ray.init(address=chosen, runtime_env=dict(runtime_env) if runtime_env is not None else None, **_QUIET)
    except ConnectionError as exc:
        raise RepositoryNotFoundError(f"expected a running Ray (`ray start --head`); {_reason(exc)}") from exc


def running() -> str | None:
    """Return the address of the Ray that RAY_ADDRESS names or `ray start` started on this machine; None: there is none.

    One that a process embedded is not told: it ends with that process. What tells of a Ray that is gone, or of another
    user's, is warned of.
    """
    named = discovery.named()
    if named is not None:
        return None if named == HERE else named
    try:
        return discovery.find(embedded=False)
    except ConnectionError:  # it was warned of
        return None


def joined(where: str | None = None) -> Engine:
    """Return the engine of the running Ray; see `choice.Door`. Arguments and errors are those of `attach`."""
    attach(where)
    return RayEngine()


def joined_or_started(where: None = None) -> tuple[Engine, bool]:
    """Return the engine of the running Ray, or of one that is started here; errors as of `attach_or_start`."""
    started = attach_or_start()
    return RayEngine(), started


def runs() -> bool:
    """Tell whether a Ray is initialised in this process."""
    return ray.is_initialized()


def attach_or_start(object_store_bytes: int | None = None, cpus: int | None = None) -> bool:
    """Use the running Ray, or start one on this machine; True when it was started here.

    Args:
        object_store_bytes: capacity of a new Ray's object store; None: a tenth of the memory, at most 2 GiB.
        cpus: CPU slots of a new Ray; None: all cores.

    Raises:
        RepositoryNotFoundError: the running Ray refuses this process.
        StoreFullError: there is too little memory to start one.
        StorageError: this user's token cannot be made or read.
    """
    with _joining:
        if ray.is_initialized():
            return False
        found = running()
        if found is not None:
            attach(found)
            return False
        _start(object_store_bytes, cpus)
    return True


def _start(object_store_bytes: int | None, cpus: int | None) -> None:
    room = available()
    room.check()
    store = object_store_bytes if object_store_bytes is not None else room.store_bytes
    auth_token.guard()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault(*MONITOR_OFF)
    sizes = {"object_store_memory": store, "_memory": room.beside(store)}
    log.info("no Ray runs on this machine: starting one in this process, which takes about 8 s")
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **sizes, **_QUIET)
    log.info("started a Ray in this process; it stops when the process ends")


def _introduce(address: str) -> None:
    """See who is at HOST:PORT, and have this user's token presented to it if it is this user's or root's Ray.

    Not to one that asks for none: who presents a token asks for one, too, and such a Ray ends actors whose owner does
    not answer it.

    Raises:
        ConnectionError: nobody listens there, or it asks for a token and gets none.
        ValueError: the address is none.
    """
    asks = control_service.asks_for_token(address)
    if asks is False:
        warn_once(log, f"the Ray at {address} requires no token: {auth_token.RISK}")
    elif discovery.doubt(address) is None:
        auth_token.offer()
    if asks and not auth_token.presented():
        raise ConnectionError(
            f"the Ray at {address} requires a token, and this process presents none: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH if the token is not this user's"
        )


def _reason(exc: ConnectionError) -> str:
    """Say why there is no connection; Ray hides a refused token in the cause."""
    refused = next((line for line in str(exc.__cause__).splitlines() if "AuthenticationError" in line), None)
    return f"found none: {exc}" if refused is None else f"it refused this process: {refused}"
