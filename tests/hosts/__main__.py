"""Cuts of links at random, of a second to 90 s, at any step of any operation: `scripts/soak hosts DURATION [--seed N]`.

Rules
- Everything is drawn from the seed; what races does not follow from it.
- Each round has repositories of its own, and cuts until their time is over; hosts that were given up join again, and
  all is held against the record. A round that finds something ends the soak.
- At each cut a training is forked, too. The fork may fail; clones that there are go on as the training does.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from tests.hosts.cluster import WAIT_S, FailedError, Hosts, hosts
from tests.hosts.ground import FORK, LOAD, NAMES, SAVE, TIMEOUT_S, Ground, forks_at
from tests.hosts.network import Link, around, both, missing
from tests.soak.modes import seconds_of
from tests.support.clock import clock_off

HOSTS = 4
CUTS = 3
"""In a round."""
SECONDS = (1.0, 4.0, 15.0, 40.0, 90.0)
SETTLE_S = 15.0
"""After a long cut, by when Ray has found out which hosts it gives up."""
STEPS = (*SAVE, *LOAD, *(f"shard.{step}" for step in ("pull.before", "pull.after", "grant.before", "digests.before")))


def drawn_cut(random: Random) -> tuple[Link, ...]:
    """Draw what is cut: pairs, directions, or a host."""
    a, b = random.sample(range(1, HOSTS + 1), 2)
    kind = random.choice(("pair", "one way", "host", "two hosts"))
    if kind == "pair":
        return both(a, b)
    if kind == "one way":
        return ((a, b),)
    return around(a, HOSTS) if kind == "host" else tuple({*around(a, HOSTS), *around(b, HOSTS)} - {*both(a, b)})


def play(at: Hosts, number: int, random: Random) -> None:
    """Play a round."""
    ground = Ground(at, f"round{number}-")
    for cut in range(CUTS):
        links, seconds, step, fork_step = drawn_cut(random), *map(random.choice, (SECONDS, STEPS, FORK))
        say(f"round {number}: {seconds:.0f} s of {links} at {step} and {fork_step}")
        flush(ground)
        names = random.sample(NAMES, 4)
        alive = {host for host in at.network.hosts if at.is_alive(host)}
        gates = [at.gate(repository, step) for repository in ground.records]
        run = f"round{number}-run{cut}"
        gates.append(at.gate(forks_at(fork_step, run, f"{run}-clones"), fork_step))
        forking = begin_fork(at, run, sorted(alive), random)
        try:
            begun = [ground.save(r, name, random.choice(at.network.hosts)) for r in ground.records for name in names]
            begun += [ground.load(r, name, random.choice(at.network.hosts)) for r in ground.records for name in names]
            for gate in gates:
                gate.wait(lambda: not all(one.done() for one in [*(o.answer for o in begun), forking]), 5.0)  # noqa: B023
            with at.cut(*links):
                for gate in gates:
                    gate.open()
                ended = time.monotonic() + seconds
                while time.monotonic() < ended:
                    host = random.choice(at.network.hosts)
                    begun += [ground.save(r, random.choice(NAMES), host) for r in ground.records]
                    begun += [ground.load(r, random.choice(NAMES), host) for r in ground.records]
                    threading.Event().wait(min(1.0, seconds))
        finally:
            for gate in gates:
                gate.open()
        gone = recovered(at, alive) if seconds > SECONDS[1] else set[int]()
        end_fork(at, run, forking)
        failed = ground.settle(begun, certain=False)
        note_losses(ground, gone)
        say(f"round {number}: {len(begun)} operations, {len(failed)} of them failed")
        ground.judge(at.network.hosts, whole=True)
    ground.retire_all()
    left = ground.left()
    if left:
        raise AssertionError(f"when all is retired: {left}")
    at.client(1).do("stop", prefix=f"round{number}-")


def begin_fork(at: Hosts, run: str, alive: Sequence[int], random: Random) -> Future[Any]:
    """Begin a training on two of the hosts that are alive, and to fork it."""
    nodes = [at.id_of(host) for host in random.sample(alive, 2)]
    at.client(1).do("train", run=run, nodes=nodes)
    return at.client(1).begin("fork", run=run, clones=f"{run}-clones", timeout=TIMEOUT_S)


def end_fork(at: Hosts, run: str, forking: Future[Any]) -> None:
    """Wait for a fork, which may fail, and end the training: nothing of either is left."""
    try:
        say(f"{run}: forked after step {forking.result(4 * TIMEOUT_S)}")
    except FailedError as exc:
        if not exc.ours:
            raise
        say(f"{run}: {exc}")
    at.client(1).do("end", run=run)
    deadline = time.monotonic() + WAIT_S
    while living := at.client(1).do("living", prefix=f"{run}"):
        if time.monotonic() > deadline:
            raise AssertionError(f"{run}: expected no ranks and no clones; found {living}")
        threading.Event().wait(0.2)


def recovered(at: Hosts, alive: set[int]) -> set[int]:
    """Have hosts that were given up join again; give them."""
    threading.Event().wait(SETTLE_S)
    gone = {host for host in alive if not at.is_alive(host)}
    for host in gone:
        at.forget(host)
        at.join(host)
    return gone


def note_losses(ground: Ground, gone: set[int]) -> None:
    """Take note of what may be lost with hosts that were given up: what was saved during the cut is on no path yet."""
    if gone:
        say(f"given up, and joined again: {sorted(gone)}")
    for repository, record in ground.records.items():
        if gone and (repository.endswith(("memory", "path")) or len(gone) > 1):
            record.may_lose_all()


def flush(ground: Ground) -> None:
    """Have all that has a path on it."""
    for repository in ground.records:
        if repository.endswith(("path", "both")):
            ground.hosts.client(1).do("flush", repository=repository)


def clocks_off(folder: Path) -> Mapping[int, Mapping[str, str]]:
    """Have the clock of one host be an hour ahead, and that of another an hour behind."""
    return {2: clock_off(3600, folder), 3: clock_off(-3600, folder)}


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(prog="scripts/soak hosts", description="Links that are cut, round by round.")
    parser.add_argument("duration", type=seconds_of, help="such as 90s, 10m or 1h")
    parser.add_argument("--seed", type=int, default=None, help="draws everything; default: of the clock")
    parser.add_argument("--clocks", action="store_true", help="the clocks of two hosts are an hour off")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int(time.time())
    lacking = missing()
    if lacking is not None:
        say(lacking)
        return 2
    deadline, number = time.monotonic() + given.duration, 0
    say(f"seed {seed}")
    with hosts(HOSTS, own=clocks_off if given.clocks else lambda folder: {}) as at:
        while time.monotonic() < deadline or not number:
            number += 1
            try:
                play(at, number, Random(f"{seed}/{number}"))
            except (AssertionError, FailedError, OSError, TimeoutError):
                say(f"round {number} of seed {seed}:\n{traceback.format_exc()}")
                return 1
    say(f"{number} rounds, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
