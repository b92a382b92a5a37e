"""`tensorvine metrics`: a server that Prometheus scrapes."""

from __future__ import annotations

import contextlib
import threading
from importlib.resources import files
from typing import Annotated

import typer

from ...store.waiting import LONGEST_S
from ..client import Address, Name, Scheduler, joined, running_at

PORT = 9464


def metrics(
    port: Annotated[int, typer.Option(help="Port of the server.", min=0, max=65535)] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 means all.")] = "127.0.0.1",
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Print a Grafana dashboard as JSON and exit.")] = False,
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
) -> None:
    """Serve the metrics of a repository to Prometheus until Ctrl-C is pressed.

    The metrics contain no names of models. Only processes on this machine can read them, unless --host is set. If the
    repository stops, the server waits for its restart. Requires the extra `web`.
    """
    if dashboard:
        typer.echo((files("tensorvine.clusters.metrics") / "dashboard.json").read_text())
        return
    from ...actors.client.repository import Repository
    from ..metrics.server import MetricsServer

    with joined(running_at(address, scheduler)) as engine:
        with Repository.connect(name, engine=engine) as found:
            known = found.name
        with MetricsServer(lambda: Repository.connect(known, engine=engine), port, host) as server:
            typer.echo(f"Metrics of repository {known}: {server.address}")
            with contextlib.suppress(KeyboardInterrupt):
                while not threading.Event().wait(LONGEST_S):
                    pass
