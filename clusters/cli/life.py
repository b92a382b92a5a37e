"""`tensorvine up` and `tensorvine down`: a repository that outlives the command."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.errors import OperationTimeoutError, OptionError, StorageError, TensorVineError
from .. import words
from ..client import (
    Address,
    AsJson,
    EngineName,
    Name,
    Place,
    Scheduler,
    connected,
    console,
    joined,
    place_of,
    print_json,
)
from ..nodes import STARTED_BY_UP
from .options import bytes_from, keep_from, nodes_from, redis_from, scaling_from

if TYPE_CHECKING:
    from ...actors.client.repository import Repository
    from ..head import Head
    from ..nodes import Machine

DEFAULT_PORT = 6379
FLUSH_S = 600.0
_OF_A_START = {
    "codec": "--codec",
    "keep": "--keep",
    "scaling": "--scaling",
    "store_bytes": "--store-bytes",
    "preallocate_bytes": "--preallocate",
}
"""Options that a repository which runs already is not compared with."""
NODES_S = 300.0
"""How long `up` waits for nodes."""


def up(
    name: Name = None,
    shards: Annotated[
        int | None,
        typer.Option(help="How many shards. Without it: one on each node, now and later.", show_default=False, min=1),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="What a node must have to hold a shard: resources with amounts and labels with values, such as "
            "'tensorvine=1'. Without it: every node may.",
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Directory or URI (s3://, gs://) that keeps the history; every node must reach it."),
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="How tensors are stored there, such as 'shuffle|zstd(3)'; needs --path.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Which versions of a name stay in memory once they are on disk, such as 'last(3)|best(1)', of "
            "last(N), best(N), every(N) and bytes(SIZE); needs --path. Without it: all, until room is needed."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Nodes that must hold a version.", min=1)] = 1,
    store_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each shard, such as 4GB or 512MiB. Without it: half of what its node has left.",
        ),
    ] = None,
    preallocate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="How much of it each takes at the start. Without it: 256MiB; 0: none."),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="When shards join and drain by themselves, such as 'least=1,most=8,full=0.75'; also requests_per_s, "
            "join_after_s, drain_after_s. Without it: as --shards says."
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="TENSORVINE_REDIS",
            help="Redis server where consumers outside the cluster hear of versions; a password is better in the "
            "variable, as others of the machine see arguments.",
        ),
    ] = None,
    wait_nodes: Annotated[
        int, typer.Option(help="Wait until the cluster has so many nodes, for 5 minutes at most.", min=1)
    ] = 1,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="What runs it. Without it: as --address and --scheduler say.", show_default=False),
    ] = None,
    address: Address = None,
    scheduler: Scheduler = None,
    port: Annotated[
        int | None,
        typer.Option(help=f"Port of a Ray that is started here; 0: any free one. Without it: {DEFAULT_PORT}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a repository that stays until `tensorvine down`.

    It runs on the Dask of --scheduler or DASK_SCHEDULER_ADDRESS, or on the Ray of --address or RAY_ADDRESS, or on the
    one that was started on this machine; where there is none, a Ray is started here first, but never a Dask. What is on
    --path is brought back.
    """
    from ...actors.client.repository import Repository
    from ...store.codecs.codec import from_spec
    from ..nodes import await_nodes

    policies = {
        "codec": from_spec(codec) if codec is not None else None,
        "keep": keep_from(keep) if keep is not None else None,
        "scaling": scaling_from(scaling) if scaling is not None else None,
        "store_bytes": bytes_from(store_bytes, "--store-bytes", 1) if store_bytes is not None else None,
        "preallocate_bytes": bytes_from(preallocate, "--preallocate") if preallocate is not None else None,
        "redis": redis_from(redis) if redis is not None else None,
        "nodes": nodes_from(nodes) if nodes is not None else None,
    }
    if path is None and (codec is not None or keep is not None):
        option = "--codec" if codec is not None else "--keep"
        raise typer.BadParameter("expected --path beside it", param_hint=option)
    progress = console(stderr=True)
    wanted = place_of(address, scheduler, engine)
    if wanted.engine is EngineName.DASK and port is not None:
        raise typer.BadParameter("expected none with Dask, which is not started here", param_hint="--port")
    with _running(wanted, DEFAULT_PORT if port is None else port) as place:
        started = place is not wanted
        if started:
            (progress if as_json else console()).print(f"Ray is up at {place.address}")
        with joined(place) as cluster:
            with progress.status(f"waiting for {words.count(wait_nodes, 'node')}"):
                await_nodes(cluster, wait_nodes, NODES_S)
            with progress.status("starting the repository"):
                options: Any = {"shards": shards, "path": path, "replicas": replicas, **policies}
                repository = Repository.start(name, engine=cluster, **options)
            stats = repository.stats()
            new = repository.started_here
            repository.leave()
    if not new and (ignored := [option for name, option in _OF_A_START.items() if policies[name] is not None]):
        left = ", ".join(ignored)
        progress.print(f"it runs already, and stays as it was started: {left} changed nothing", soft_wrap=True)
    if as_json:
        made = {"repository": repository.name, "engine": place.engine, "address": place.address}
        made |= {"ray_started": started, "joined": not new}
        print_json({**made, "shards": len(stats.shards), "models": stats.models})
        return
    console().print(
        f"Repository {repository.name} is up on {place}: {words.count(len(stats.shards), 'shard')}, "
        f"{words.count(stats.models, 'model')}",
    )


@contextmanager
def _running(wanted: Place, port: int) -> Generator[Place]:
    """Give a cluster that runs: a Ray is started where none does, and ended again when no repository starts on it."""
    started: Head | None = None
    if wanted.address is None:
        with console(stderr=True).status("starting a Ray on this machine"):
            started = _start_ray(port)
    try:
        yield wanted if started is None else Place(wanted.engine, started.address)
    except BaseException as exc:
        if started is not None:
            _stop_ray(started.mark)
        plain = isinstance(exc, (ValueError, NotImplementedError)) and not isinstance(exc, TensorVineError)
        if plain or isinstance(exc, OptionError):
            raise typer.BadParameter(str(exc)) from exc
        raise


def _start_ray(port: int) -> Head:
    from ..head import start

    started = start(port)
    os.environ.pop("RAY_ADDRESS", None)  # "local" asks for one within this process
    return started


def _stop_ray(mark: str) -> bool:
    from ..head import stop

    return stop(mark)


def down(
    name: Name = None,
    address: Address = None,
    scheduler: Scheduler = None,
    force: Annotated[bool, typer.Option("--force", help="Also when not all of it can be written to its path.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a repository; what waits for its path is written first.

    The Ray beneath it is ended too if `tensorvine up` started it, on this machine, and no other repository is on it. A
    Dask goes on.
    """
    from ..nodes import machines, repositories

    with connected(name, address, scheduler) as repository:
        unwritten = _flush(repository, force) if repository.has_path else None
        try:
            repository.stop(0.0 if unwritten is not None else None)
        except (StorageError, OperationTimeoutError):
            if unwritten is None:
                raise
        if not as_json:
            console().print(f"Repository {repository.name} is down")
        found, others = machines(repository.engine), repositories(repository.engine)
    ended, said = _end_ray(found, others)
    if as_json:
        told = {"repository": repository.name, "unwritten": unwritten, "ray_ended": ended, "other_repositories": others}
        print_json(told)
    if said is not None:
        console(stderr=as_json).print(said)


def _end_ray(found: list[Machine], others: list[str]) -> tuple[bool, str | None]:
    """End the Ray that `up` started here, if nobody else is on it; say whether, and what there is to say of it."""
    mine = next((machine for machine in found if STARTED_BY_UP in machine.labels), None)
    if mine is None:
        return False, None
    if others:
        return False, f"Ray goes on: it has {words.count(len(others), 'other')}: {', '.join(others)}"
    if _stop_ray(mine.labels[STARTED_BY_UP]):
        return True, "Ray is down"
    return False, f"Ray goes on: its head is on {mine.address}; end it there"


def _flush(repository: Repository, force: bool) -> str | None:
    """Write what waits for the path; with `force`, give what went wrong."""
    try:
        with console(stderr=True).status("writing what is not on disk yet"):
            repository.flush(FLUSH_S)
    except TensorVineError as exc:
        if not force:
            raise
        console(stderr=True).print(f"not all of it is on disk: {exc}", soft_wrap=True)
        return str(exc)
    return None
