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
        typer.Option(
            help="Number of shards. Without it: one on each node, also on nodes that join later.",
            show_default=False,
            min=1,
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Resources (with amounts) and labels (with values) that a node must have to hold a shard, such as "
            "'tensorvine=1'. Without it: any node can hold a shard.",
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Directory or URI (s3://, gs://) for the history. Every node must be able to access it."),
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="Codec of the tensors on disk, such as 'shuffle|zstd(3)'. Needs --path.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Versions of a model that stay in memory after they are on disk: last(N), best(N), every(N) or "
            "bytes(SIZE), joined by '|', such as 'last(3)|best(1)'. Needs --path. Without it: all, until memory is "
            "needed."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Number of nodes that must hold each version.", min=1)] = 1,
    store_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each shard, such as 4GB or 512MiB. Without it: half of the unreserved memory of its node.",
        ),
    ] = None,
    preallocate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory that each shard allocates when it starts. Without it: 256MiB. 0 means none."
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="Policy that adds and removes shards automatically, such as 'least=1,most=8,full=0.75'. Other fields: "
            "requests_per_s, join_after_s, drain_after_s. Without it: the number of --shards."
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="TENSORVINE_REDIS",
            help="Redis server that notifies consumers outside the cluster of new versions. Put a URL with a password "
            "into TENSORVINE_REDIS, because other users of the machine can see the arguments.",
        ),
    ] = None,
    wait_nodes: Annotated[
        int, typer.Option(help="Wait until the cluster has this number of nodes, at most 5 minutes.", min=1)
    ] = 1,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="Engine of the repository. Without it: that of --address or --scheduler.", show_default=False
        ),
    ] = None,
    address: Address = None,
    scheduler: Scheduler = None,
    port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of a Ray that this command starts. 0 means any free port. Without it: {DEFAULT_PORT}."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a repository that runs until `tensorvine down`.

    The repository runs on the Dask cluster of --scheduler or DASK_SCHEDULER_ADDRESS, or on the Ray cluster of --address
    or RAY_ADDRESS. Without these, the repository runs on Ray on this machine, and this command starts Ray if necessary.
    The command never starts a Dask cluster. Versions that are stored at --path are restored.
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
        raise typer.BadParameter("expected it only with --path", param_hint=option)
    progress = console(stderr=True)
    wanted = place_of(address, scheduler, engine)
    if wanted.engine is EngineName.DASK and port is not None:
        raise typer.BadParameter("expected it only with Ray; this command does not start Dask", param_hint="--port")
    with _running(wanted, DEFAULT_PORT if port is None else port) as place:
        started = place is not wanted
        if started:
            (progress if as_json else console()).print(f"Ray is up at {place.address}")
        with joined(place) as cluster:
            with progress.status(f"waiting for {words.count(wait_nodes, 'node')}"):
                await_nodes(cluster, wait_nodes, NODES_S)
            options: Any = {"shards": shards, "path": path, "replicas": replicas, **policies}
            repository = Repository.start(name, engine=cluster, **options)
            stats = repository.stats()
            new = repository.started_here
            repository.leave()
    if not new and (ignored := [option for name, option in _OF_A_START.items() if policies[name] is not None]):
        left = ", ".join(ignored)
        progress.print(
            f"the repository was already running and keeps its options: {left} had no effect", soft_wrap=True
        )
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
    force: Annotated[
        bool, typer.Option("--force", help="Stop even if some versions cannot be written to the path.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the pending versions of a repository to its path, then stop the repository.

    If `tensorvine up` started Ray on this machine, and no other repository runs on this Ray cluster, the command also
    stops Ray. The command never stops a Dask cluster.
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
        return False, f"Ray keeps running, because other repositories run on it: {', '.join(others)}"
    if _stop_ray(mine.labels[STARTED_BY_UP]):
        return True, "Ray is down"
    return False, f"Ray keeps running: its head is on {mine.address}; stop it there"


def _flush(repository: Repository, force: bool) -> str | None:
    """Write what waits for the path; with `force`, give what went wrong."""
    try:
        repository.flush(FLUSH_S)
    except TensorVineError as exc:
        if not force:
            raise
        console(stderr=True).print(f"not all versions are on disk: {exc}", soft_wrap=True)
        return str(exc)
    return None
