"""The clients of Dask that a program uses, and the engine of each: the door for programs.

Rules
- The current client is Dask's: that of the task which this is, or the one that was made last. Where there is none it is
  the last that was made here for an address.
- An engine ends with its client. A client that is made for an address stays until the program ends, as a Ray that it
  joins does; one that had to start a cluster ends with `Engine.leave`.
- A cluster that is started here is as quiet as a Ray that is: Ctrl-C comes to this process alone, which ends the
  others, and what they complain of while they end is not said.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import dask.config
from distributed import Client, LocalCluster, Security
from distributed.comm.addressing import normalize_address, parse_address, parse_host_port, resolve_address
from distributed.worker import get_client  # pyright: ignore[reportUnknownVariableType]  its arguments have no types

from ....store.errors import OptionError, RepositoryNotFoundError, ShardUnavailableError
from ..sockets.framing import outcome_of
from .engine import DaskEngine
from .hosts import ASK, machine, own_address
from .hosts import ask as ask_scheduler
from .records import Seat
from .scheduler_plugin import DirectoryPlugin, client_owner

CONNECT_S = 2.0
"""How long a scheduler may take to accept a connection."""
INSTALL_S = 60.0
"""How long the scheduler, and the nannies of all workers, may take to begin with the directory."""
_CLOSED = ("closing", "closed")
_WITHOUT_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
"""What workers carry out first that a terminal would send its Ctrl-C, too."""
_joining = threading.RLock()
"""Held by the thread that makes a client or an engine."""
_engines: dict[str, DaskEngine] = {}
"""Client's id -> its engine."""
_clients: dict[str, Client] = {}
"""Address as it was given -> the client that was made for it; the last that was asked for is the last."""
_R = TypeVar("_R")


def joined(where: Client | str | None = None) -> DaskEngine:
    """Return the engine of a client; see `choice.Door`.

    Args:
        where: a client, or a scheduler's address; None: the current client, or the scheduler that Dask's configuration
            names (DASK_SCHEDULER_ADDRESS).

    Raises:
        RepositoryNotFoundError: no scheduler answers there, or no client is current.
        OptionError: the client is asynchronous, or other processes cannot reach its scheduler; the address is none.
        ShardUnavailableError: the scheduler does not answer any more.
    """
    with _joining:
        client = _client(where)
        if client is None:
            raise RepositoryNotFoundError(
                "expected a current Dask client, or a scheduler's address in Dask's configuration "
                "(DASK_SCHEDULER_ADDRESS); found none"
            )
        return _engine(client)


def joined_or_started(where: Client | str | None = None) -> tuple[DaskEngine, bool]:
    """Return the engine of a client as `joined` does, or of a `LocalCluster` that is started; True: it was started."""
    with _joining:
        client = _client(where)
        if client is not None:
            return _engine(client), False
        ending = contextlib.ExitStack()
        with contextlib.ExitStack() as failed:
            failed.push(ending)
            cluster = ending.enter_context(_local_cluster())
            engine = _engine(ending.enter_context(Client(cluster)), ending.close)
            failed.pop_all()
        return engine, True


def runs() -> bool:
    """Tell whether a client is current."""
    return _current() is not None


def in_full(address: str) -> str:
    """Return the address of a scheduler with its scheme, which by default is that of Dask's configuration.

    >>> in_full("scheduler:8786"), in_full("tls://scheduler:8786")
    ('tcp://scheduler:8786', 'tls://scheduler:8786')
    """
    return normalize_address(address)


def engine_of(client: Client, end_client: Callable[[], object] | None = None) -> DaskEngine:
    """Make an engine for a client; the cluster's first one has nannies and workers be hosts of actors.

    Args:
        client: one that is not asynchronous. The engine ends when it is closed.
        end_client: what `leave` calls.

    Raises:
        OptionError: the client is asynchronous, or other processes cannot reach its scheduler.
        ShardUnavailableError: the scheduler does not answer.

    >>> engine = engine_of(Client("scheduler:8786"))                             # doctest: +SKIP
    """
    used = cast(Any, client)
    scheduler = str(used.scheduler.address) if used.scheduler is not None else ""
    if used.asynchronous or not scheduler or scheduler.startswith("inproc"):
        raise OptionError(f"client: expected a synchronous client of a cluster with processes; found {used}")
    open_client = weakref.ref(client)

    def is_open() -> bool:
        known = open_client()
        return known is not None and known.status not in _CLOSED

    def directory(question: bytes) -> bytes:
        return _run(open_client(), ask_scheduler, question)

    cluster = _run(client, _installed)
    seat = Seat(cluster, client_owner(used.id), own_address(scheduler), machine(), is_open=is_open)
    engine = DaskEngine(seat, directory, end_client)
    engine.nodes()
    return engine


def _run(client: Client | None, work: Callable[..., Coroutine[Any, Any, _R]], *arguments: object) -> _R:
    """Run a coroutine function with a client's scheduler in the client's event loop.

    Raises:
        ShardUnavailableError: the scheduler does not answer.
    """
    used = cast(Any, client)
    if used is None or used.status != "running":
        raise ShardUnavailableError("the scheduler: expected an answer; the client is not connected to it")
    try:
        return used.sync(work, used.scheduler, *arguments, callback_timeout=INSTALL_S)
    except (OSError, TimeoutError) as exc:
        raise ShardUnavailableError(f"the scheduler: expected an answer; {exc or 'timed out'}") from exc


async def _installed(scheduler: Any) -> str:
    """Have the scheduler hold the directory, unless it does; gives its address, as it says it itself."""
    plugin = DirectoryPlugin()
    await scheduler.register_scheduler_plugin(plugin=pickle.dumps(plugin), name=plugin.name, idempotent=True)
    return outcome_of(await getattr(scheduler, ASK)(question=pickle.dumps(("cluster", ()), 5)))


def _engine(client: Client, end_client: Callable[[], object] | None = None) -> DaskEngine:
    """Return this process's engine of a client."""
    for ended in [known for known, engine in _engines.items() if not engine.is_running]:
        _engines.pop(ended).close()
    if client.id not in _engines:
        _engines[client.id] = engine_of(client, end_client)
    return _engines[client.id]


def _client(where: Client | str | None) -> Client | None:
    if isinstance(where, Client):
        return where
    if where is None:
        current = _current()
        where = cast("str | None", dask.config.get("scheduler-address", None))
        if current is not None or where is None:
            return current
    known = _clients.pop(where, None)
    if known is None or known.status in _CLOSED:
        known = _connected(where)
    _clients[where] = known
    return known


def _current() -> Client | None:
    clients = list(_clients.values())
    with contextlib.suppress(ValueError):  # Dask knows of none
        clients.append(get_client())
    return next((client for client in reversed(clients) if client.status not in _CLOSED), None)


def _local_cluster() -> Any:
    preloads = cast("str | list[str]", dask.config.get("distributed.worker.preload"))
    also = [preloads] if isinstance(preloads, str) else preloads
    return LocalCluster(
        dashboard_address=":0",  # 8787 may be another's
        silence_logs=logging.CRITICAL,
        preload=[*also, _WITHOUT_INTERRUPTS],
    )


def _connected(address: str) -> Client:
    """Make a client for an address; whether anybody listens there is tried first, as a client would try for long."""
    try:
        place = resolve_address(address)
        _check_encryption(place)
        if not place.startswith("ucx"):
            socket.create_connection(parse_host_port(parse_address(place)[1]), CONNECT_S).close()
        return Client(place, set_as_default=False)
    except ValueError as exc:
        raise OptionError(f"engine: expected the address of a Dask scheduler; found {address!r}: {exc}") from exc
    except OSError as exc:
        raise RepositoryNotFoundError(f"expected a Dask scheduler at {address}; found none: {exc}") from exc


def _check_encryption(place: str) -> None:
    """Refuse what a client would refuse as well, which then waits for a minute until it ends.

    Raises:
        ValueError: what Dask's configuration says of TLS does not fit the address.
    """
    configured = cast("dict[str, object]", Security().get_connection_args("client"))
    encrypted = place.startswith(("tls:", "wss:"))
    if encrypted and configured["ssl_context"] is None:
        raise ValueError("expected TLS certificates in Dask's configuration (distributed.comm.tls); found none")
    if not encrypted and configured["require_encryption"]:
        raise ValueError("expected tls://HOST:PORT, because Dask's configuration requires encryption")
