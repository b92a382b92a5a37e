"""The process that an agent's actors are forked from: what they need is imported there already.

Rules
- A Python that imports what a shard needs takes 0.3 s of a core before it is one, a fork of it 0.02 s. So the agent has
  one such process (`main`), and orders actors of it (`Template`).
- It imports TensorVine's modules alone, those of actors that were ordered. Nothing happens when they are imported: no
  thread of Python starts, and nothing is drawn at random, which all children would have alike. What else an actor needs
  it imports itself.
- It waits for orders and for the end of its children, and does nothing else. A child is a process group of its own.
- The kernel ends it when the agent ends, and its children when it ends. The next order starts another one. So nothing
  that an order needs or lacks may end it: all actors of the machine would go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ....store.waiting import Backoff, Deadline
from .records import Boot

log = logging.getLogger(__name__)

TEMPLATE = f"{__package__}.template"
FORK_S = 60.0
"""How long an actor's process may take to be there; the first of a kind waits for its imports."""
GONE_S = 5.0
"""How long the kernel may take to end the children of a template."""
_OURS = str(__package__).partition(".")[0]
_SIZE = struct.Struct("<Q")
"""Bytes of the order that follows."""
_NEWS = struct.Struct("<Bii")
"""What happened; the process, or 0; its exit status, negative for a signal, or the error's number."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class _What(IntEnum):
    FORKED = 0
    NOT_FORKED = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Forked:
    """A process of an actor."""

    pid: int
    ended: asyncio.Future[int]
    """Its exit status when it has ended, negative for a signal."""


class Template:
    """The agent's end; to be made in its event loop."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ordered: deque[asyncio.Future[Forked]] = deque()
        """In the order of their orders."""
        self._living: dict[int, tuple[Forked, int | None]] = {}
        """Process -> with a file descriptor of it; None: it has ended already, or there are no more descriptors."""

    async def fork(self, boot: Boot) -> Forked:
        """Start an actor's process.

        Raises:
            OSError: it could not be started.
        """
        async with self._starting:
            writer = self._writer or await self._start()
        forked: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._ordered.append(forked)
        order = pickle.dumps(boot, 5)
        writer.write(_SIZE.pack(len(order)) + order)
        async with asyncio.timeout(FORK_S):
            return await forked

    async def close(self) -> None:
        """End the process; its children are to have ended."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading

    async def _start(self) -> asyncio.StreamWriter:
        if self._reading is not None:  # of the one before, whose children end first
            await self._reading
        ours, its = socket.socketpair()
        with its:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", TEMPLATE, str(its.fileno()), str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=(its.fileno(),), process_group=0,
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, self._writer, process))
        return self._writer

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: asyncio.subprocess.Process
    ) -> None:
        """Take in what a process tells, until it ends, or `close` has closed the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._hear(*_NEWS.unpack(await reader.readexactly(_NEWS.size)))
        self._writer = None
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for forked in self._ordered:
            if not forked.done():
                forked.set_exception(ConnectionResetError("the process that actors are forked from has ended"))
        self._ordered.clear()
        await self._lose()

    def _hear(self, what: int, pid: int, number: int) -> None:
        loop = asyncio.get_running_loop()
        match _What(what):
            case _What.FORKED:
                forked = Forked(pid, loop.create_future())
                self._living[pid] = forked, _handle(pid)
                waiting = self._ordered.popleft()
                if waiting.done():  # nobody waits any more
                    end_group(pid)
                else:
                    waiting.set_result(forked)
            case _What.NOT_FORKED:
                waiting = self._ordered.popleft()
                if not waiting.done():
                    waiting.set_exception(OSError(number, os.strerror(number)))
            case _What.ENDED:
                self._end(pid, number)

    async def _lose(self) -> None:
        """Wait until the children of a process that has ended have ended, too, for which the kernel cares."""
        pauses, deadline, poll = Backoff(0.002, 0.1), Deadline.after(GONE_S), select.poll()
        handles = [handle for _, handle in self._living.values() if handle is not None]
        for handle in handles:
            poll.register(handle, select.POLLIN)
        while len(poll.poll(0)) < len(handles):
            if not await pauses.wait_async(deadline):
                log.warning("processes of actors have not ended within %.0f s after their template", GONE_S)
                break
        for pid in list(self._living):
            self._end(pid, -signal.SIGKILL)

    def _end(self, pid: int, status: int) -> None:
        forked, handle = self._living.pop(pid)
        if handle is not None:
            os.close(handle)
        forked.ended.set_result(status)


def _handle(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


def end_group(pid: int) -> None:
    """Kill a process with what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# ---- the process ------------------------------------------------------------------------------------------


def main(connection: str, agent: str) -> None:
    """Fork processes for an agent, until it ends; each returns from `_serve` and is an actor.

    Args:
        connection: the file descriptor of the way to the agent.
        agent: its process.
    """
    from .actor_process import run

    if _ends_with(int(agent)):
        with socket.socket(fileno=int(connection)) as way:
            boot = _serve(way)
        if boot is not None:
            run(boot)


def _serve(way: socket.socket) -> Boot | None:
    """Carry out orders; gives what a child is to be, and to the template nothing, when the agent has gone."""
    me = os.getpid()
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(way, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                os.close(ready)
                pid, status = os.waitpid(children.pop(ready), 0)
                way.sendall(_NEWS.pack(_What.ENDED, pid, os.waitstatus_to_exitcode(status)))
                continue
            boot = _ordered(way)
            if boot is None:
                return None
            try:
                pid, handle = _forked()
            except OSError as exc:
                way.sendall(_NEWS.pack(_What.NOT_FORKED, 0, exc.errno or 0))
                continue
            if pid == 0:
                for opened in children:
                    os.close(opened)
                return boot if _become(boot, me) else None
            children[handle] = pid
            poll.register(handle, select.POLLIN)
            way.sendall(_NEWS.pack(_What.FORKED, pid, 0))


def _forked() -> tuple[int, int]:
    """Fork: gives the child and a file descriptor of it, and zeros to the child.

    Raises:
        OSError: there is no room for it; then there is no child.
    """
    pid = os.fork()
    if pid == 0:
        return 0, 0
    with contextlib.suppress(OSError):  # it has done so itself
        os.setpgid(pid, pid)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _ordered(way: socket.socket) -> Boot | None:
    """Read an order, and import what it needs; None: the agent has gone."""
    head = way.recv(_SIZE.size, socket.MSG_WAITALL)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    body = way.recv(size, socket.MSG_WAITALL)
    if len(body) < size:
        return None
    boot: Boot = pickle.loads(body)  # noqa: S301  of the agent
    module = boot.report.plan.module
    if module.partition(".")[0] == _OURS and module not in sys.modules:
        try:
            importlib.import_module(module)
        except Exception as exc:  # noqa: BLE001  the actor raises it where it can be told
            log.warning("%s cannot be imported before a fork: %r", module, exc)
        gc.collect()
        gc.freeze()  # children share what they do not change
    return boot


def _become(boot: Boot, template: int) -> bool:
    """Be a process of its own after a fork; False: there is nobody to be it for."""
    os.setpgid(0, 0)
    name = boot.report.plan.name.encode()[-15:]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    if "numpy.random" in sys.modules:  # Python's own generator sees to itself
        np.random.seed()
    return _ends_with(template)


def _ends_with(parent: int) -> bool:
    """Have the kernel end this process with its parent; False: that has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


if __name__ == "__main__":
    main(*sys.argv[1:])
