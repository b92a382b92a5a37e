"""The engine of a client of Dask: the door for programs."""

from __future__ import annotations

from typing import Any, cast

from distributed import Client, Security

from ....store.errors import OptionError
from .directory_plugin import client_owner
from .engine import DaskEngine
from .links import SchedulerLink, own_address
from .records import Seat
from .switchboard import Switchboard
from .worker_plugins import machine


def engine_of(client: Client | None = None) -> DaskEngine:
    """Make an engine for a client; the cluster's first one has agents started on all machines of workers.

    Args:
        client: one that is not asynchronous; None: the current one. The engine is of no use when it is closed.

    Raises:
        OptionError: the client is asynchronous, or other processes cannot reach its scheduler.
        ShardUnavailableError: the scheduler does not answer.

    >>> engine = engine_of(Client("scheduler:8786"))                             # doctest: +SKIP
    """
    used = cast(Any, client or Client.current())
    scheduler = str(used.scheduler.address) if used.scheduler is not None else ""
    if used.asynchronous or scheduler.startswith("inproc"):
        raise OptionError(f"client: expected one that is not asynchronous, of a cluster with processes; found {used}")

    switchboard = Switchboard(lambda: SchedulerLink(scheduler, cast(Security, used.security)))
    try:
        cluster = switchboard.ask("cluster")
        owner, address = client_owner(used.id), own_address(scheduler)
        seat = Seat(cluster, owner, address, machine(), is_open=lambda: used.status not in ("closing", "closed"))
        engine = DaskEngine(seat, switchboard)
        engine.nodes()
    except BaseException:
        switchboard.close()
        raise
    return engine
