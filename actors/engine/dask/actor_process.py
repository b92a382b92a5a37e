"""The process of an actor. It is forked from its host's template, and tells the directory when it is ready.

Rules
- An error of the constructor is reported to the callers of the actor, and ends the process.
- It asks the directory through its host.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import traceback
from concurrent.futures import Future
from typing import Any, NoReturn, cast

import cloudpickle

from ....store.errors import ShardUnavailableError
from ....store.logs import to_stderr
from .. import process
from ..sockets.framing import SocketAddress
from ..sockets.hosting import Host
from ..sockets.lines import Lines, LostError
from ..sockets.packing import pack
from .engine import DaskEngine
from .records import Boot, Reach, Seat

HOST_S = 120.0
"""How long a host may take to answer; its own limits are shorter."""


class HostLink:
    """Calls the host of this actor."""

    def __init__(self, host: SocketAddress) -> None:
        self._lines = Lines(lambda: [host])

    def ask(self, question: bytes) -> bytes:
        """Ask the directory; see `engine.Ask`."""
        return self._call("ask", question)

    def tell(self, *news: object) -> None:
        """Tell the directory; the host does it in the order of its own news."""
        self._call("tell", *news)

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return cast("Future[Any]", self._lines.send("watch", pack((method, arguments)))).result(HOST_S)
        except (LostError, TimeoutError) as exc:
            raise ShardUnavailableError(
                f"expected an answer from this machine's host; {str(exc) or 'the call timed out'}"
            ) from exc


def run(boot: Boot) -> NoReturn:
    """Be an actor, until this process ends."""
    life, plan, link = boot.life, boot.life.plan, HostLink(boot.host)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(life.gpus)
    engine = DaskEngine(Seat(boot.cluster, life.owner, boot.address, node=boot.node, life=life.number), link.ask)
    process.belongs_to(engine)
    to_stderr(plan.name)
    try:
        path, made_of = pickle.loads(plan.start)  # noqa: S301  of who started it
        sys.path += [entry for entry in path if entry not in sys.path]
        cls, arguments = pickle.loads(made_of)  # noqa: S301
        actor = cls(**arguments)
    except Exception as exc:
        logging.getLogger(__name__).exception("%s: its constructor failed", plan.name)
        link.tell("failed", plan.key, life.number, _pickled(exc), f"its constructor failed: {exc!r}")
        os._exit(1)
    host = Host(actor, plan.name)
    link.tell("ready", plan.key, life.number, Reach(host.address, host.address_at(boot.address)))
    while True:
        signal.pause()


def _pickled(error: Exception) -> bytes:
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  of any class's own making
        return cloudpickle.dumps(RuntimeError(repr(error)))
