"""The process that a host's actors are forked from: what they need is imported there already.

Rules
- A Python that imports what a shard needs takes 0.3 s of a core before it is one. `distributed.process.AsyncProcess`
  starts one that imports Dask and the main module of the program, too. A fork takes 0.02 s.
- It imports TensorVine's modules alone, those of actors that were ordered. Nothing happens when they are imported: no
  thread of Python starts, and nothing is drawn at random, which all children would have alike. What else an actor needs
  it imports itself.
- It waits for orders and for the end of its children, and does nothing else. A child is a process group of its own.
- An order is a module and one end of a socket. Through the other end the host gets the child's process id and its exit
  status, and the child gets what it is to be. The socket ends with both: so the child has ended when it ends.
- The kernel ends children with the template, which ends when the host ends. The next order starts another one. So
  nothing that an order needs or lacks may end it: all actors of the host would go with it.
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
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .records import Boot

log = logging.getLogger(__name__)

TEMPLATE = f"{__package__}.template"
FORK_S = 60.0
"""How long an actor's process may take to be there; the first of a kind waits for its imports."""
END_S = 10.0
"""How long the kernel may take to end the process."""
_OURS = str(__package__).partition(".")[0]
_ORDER, _ORDER_BYTES = b"+", 1 << 12
"""What an order begins with, before the module's name, and its most bytes."""
_NUMBER = struct.Struct("<i")
"""A process, or its exit status: negative for a signal."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, slots=True)
class Forked:
    """A process of an actor."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ended(self) -> int:
        """Wait for its end; gives its exit status, negative for a signal."""
        try:
            return _NUMBER.unpack(await self.reader.readexactly(_NUMBER.size))[0]
        except (asyncio.IncompleteReadError, OSError):  # the kernel has ended it with its template
            return -signal.SIGKILL
        finally:
            self.writer.close()


class Template:
    """The host's end.

    Args:
        environment: of actors.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    async def fork(self, module: str, boot: bytes) -> Forked:
        """Start an actor's process.

        Args:
            module: the module of its class.
            boot: a pickled `Boot`.

        Raises:
            OSError: it could not be started.
        """
        ours, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(self._started(), [_ORDER + module.encode()], [its.fileno()])
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(FORK_S):
                writer.write(boot)
                (pid,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
        except BaseException as exc:
            writer.close()
            if isinstance(exc, (asyncio.IncompleteReadError, ConnectionError)):
                raise ConnectionResetError("the process that actors are forked from could not fork, or ended") from exc
            raise
        return Forked(pid, reader, writer)

    def close(self) -> None:
        """End the process; its children are to have ended."""
        if self._process is not None and self._orders is not None:
            self._orders.close()
            self._process.kill()
            self._process.wait(END_S)

    def _started(self) -> socket.socket:
        """Start the process, unless it runs; gives the way to it."""
        if self._orders is None or self._process is None or self._process.poll() is not None:
            if self._orders is not None:
                self._orders.close()
            self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._orders.setblocking(False)
            with its:
                command = [sys.executable, "-m", TEMPLATE, str(its.fileno())]
                self._process = subprocess.Popen(  # noqa: S603  this Python
                    command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], env=self._environment, process_group=0
                )
        return self._orders


def end_group(pid: int) -> None:
    """Kill a process with what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# ---- the process ------------------------------------------------------------------------------------------


def main(orders: str) -> None:
    """Fork processes for a host, until it ends; each returns from `_serve` and is an actor.

    Args:
        orders: the file descriptor of the way from the host.
    """
    from .actor_process import run

    with socket.socket(fileno=int(orders)) as way:
        boot = _serve(way)
    if boot is not None:
        run(boot)


def _serve(orders: socket.socket) -> Boot | None:
    """Carry out orders; gives what a child is to be, and to the template nothing, when the host has gone."""
    me = os.getpid()
    children: dict[int, tuple[int, socket.socket]] = {}
    """File descriptor of a child -> the child, and the way to the host."""
    ways: dict[int, int] = {}
    """File descriptor of a way -> the child; while the host waits for it."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in ways:
                poll.unregister(ready)
                end_group(ways.pop(ready))
            elif ready in children:
                poll.unregister(ready)
                os.close(ready)
                pid, way = children.pop(ready)
                if ways.pop(way.fileno(), None) is not None:
                    poll.unregister(way)
                _say(way, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                way.close()
            else:
                name, received, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if not name:
                    return None
                if not received:  # there are no more file descriptors
                    continue
                way = socket.socket(fileno=received[0])
                _import(name.removeprefix(_ORDER).decode())
                try:
                    pid, handle = _forked()
                except OSError as exc:
                    log.warning("an actor's process cannot be started: %s", exc)
                    way.close()
                    continue
                if pid == 0:
                    for opened, (_, other) in children.items():
                        os.close(opened)
                        other.close()
                    return _become(way, me)
                _say(way, pid)
                children[handle], ways[way.fileno()] = (pid, way), pid
                poll.register(handle, select.POLLIN)
                poll.register(way, 0)  # tells when the host waits no more


def _say(way: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the host waits no more
        way.sendall(_NUMBER.pack(number))


def _import(module: str) -> None:
    """Import what an order needs, for its child and for later ones."""
    if module.partition(".")[0] == _OURS and module not in sys.modules:
        try:
            importlib.import_module(module)
        except Exception as exc:  # noqa: BLE001  the actor raises it where it can be told
            log.warning("%s cannot be imported before a fork: %r", module, exc)
        gc.collect()
        gc.freeze()  # children share what they do not change


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


def _become(way: socket.socket, template: int) -> Boot | None:
    """Be a process of its own after a fork; None: there is nobody to be it for."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != template:  # it has ended already
        return None
    os.register_at_fork(after_in_child=way.close)  # which keeps it open here
    if "numpy.random" in sys.modules:  # Python's own generator sees to itself
        np.random.seed()
    with way.makefile("rb") as file:
        try:
            boot: Boot = pickle.load(file)  # noqa: S301  of the host
        except EOFError:
            return None
    ctypes.CDLL(None).prctl(_PR_SET_NAME, boot.life.plan.name.encode()[-15:], 0, 0, 0)
    return boot


if __name__ == "__main__":
    main(*sys.argv[1:])
