"""A Ray on several hosts, and clients on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeAlias

from tests.hosts import gates, runs
from tests.hosts.network import Link, Network, address
from tests.hosts.node import PATIENCE, QUIET, STORE_BYTES, ray_at
from tests.support.warm import server, worker

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
"""For what should not take long, on the busiest machine."""
Own: TypeAlias = Callable[[Path], Mapping[int, Mapping[str, str]]]


class FailedError(Exception):
    """An operation failed.

    Args:
        kind: the error's type; "ended" where the client's process ended meanwhile.
        text: the error's message.
        ours: it is of the tree of TensorVine's errors.
    """

    def __init__(self, kind: str, text: str, ours: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.ours = kind, ours


class Client:
    """A client's process on one host.

    Args:
        process: it.
        host: where it is.
    """

    def __init__(self, process: subprocess.Popen[str], host: int) -> None:
        self.host = host
        self._process = process
        self._numbers = count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        ready = self._waiting[0]
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        ready.result(WAIT_S)

    def begin(self, what: str, **arguments: Any) -> Future[Any]:
        """Begin an operation (`client.Operations`); its future fails with `FailedError`."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            self._waiting[number] = future
        assert self._process.stdin is not None
        try:
            print(json.dumps({"number": number, "what": what, "arguments": arguments}), file=self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail_all()
        return future

    def do(self, what: str, **arguments: Any) -> Any:
        """Carry an operation out."""
        return self.begin(what, **arguments).result(WAIT_S)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._hearing.join(WAIT_S)
        self._process.communicate(timeout=WAIT_S)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                future = self._waiting.pop(answer["number"])
            if "error" in answer:
                future.set_exception(FailedError(answer["error"], answer["text"], answer["ours"]))
            else:
                future.set_result(answer["value"])
        self._fail_all()

    def _fail_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(FailedError("ended", f"the client on host {self.host} has ended", False))


class Hosts:
    """Hosts with a Ray node each. Made by `hosts`.

    Args:
        network: joins them.
        folder: for all that is written, which all hosts share.
        joined: how many have a node from the start.
        store_bytes: capacity of each node's object store.
        gated: calls of actors can be stopped at steps; a `Client` cannot start a repository where they cannot.
        options: more of the environment of the nodes.
        own: folder -> more of the environment of all processes on a host, for some hosts.
        head: host of the head; the others with a node follow it.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        joined: int,
        store_bytes: int = STORE_BYTES,
        gated: bool = True,
        options: Mapping[str, str] | None = None,
        own: Own = lambda folder: {},
        head: int = 1,
    ) -> None:
        self.network = network
        self.head_host = head
        self.folder = folder
        self.gates = folder / "gates"
        self._store_bytes = store_bytes
        self._options = PATIENCE | QUIET | dict(options or {})
        self._own = own(folder)
        self._servers = folder / "servers"
        for made in (self.gates, self._servers):
            made.mkdir()
        (self._servers / server.ASKED).write_text(f"{gates.__name__}\n{runs.__name__}\n" if gated else "")
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        self._clients: dict[int, Client] = {}
        try:
            for host in range(head, head + joined):
                self.join(host)
        except BaseException:
            self.close()
            raise

    def client(self, host: int) -> Client:
        """Return the client on a host: a new one after `forget`."""
        if host not in self._clients:
            process = self.run(
                host, "tests.hosts.client", {"RAY_ADDRESS": ray_at(self.head_host)}, f"client-{host}", str(host)
            )
            self._clients[host] = Client(process, host)
        return self._clients[host]

    def forget(self, host: int) -> None:
        """End the client on a host."""
        if host in self._clients:
            self._clients.pop(host).close()

    def join(self, host: int) -> None:
        """Start a node on a host; one that is there ends first."""
        self.end(host)
        arguments = (str(host), str(self.head_host), str(self.folder / "ray"), str(self._store_bytes))
        node = self.run(host, "tests.hosts.node", self._options, f"node-{host}", *arguments)
        self._nodes[host] = node
        assert node.stdout is not None
        if node.stdout.readline() != "ready\n":
            said = (self.folder / f"node-{host}.log").read_text()
            raise OSError(f"host {host}: expected a Ray node; found {said[-2000:]}")

    def head(self, order: str) -> None:
        """Have the head's process, and nothing else of its host, be killed or started again: "kill" or "start"."""
        node = self._nodes[self.head_host]
        assert node.stdin is not None
        assert node.stdout is not None
        print(order, file=node.stdin, flush=True)
        if (said := node.stdout.readline()) != f"{order}\n":
            raise OSError(f"host {self.head_host}: expected its head to obey {order!r}; found {said!r}")

    def end(self, host: int) -> None:
        """End a host's node, with all that runs on it."""
        node = self._nodes.pop(host, None)
        if node is not None:
            node.communicate(timeout=WAIT_S)  # its standard input ends

    @contextmanager
    def cut(self, *links: Link) -> Iterator[None]:
        """Cut links meanwhile."""
        self.network.cut(links)
        try:
            yield
        finally:
            self.network.heal(links)

    def gate(self, whose: str, step: str) -> gates.Gate:
        """Have the next call that comes to a step stop there."""
        return gates.Gate(self.gates, whose, step)

    def id_of(self, host: int) -> str:
        """Return the id of a host's node, as Ray's head knows it now."""
        return self.client(self.head_host).do("nodes")[address(host)]

    def is_alive(self, host: int) -> bool:
        """Tell whether Ray's head takes a host's node to be alive."""
        return address(host) in self.client(self.head_host).do("nodes")

    def await_placed(self, repository: str, *hosts: int) -> None:
        """Wait until a repository has one shard on each of these hosts, of which one may stand there twice."""
        deadline = time.monotonic() + WAIT_S
        wanted = sorted(self.id_of(host) for host in hosts)
        while True:
            found: Any
            try:
                found = sorted(self.client(self.head_host).do("placed", repository=repository))
            except FailedError as exc:  # one is being restarted
                if not exc.ours:
                    raise
                found = str(exc)
            if found == wanted:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{repository}: expected a shard on each of {wanted}; found {found}")
            threading.Event().wait(0.1)

    def run(self, host: int, module: str, more: dict[str, str], log: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a module on a host, with pipes; what it prints as errors goes to a log."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        warm = {worker.FOLDER: str(self._servers)}
        ours = {gates.FOLDER: str(self.gates), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment = kept | warm | ours | more | dict(self._own.get(host, {}))
        with open(self.folder / f"{log}.log", "a") as errors:
            return self.network.run(
                host,
                [sys.executable, "-m", module, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def close(self) -> None:
        """End all."""
        for host in list(self._clients):
            self.forget(host)
        for host in sorted(self._nodes, reverse=True):
            self.end(host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def hosts(
    number: int,
    joined: int | None = None,
    store_bytes: int = STORE_BYTES,
    gated: bool = True,
    own: Own = lambda folder: {},
) -> Iterator[Hosts]:
    """Give so many hosts, all of them or the first few with a node, in a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tv-hosts-"))
    try:
        with (
            Network(number) as network,
            Hosts(network, folder, joined or number, store_bytes, gated, own=own) as started,
        ):
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)
