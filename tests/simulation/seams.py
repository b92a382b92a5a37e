"""Puts the simulated threads, clock, kernel, disk, wire and engine in the place of the real ones, and takes them out.

Rules
- Nothing in TensorVine knows of it: names in the namespaces of its loaded modules are exchanged, by identity.
- What is random is drawn from the world's generator; short lives and small limits keep worlds small.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import importlib
import mmap
import os
import queue
import secrets
import select
import sys
import threading
import time
import uuid
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
from tensorvine.actors.catalog import care, journal, placement
from tensorvine.actors.client import deployment, launch, session
from tensorvine.actors.engine.sockets import lines
from tensorvine.actors.memory import copying, memory, page_care
from tensorvine.actors.rpc import lease
from tensorvine.actors.shard import sweep
from tensorvine.actors.shard.parts import copies
from tensorvine.actors.transport import tcp, tcp_server
from tensorvine.store.archive import opening
from tensorvine.store.segments import page_plan

from . import cluster, disk, kernel, threads
from .threads import world

INLINE_BYTES = 64
SEGMENT_BYTES = 4096


class _Uuid:
    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=world().random.getrandbits(128), version=4)


class _Secrets:
    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)

    @staticmethod
    def randbelow(bound: int) -> int:
        return world().random.randrange(bound)

    @staticmethod
    def randbits(count: int) -> int:
        return world().random.getrandbits(count)

    @staticmethod
    def token_bytes(count: int = 32) -> bytes:
        return world().random.randbytes(count)

    @staticmethod
    def token_hex(count: int = 8) -> str:
        return f"{world().random.getrandbits(8 * count):0{2 * count}x}"


class _Numpy:
    """`numpy`, where arrays are copied: others may run before a piece is, if two threads copy here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def copyto(target: np.ndarray, source: np.ndarray) -> None:
        if _piece_bytes is not None:
            world().copying()
        np.copyto(target, source)


_piece_bytes: int | None = None


@contextlib.contextmanager
def copies_in_pieces(nbytes: int | None) -> Generator[None]:
    """Have two threads copy what is longer than `nbytes`; None: than the product's own number."""
    global _piece_bytes
    own, _piece_bytes = copying.PIECE_BYTES, nbytes
    copying.PIECE_BYTES = own if nbytes is None else nbytes
    try:
        yield
    finally:
        copying.PIECE_BYTES, _piece_bytes = own, None


class _EndlessLease(lease.Lease):
    """Processes end whole here, and no network is cut: a lease never runs out (see tests/hosts)."""

    def _keep(self) -> None:
        if not self._over:
            self._ends = 1e9
            self._show(self._ends)


def _exchanged() -> list[tuple[Any, Any]]:
    return [
        (threading, threads.Threading()),
        (time, threads.Clock()),
        (queue, SimpleNamespace(SimpleQueue=threads.SimpleQueue, Empty=queue.Empty)),
        (concurrent.futures.ThreadPoolExecutor, threads.Executor),
        (concurrent.futures.Future, threads.Future),
        (concurrent.futures.wait, threads.wait),
        (uuid, _Uuid()),
        (secrets, _Secrets()),
        (fcntl, kernel.Fcntl()),
        (mmap, kernel.Mmap()),
        (select, kernel.Select()),
        (ctypes, kernel.Ctypes()),
        (os, kernel.Os()),
        (opening.open_directory, disk.open_directory),
        (tcp_server.TcpServer, cluster.SimulatedTcpServer),
        (tcp.TcpClient, cluster.SimulatedTcpClient),
        (lines.Lines, cluster.SimulatedLines),
        (lines.result_of, cluster.result_of),
        (lease.Lease, _EndlessLease),
        (deployment.engine_for, lambda *_: cluster.SimulatedEngine()),
        (launch.start_engine, lambda *_: (cluster.SimulatedEngine(), False)),
    ]


REAL = {("tensorvine.store.archive.local", "os"), ("tensorvine.actors.memory.buffers", "mmap")}
"""Modules that keep the real one: files are simulated above it, and a process's own memory needs no simulation."""


@contextlib.contextmanager
def installed() -> Generator[None]:
    """Have TensorVine run on the simulated world for as long as this lasts."""
    by_id = {id(real): simulated for real, simulated in _exchanged()}
    undo: list[tuple[Any, str, Any]] = []
    pool = concurrent.futures.ThreadPoolExecutor

    def put(module: Any, name: str, value: Any) -> None:
        undo.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for name, module in list(sys.modules.items()):
        if not name.startswith(("tensorvine.actors.", "tensorvine.store.", "tensorvine.planner.")) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in by_id and (name, attribute) not in REAL:
                put(module, attribute, by_id[id(value)])
            elif isinstance(value, type) and value.__module__ == name and pool in value.__bases__:
                put(value, "__bases__", tuple(threads.Executor if base is pool else base for base in value.__bases__))
        if "INLINE_BYTES" in vars(module):
            put(module, "INLINE_BYTES", INLINE_BYTES)
        if "CHUNK_BYTES" in vars(module):
            put(module, "CHUNK_BYTES", kernel.CHUNK_BYTES)
    segment = importlib.import_module("tensorvine.store.segments.segment")
    limits, segment.split.__defaults__ = segment.split.__defaults__, (SEGMENT_BYTES,)
    for module, name, value in _constants():
        put(module, name, value)
    for cls, name in _points():
        put(cls, name, _with_points(getattr(cls, name)))
    try:
        yield
    finally:
        segment.split.__defaults__ = limits
        for module, name, value in reversed(undo):
            setattr(module, name, value)


def _constants() -> list[tuple[Any, str, Any]]:
    return [
        (care, "ORPHANS_S", 4.0),
        (placement, "GRACE_S", 20.0),
        (journal, "GROWN_BYTES", 4096),
        (copying, "np", _Numpy()),
        (copies, "ASK_S", 4.0),
        (launch, "SESSION_S", 6.0),
        (session, "RENEW_S", 1.5),
        (sweep, "SWEEP_S", 1.0),
        (page_plan, "IDLE_S", 1.5),
        (page_plan, "RECENT_S", 6.0),
        (page_plan, "IDLE_BYTES", 1024),
        (page_care, "STEP_BYTES", 4 * kernel.CHUNK_BYTES),
        (memory, "STEP_BYTES", 4 * kernel.CHUNK_BYTES),
    ]


def _points() -> list[tuple[Any, str]]:
    names = ("part", "read", "publish", "counters", "is_read")
    return [
        (cls, name)
        for cls in (memory.SharedMemory, memory.MemoryView)
        for name in names
        if callable(getattr(cls, name, None))
    ]


def _with_points(method: Any) -> Any:
    """Have a method of the memory begin and end with a scheduling point."""

    copied = method.__name__ == "part"

    def pointed(*arguments: Any, **named: Any) -> Any:
        w = world()
        w.point()
        found = method(*arguments, **named)
        if copied:
            part = arguments[1]
            kernel.check_made(arguments[0]._pages._fd, part.offset, part.offset + part.length)
            w.copying()
        else:
            w.point()
        return found

    return pointed
