"""Short calls within a node: by a socket, and by the engine beside it.

Rules
- The call changes nothing and answers a few bytes (`tag` of the shard); both ways reach the same method in the same
  event loop. The floor is one byte there and back between two processes, over a Unix socket.
- Calls that follow one another find warm caches; those after a pause of 0.2 s, as a search or a training makes them, do
  not. What is timed is the call, not the pause.
- The small save and the look-up are what a user calls; they go by sockets throughout, the shard's note to the
  planner included. They have no peer here: `growth` and `save_load` show them beside others.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tensorvine.actors.rpc.messages import actor_name
from tensorvine.actors.shard.calls import ShardCalls

from .measure import Action, Effort, Goal, Report, Row, Sample, alternate, progress
from .session import Names, repository

OURS, ENGINE, FLOOR = "by socket", "by Ray", "one byte there and back, Unix socket"
PAUSE_S = 0.2
ROUNDS = {Effort.QUICK: (200, 10), Effort.NORMAL: (3000, 100), Effort.FULL: (10_000, 400)}
"""One after the other, after a pause."""
TIMEOUT_S = 30.0


def run(effort: Effort) -> Report:
    """Measure calls of one client to one shard."""
    report = Report("calls")
    with repository(shards=1, preallocate_bytes=0) as repo, echo() as floor:
        names, tensors = Names("call"), {"t": np.ones(128)}
        kept = repo.save("kept", tensors).ref
        session = repo._session
        session.connect_all()
        engine, actor = session.engine, session.engine.find(actor_name(repo.name, 0))
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda: session.call(0, ShardCalls.tag()),
            ENGINE: lambda: engine.result(engine.call(actor, "tag"), TIMEOUT_S, "shard 0"),
            FLOOR: floor,
            "info": lambda: repo.info(kept),
        }
        for what, pause_s, rounds in zip(
            ("one after the other", f"after {PAUSE_S} s"), (0.0, PAUSE_S), ROUNDS[effort], strict=True
        ):
            progress(f"calls {what}")
            actions = {name: Action(call) for name, call in calls.items()}
            actions["save"] = Action(lambda: repo.save(names.fresh(), tensors), lambda saved: repo.retire(saved.ref))
            samples = alternate(actions, rounds=rounds, warmup=10) if not pause_s else _paused(actions, rounds)
            for row in rows(what, samples):
                report.add(row, headline=row.case == f"a call {what}" and bool(pause_s))
    return report


def rows(what: str, samples: dict[str, Sample]) -> Iterator[Row]:
    """Return the rows of one pace."""
    floor_s = samples[FLOOR].median
    goal = Goal("times faster than Ray's call", samples[ENGINE].median / samples[OURS].median, at_least=3.0)
    yield Row(f"a call {what}", samples[OURS], 0, ENGINE, samples[ENGINE], FLOOR, floor_s, (goal,))
    yield Row(f"info of a version {what}", samples["info"], 0, limit=FLOOR, limit_s=floor_s)
    yield Row(f"save of 1 KiB {what}", samples["save"], 1024, limit=FLOOR, limit_s=floor_s)


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
def echo() -> Iterator[Callable[[], None]]:
    """Start a process that sends back each byte; gives who sends one and waits for it."""
    ours, theirs = socket.socketpair()
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


def _send_back(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1):
            connection.send(data)
