"""`tensorvine up` and `tensorvine down`: a repository that outlives the command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ...store.errors import OptionError, TensorVineError
from .. import words
from ..client import Address, Name, attach, connected, console

if TYPE_CHECKING:
    from ...actors.client.repository import Repository

DEFAULT_PORT = 6379
FLUSH_S = 600.0
NODES_S = 300.0
"""How long `up` waits for nodes."""


def up(
    name: Name = None,
    shards: Annotated[
        int | None, typer.Option(help="How many shards. Without it: one per node.", show_default=False)
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Directory or URI (s3://, gs://) that keeps the history; every node must reach it."),
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="How tensors are stored there, such as 'shuffle|zstd(3)'; needs --path.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Nodes that must hold a version.")] = 1,
    nodes: Annotated[int, typer.Option(help="Wait until Ray has so many nodes, for 5 minutes at most.", min=1)] = 1,
    address: Address = None,
    port: Annotated[int, typer.Option(help="Port of a Ray that is started here; 0: any free one.")] = DEFAULT_PORT,
) -> None:
    """Start a repository that stays until `tensorvine down`.

    It runs on the Ray of --address or RAY_ADDRESS, or on the one that was started on this machine; where there is
    none, a Ray is started here first. What is on --path is brought back.
    """
    from ...actors.client.repository import Repository
    from ...actors.engine import embedded
    from ...store.codecs.codec import from_spec
    from .. import head
    from ..nodes import await_nodes

    chosen = from_spec(codec) if codec is not None else None
    out = console()
    running = address or embedded.running()
    started: head.Head | None = None
    if running is None:
        with out.status("starting a Ray on this machine"):
            started = head.start(port)
        running = started.address
        os.environ.pop("RAY_ADDRESS", None)  # "local" asks for one within this process
        out.print(f"Ray is up at {running}")
    try:
        attach(started.address if started is not None else address)
        with out.status(f"waiting for {words.count(nodes, 'node')}"):
            await_nodes(nodes, NODES_S)
        with out.status("starting the repository"):
            repository = Repository.start(name, shards=shards, path=path, codec=chosen, replicas=replicas)
    except BaseException as exc:
        if started is not None:
            head.stop(started.mark)
        plain = isinstance(exc, (ValueError, NotImplementedError)) and not isinstance(exc, TensorVineError)
        if plain or isinstance(exc, OptionError):
            raise typer.BadParameter(str(exc)) from exc
        raise
    stats = repository.stats()
    repository.leave()
    embedded.stop()
    out.print(
        f"Repository {repository.name} is up on Ray at {running}: {words.count(len(stats.shards), 'shard')}, "
        f"{words.count(stats.models, 'model')}",
    )


def down(
    name: Name = None,
    address: Address = None,
    force: Annotated[bool, typer.Option("--force", help="Also when not all of it can be written to its path.")] = False,
) -> None:
    """Stop a repository; what waits for its path is written first.

    The Ray beneath it is ended too if `tensorvine up` started it, on this machine, and no other repository is on it.
    """
    from .. import head
    from ..nodes import machines, repositories

    out = console()
    with connected(name, address) as repository:
        if repository.has_path:
            _flush(repository, force)
        repository.stop()
        out.print(f"Repository {repository.name} is down")
        found, others = machines(), repositories()
    mine = next((machine for machine in found if head.LABEL in machine.labels), None)
    if mine is None:
        return
    if others:
        out.print(f"Ray goes on: it has {words.count(len(others), 'other')}: {', '.join(others)}")
    elif head.stop(mine.labels[head.LABEL]):
        out.print("Ray is down")
    else:
        out.print(f"Ray goes on: its head is on {mine.address}; end it there")


def _flush(repository: Repository, force: bool) -> None:
    try:
        with console().status("writing what is not on disk yet"):
            repository.flush(FLUSH_S)
    except TensorVineError as exc:
        if not force:
            raise
        console(stderr=True).print(f"not all of it is on disk: {exc}", soft_wrap=True)
