"""A fork server: each connection asks for one child, which runs a worker of Ray. See `tests.support.warm`."""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from unittest import mock

import ray
from ray._raylet import ActorClassID, NodeID

PRELOADED = (
    "pyarrow.json",
    "pydantic.v1",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
    "ray._private.workers.default_worker",
    "scipy.optimize",
    "starlette.datastructures",
    "tensorvine.actors.client.repository",
    "tensorvine.actors.engine.ray.engine",
    "tensorvine.actors.planner.planner",
    "tensorvine.actors.shard.shard",
    "tensorvine.actors.updates.consumer",
    "tensorvine.actors.updates.producer",
)
"""What every worker of Ray, a shard and a planner import when they start, or soon after."""
ASKED = "modules"
"""A file beside the sockets: what is to be imported besides, a module a line. It may grow."""
HEAD_BYTES = 8
"""Of an order: how long it is."""
TIMEOUT_S = 30.0
"""For an order that has begun."""


def main(path: str) -> None:
    """Serve at a socket of this path until the raylet ends."""
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    folder = os.path.dirname(path)
    plain = path.endswith("-plain") or "RAY_JOB_ID" not in os.environ  # without a job, its worker spills
    names: Callable[[], set[str]] = set if plain else partial(asked, folder)
    imported: set[str] = set()
    have_imported({*PRELOADED, *names()}, imported)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.{os.getpid()}")
        listener.listen(64)
        os.rename(f"{path}.{os.getpid()}", path)  # whoever finds it is answered
        with suppress(BrokenPipeError):  # who started this one may have been killed, and ends with its worker
            os.write(1, b"ready\n")
        os.dup2(0, 1)
        while True:
            ready, _, _ = select.select([raylet, listener], [], [])
            if raylet in ready:
                return
            connection, _ = listener.accept()
            with connection:
                order, streams = ordered(connection)
                have_imported(names(), imported)
                if order and os.fork() == 0:
                    listener.close()
                    os.close(raylet)
                    work(order, streams)
                    return
            for stream in streams:
                os.close(stream)


def asked(folder: str) -> set[str]:
    """Return which modules are asked for by now."""
    with open(os.path.join(folder, ASKED)) as names:
        return set(names.read().split())


def have_imported(names: set[str], imported: set[str]) -> None:
    """Import what is not imported, and keep it from the collector; what has an `install` is installed."""
    if names <= imported:
        return
    with mock.patch("ray.actor.ActorClassID", IdOfClass):
        for name in sorted(names - imported):
            module = importlib.import_module(name)
            if hasattr(module, "install"):
                module.install()
    imported |= names
    check_children_differ(names)
    gc.collect()
    gc.freeze()


class IdOfClass(ActorClassID):
    """Names an actor's class as Ray does, and leaves Ray's generator of random numbers alone."""

    @classmethod
    def from_random(cls) -> ActorClassID:
        return ActorClassID(os.urandom(len(ActorClassID.nil().binary())))


def check_children_differ(names: set[str]) -> None:
    """Refuse what draws from Ray's generator of random numbers, which is seeded by the first draw.

    Workers that are forked from there on would draw the same ids. So would their calls: an actor that is called by two
    at once ends with `core_worker.cc: Check failed: erased == 1`.
    """
    if drawn_by_a_child() == drawn_by_a_child():
        raise SystemExit(f"one of {sorted(names)} draws an id of Ray's as it is imported; expected none to")


def drawn_by_a_child() -> bytes:
    """Return an id that a forked process draws."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, NodeID.from_random().binary())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        drawn = pipe.read()
    with suppress(ChildProcessError):  # the system waits for it
        os.waitpid(child, 0)
    return drawn


def ordered(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive what a worker is to be, and its standard streams; no bytes where the other end is gone."""
    connection.settimeout(TIMEOUT_S)
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(connection, HEAD_BYTES, 3)
        expected, order = int.from_bytes(head, "big"), b""
        while len(order) < expected and (part := connection.recv(expected - len(order))):
            order += part
    except OSError:
        return b"", streams
    return order if len(order) == expected else b"", streams


def work(order: bytes, streams: list[int]) -> None:
    """Be a worker. The connection stays open until this process ends, however it does: its other end waits for that."""
    arguments, environment, folder = marshal.loads(order)  # noqa: S302  of a worker of this machine, by this Python
    program = os.path.join(os.path.dirname(ray.__file__), "_private", "workers", "default_worker.py")
    os.setpgid(0, 0)  # a raylet kills what is left of a worker's group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
