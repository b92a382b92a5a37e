"""Short calls within a node and between two nodes, by socket and by a Ray handle.

Rules
- The call changes nothing and returns a few bytes (`is_short` of the shard); both ways reach the same method. The floor
  is one byte there and back between two processes, over a Unix socket or over TCP.
- Calls that follow one another find warm caches. Calls after a pause of 0.2 s, as of a search or a training, do not.
  The pause is not timed.
- The small save is a user's call. It has no peer here: `growth` and `save_load` compare saves with others.
- The requests of a commit are those of the client and those of its shard to the catalog, each sent after the one before
  it was answered. Releases and renewals, for which the caller does not wait, do not count.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.messages import actor_name
from tensorvine.actors.shard.calls import ShardCalls

from .core.clusters import NAME, Names, raylets, repository
from .core.fleet import Program
from .core.measure import GIB, Action, alternate, progress, sample
from .core.report import Goal, Report

CALL, PEER, SAVE, FLOOR = "call", "by a Ray handle", "save", "floor"
NEAR, AWAY = "one byte there and back, Unix socket", "one byte there and back, TCP"
"""The floors."""
PAUSE_S, TIMEOUT_S = 0.2, 30.0
FOLLOWING, PAUSED = "one after the other", f"after {PAUSE_S} s"


def run(report: Report) -> None:
    """Measure calls of one client to one shard, of its node and of another."""
    rounds = report.pick(quick=(20, 2), normal=(3000, 100))
    for measure, floor, where in ((within, NEAR, ""), (between, AWAY, "between nodes: ")):
        with Program(measure, *rounds) as program:
            for what in (FOLLOWING, PAUSED):
                progress(f"{where}calls {what}")
                found = {name: sample(times) for name, times in program.ask().items()}
                goal = Goal("times faster than by a Ray handle", found[PEER].median / found[CALL].median, at_least=3.0)
                report.add(
                    f"{where}a call {what}",
                    found[CALL],
                    peer=(PEER, found[PEER]),
                    floor=(floor, found[FLOOR]),
                    goals=[goal],
                    headline=what == PAUSED and not where,
                )
                report.add(f"{where}save of 1 KiB {what}", found[SAVE], 1024, floor=(floor, found[FLOOR]))
    for shards in report.pick(quick=(1,), normal=(1, 2, 4, 8)):
        progress(f"requests of a commit, {shards} shards")
        with Program(counted, shards, report.pick(quick=2, normal=50)) as program:
            for case, (requests, times, most, nbytes) in program.ask().items():
                goal = Goal("requests in sequence", len(requests), at_most=most)
                report.add(
                    f"{case}, shards: {shards}", sample(times), nbytes, goals=[goal], requests=" ".join(requests)
                )


def counted(shards: int, count: int) -> Iterator[dict[str, tuple[list[str], list[float], int, int]]]:
    """Yield, for each kind of save, its requests, how many there may be, its bytes, and times of saves."""
    with repository(shards=shards, store_bytes=GIB // 8, preallocate_bytes=0) as repo:
        small, large = np.zeros(128), np.zeros(1 << 17)
        yield {
            "first save of 1 MiB": (*_requests(repo, _saved, large, 1), 4, large.nbytes),
            "save of 1 KiB": (*_requests(repo, _saved, small, count), 2, small.nbytes),
            "save of 1 MiB": (*_requests(repo, _saved, large, count), 3, large.nbytes),
            "save of 1 MiB in reserved memory": (*_requests(repo, _saved_later, large, count), 2, large.nbytes),
        }


def _saved(repo: Any, arrays: dict[str, np.ndarray]) -> None:
    repo.save(f"m{arrays['t'].size}", arrays)


def _saved_later(repo: Any, arrays: dict[str, np.ndarray]) -> None:
    repo.save_async(f"m{arrays['t'].size}", arrays).committed()


def _requests(repo: Any, save: Callable[..., None], tensor: np.ndarray, count: int) -> tuple[list[str], list[float]]:
    """Save versions of which most bytes are new; return the requests of the last save, and the times of all."""
    session, sent = repo._session, list[str]()
    ways = {way: getattr(session, way) for way in ("send", "_asked")}  # to a shard, and to the catalog

    def noted(way: str) -> Callable[..., Any]:
        return lambda *asked: (sent.append(asked[-1].remote.name), ways[way](*asked))[1]

    times: list[float] = []
    for _ in range(count):
        arrays = {"t": tensor + time.monotonic_ns(), "same": np.ones(5)}
        before = session.ask(CatalogCalls.stats()).requests
        vars(session).update({way: noted(way) for way in ways})
        sent.clear()
        began = time.perf_counter()
        save(repo, arrays)
        times.append(time.perf_counter() - began)
        for way in ways:
            del vars(session)[way]
        found = [name for name in sent if name in ("begin", "digests", "grant", "commit")]
        at_catalog = session.ask(CatalogCalls.stats()).requests - before - found.count("begin")
        time.sleep(PAUSE_S)  # memory for the next save is reserved
    return found + ["commit at the catalog"] * at_catalog, times


def within(*rounds: int) -> Iterator[dict[str, Any]]:
    """Measure calls to the shard of this node, one after the other and then after pauses."""
    with repository(shards=1, preallocate_bytes=0) as repo, echo(socket.socketpair()) as floor:
        yield from _times(repo, 0, floor, rounds)


def between(*rounds: int) -> Iterator[dict[str, Any]]:
    """Measure calls to the shard of another raylet."""
    from tensorvine.actors import Repository

    with (
        raylets(2, GIB // 4) as (_, other),
        Repository.start(NAME, shards=2, preallocate_bytes=0) as repo,
        echo(connected()) as floor,
    ):
        session = repo._session
        shard = next(shard for shard in session.shards if session.connection(shard).hello.node == other)
        yield from _times(repo, shard, floor, rounds)


def _times(repo: Any, shard: int, floor: Callable[[], None], rounds: Sequence[int]) -> Iterator[dict[str, Any]]:
    session = repo._session
    session.connection(shard)
    handle: Any = session.engine.find(actor_name(repo.name, shard))
    actions: dict[str, Action] = {
        CALL: lambda: session.call(shard, ShardCalls.is_short()),
        PEER: lambda: ray.get(handle.is_short.remote(), timeout=TIMEOUT_S),
        FLOOR: floor,
        SAVE: small_saves(repo),
    }
    for pause_s, count in zip((0.0, PAUSE_S), rounds, strict=True):
        found = alternate(actions, rounds=count, warmup=0 if pause_s else 10, pause_s=pause_s)
        yield {name: each.times for name, each in found.items()}


def small_saves(repo: Any) -> Action:
    """Return a save of 1 KiB, by the shard of this node."""
    names, tensors = Names("call"), {"t": np.ones(128)}
    return lambda: repo.save(names.fresh(), tensors), lambda saved: repo.retire(saved.ref)


@contextmanager
def echo(ends: tuple[socket.socket, socket.socket]) -> Iterator[Callable[[], None]]:
    """Start a process that sends back each byte; yield a function that sends one and waits for it.

    Args:
        ends: Both ends of a connection; they are closed at the end.
    """
    ours, theirs = ends
    process = multiprocessing.get_context("spawn").Process(target=_send_back, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.settimeout(TIMEOUT_S)

    def there_and_back() -> None:
        ours.send(b"x")
        ours.recv(1)

    try:
        there_and_back()
        yield there_and_back
    finally:
        ours.close()
        process.join(TIMEOUT_S)


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection within this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _send_back(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1):
            connection.send(data)
