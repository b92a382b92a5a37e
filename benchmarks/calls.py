"""Short calls, within a node and between two raylets: by our sockets, and by the actor's Ray handle.

Rules
- The call changes nothing and answers a few bytes (`tag` of the shard); both ways reach the same method. The floor is
  one byte there and back between two processes: over a Unix socket, or over TCP.
- Calls that follow one another find warm caches; those after a pause of 0.2 s, as a search or a training makes them, do
  not. What is timed is the call, not the pause.
- The small save and the look-up are what a user calls. They have no peer here: `growth` and `save_load` show them
  beside others.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from tensorvine.actors.rpc.messages import actor_name
from tensorvine.actors.shard.calls import ShardCalls

from .measure import GIB, Action, Effort, Goal, Report, Row, Sample, alternate, progress
from .raylets import two_raylets
from .session import NAME, Names, repository

if TYPE_CHECKING:
    from tensorvine.actors import Repository

CALL, PEER, INFO, SAVE = "call", "by a Ray handle", "info", "save"
"""What is timed beside a floor."""
NEAR, AWAY = "one byte there and back, Unix socket", "one byte there and back, TCP"
"""The floors."""
BETWEEN = "between nodes: "
"""Begins such a case."""
PAUSE_S = 0.2
ROUNDS = {Effort.QUICK: (200, 10), Effort.NORMAL: (3000, 100), Effort.FULL: (10_000, 400)}
"""One after the other, after a pause."""
TIMEOUT_S = 30.0


def run(effort: Effort) -> Report:
    """Measure calls of one client to one shard, of its node and of another."""
    report = Report("calls")
    within_a_node(report, effort)
    between_nodes(report, effort)
    return report


def within_a_node(report: Report, effort: Effort) -> None:
    """Measure calls to the shard of this node."""
    with repository(shards=1, preallocate_bytes=0) as repo, echo(socket.socketpair()) as floor:
        measure(report, repo, 0, effort, floor, NEAR)


def between_nodes(report: Report, effort: Effort) -> None:
    """Measure calls to the shard of another raylet."""
    from tensorvine.actors import Repository

    with (
        two_raylets(GIB // 4) as (_, other),
        Repository.start(NAME, shards=2, preallocate_bytes=0) as repo,
        echo(connected()) as floor,
    ):
        session = repo._session
        shard = next(shard for shard in session.shards if session.connection(shard).hello.node == other)
        measure(report, repo, shard, effort, floor, AWAY, BETWEEN)


def measure(
    report: Report,
    repo: Repository,
    shard: int,
    effort: Effort,
    floor: Callable[[], None],
    named: str,
    where: str = "",
) -> None:
    """Measure calls to a shard.

    Args:
        report: gets the rows.
        repo: the client.
        shard: answers, and is home to what is saved.
        effort: how often.
        floor: one byte there and back.
        named: what the floor is called.
        where: begins the cases.
    """
    names, tensors, session = Names("call"), {"t": np.ones(128)}, repo._session

    def fresh() -> str:
        while session.home(name := names.fresh()) != shard:
            pass
        return name

    kept = repo.save(fresh(), tensors).ref
    session.connect_all()
    handle: Any = session.engine.find(actor_name(repo.name, shard))
    calls: dict[str, Callable[[], Any]] = {
        CALL: lambda: session.call(shard, ShardCalls.tag()),
        PEER: lambda: ray.get(handle.tag.remote(), timeout=TIMEOUT_S),
        named: floor,
        INFO: lambda: repo.info(kept),
    }
    for what, pause_s, rounds in zip(
        ("one after the other", f"after {PAUSE_S} s"), (0.0, PAUSE_S), ROUNDS[effort], strict=True
    ):
        progress(f"{where}calls {what}")
        actions = {name: Action(call) for name, call in calls.items()}
        actions[SAVE] = Action(lambda: repo.save(fresh(), tensors), lambda saved: repo.retire(saved.ref))
        samples = alternate(actions, rounds=rounds, warmup=10) if not pause_s else _paused(actions, rounds)
        for row in rows(where, what, samples, named):
            report.add(row, headline=row.case == f"a call {what}" and bool(pause_s))


def rows(where: str, what: str, samples: dict[str, Sample], named: str) -> Iterator[Row]:
    """Return the rows of one pace."""
    floor_s = samples[named].median
    goal = Goal("times faster than by a Ray handle", samples[PEER].median / samples[CALL].median, at_least=3.0)
    yield Row(f"{where}a call {what}", samples[CALL], 0, PEER, samples[PEER], named, floor_s, (goal,))
    yield Row(f"{where}info of a version {what}", samples[INFO], 0, limit=named, limit_s=floor_s)
    yield Row(f"{where}save of 1 KiB {what}", samples[SAVE], 1024, limit=named, limit_s=floor_s)


def _paused(actions: dict[str, Action], rounds: int) -> dict[str, Sample]:
    """Time actions in turn, each after a pause."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            result = action.run()
            found[name].append(time.perf_counter() - began)
            action.after(result)
    return {name: Sample(tuple(times)) for name, times in found.items()}


@contextmanager
def echo(ends: tuple[socket.socket, socket.socket]) -> Iterator[Callable[[], None]]:
    """Start a process that sends back each byte; gives who sends one and waits for it.

    Args:
        ends: of a connection, which are closed in the end.
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
    """Return both ends of a connection of TCP within this machine."""
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
