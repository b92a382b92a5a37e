"""The whole repository under one seeded scheduler: hundreds of worlds, and what the simulator itself promises.

Rules
- Seeds run in processes of their own, with fixed hashes of text: a seed gives the same world everywhere.
- Their number is fixed. A busy machine takes longer, and finds the same.
"""

from __future__ import annotations

import dis
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulation import interrupts, threads
from tests.simulation import oracle as oracle_rules
from tests.simulation.__main__ import worlds_of
from tests.simulation.interrupts import Signal
from tests.simulation.kinds import BY_NAME
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import START_S, Loop, Process, World

ROOT = Path(__file__).parents[2]
SEEDS = {"first": ("0-24", "25-49", "0-3"), "more": ("50-104", "105-159", "4-11")}
"""In each of two processes, of no theme; and of each theme that is made only when it is asked for."""
FOUND = (138, 216, 453, 1402, 3210, 1195, 5347, 5655, 182, 266, 1035, 1323, 623, 1409, 7106, 2194, 2738, 58, 59, 85)
FOUND += (
    35,
    1184,
    7178,
    65,
    98,
    788,
    679,
    1603,
    4573,
    4598,
    20316,
    1029,
    3404,
    5615,
    15915,
    65248,
    69666,
    37500,
    2150,
    2004,
)
"""Seeds that found something, on 1094804 and since: see tests/simulation/README.md."""
FOUND_BY_THEME = {
    "compact": (1678, 3461, 3499),
    "handover": (124, 181, 418, 887),
    "cluster": (122, 144, 148, 198, 199),
    "change": (27, 108, 162, 234, 254, 349, 5072, 5239, 6160, 20065, 31362),
    "replicated": (9, 55, 5159, 10507, 11673, 21225, 31062),
    "queries": (76, 90, 134, 139, 142, 190, 193),
    "nodes": (2, 312, 318),
    "interrupts": (14, 23, 24, 25, 27, 35, 36, 51, 54, 58, 68, 73, 82, 87, 112, 115, 136, 143, 174, 214, 296),
}
"""The same, among worlds of one theme."""


def simulate(*options: str) -> subprocess.Popen[str]:
    """Start the simulator."""
    command = [sys.executable, "-m", "tests.simulation", *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(*all_options: Sequence[str]) -> list[tuple[int, str]]:
    """Run simulators beside one another; give how each ended and what it printed."""
    running = [simulate(*options) for options in all_options]
    try:
        told = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, text) for process, text in zip(running, told, strict=True)]


def find_nothing(*shares: Sequence[str]) -> None:
    """Run worlds in as many processes beside one another as shares are given; none breaks a rule."""
    for share, (code, text) in zip(shares, outputs(*(("--seed", *share) for share in shares)), strict=True):
        count = sum(len(worlds_of(worlds)) for worlds in share)
        assert code == 0, text[-20_000:]
        assert f"{count} seeds, 0 of them broke a rule" in text


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("one", "other", "named"), SEEDS.values(), ids=SEEDS)
def test_worlds_keep_the_rules(one: str, other: str, named: str) -> None:
    by_name = [f"{theme}:{named}" for theme in BY_NAME]
    find_nothing((one, by_name[0]), (other, *by_name[1:]))


@pytest.mark.timeout(3600)
def test_worlds_that_found_something_find_nothing_now() -> None:
    worlds = [*map(str, FOUND), *(f"{theme}:{seed}" for theme, seeds in FOUND_BY_THEME.items() for seed in seeds)]
    find_nothing(worlds[::2], worlds[1::2])


@pytest.mark.timeout(600)
def test_a_seed_gives_the_same_trace() -> None:
    once, again = outputs(("--seed", "216", "--trace"), ("--seed", "216", "--trace"))  # it makes and punches pages
    first, second = (text.rpartition("\n1 seeds")[0] for _, text in (once, again))
    assert len(first) > 1000
    assert first == second
    assert "pages failed" not in first


def world_of(*programs: object) -> tuple[World, Process]:
    """Make a world with one process."""
    w = World(1)
    return w, Process(w, "p", "node")


def test_time_passes_only_where_nobody_can_run() -> None:
    w, process = world_of()
    seen: list[tuple[str, float]] = []

    def sleeper() -> None:
        w.sleep(5.0)
        seen.append(("slept", w.now - START_S))
        w.finish()

    def busy() -> None:
        for _ in range(100):
            w.switch()
        seen.append(("worked", w.now - START_S))

    w.spawn(process, "sleeper", sleeper)
    w.spawn(process, "busy", busy)
    w.run()
    assert seen == [("worked", 0.0), ("slept", 5.0)]


def test_a_killed_process_runs_no_finally() -> None:
    w, process = world_of()
    other = Process(w, "other", "node")
    seen: list[str] = []

    def victim() -> None:
        try:
            w.sleep(100.0)
        finally:
            if not w.over:
                seen.append("finally")

    def killer() -> None:
        w.sleep(1.0)
        w.kill(process)
        w.sleep(200.0)
        w.finish()

    w.spawn(process, "victim", victim)
    w.spawn(other, "killer", killer)
    w.run()
    assert seen == []
    w.end()
    assert seen == []


def interrupted(w: World, at_s: float, action: Callable[[], object]) -> bool:
    """Do something in the running thread, which gets a signal then; say whether the signal ended it."""
    thread = w.current
    assert thread is not None
    signal = Signal(w, thread, {}, "action")
    w.at(w.now + at_s, signal.arrive)
    try:
        with signal.coming():
            action()
    except KeyboardInterrupt:
        return True
    return False


def test_a_signal_ends_a_wait_and_leaves_the_lock_to_others() -> None:
    w, process = world_of()
    threads.enter(w)
    lock, event, seen = threads.Lock(), threads.Event(), list[str]()

    def holder() -> None:
        with lock:
            w.sleep(5.0)
        seen.append(f"released at {w.now - START_S:.0f}")

    def client() -> None:
        w.sleep(1.0)
        assert interrupted(w, 1.0, lock.acquire)
        seen.append(f"interrupted at {w.now - START_S:.0f}")
        assert interrupted(w, 1.0, event.wait)
        assert not interrupted(w, 9.0, lock.acquire)
        seen.append(f"locked at {w.now - START_S:.0f}")
        w.finish()

    w.spawn(process, "holder", holder)
    w.spawn(process, "client", client)
    w.run()
    threads.enter(None)
    assert seen == ["interrupted at 2", "released at 5", "locked at 5"]
    w.end()


def test_signals_strike_after_calls_within_the_same_block() -> None:
    def calls(lock: Any, call: Any) -> object:
        with lock:
            found = call()
            return call(found)

    sites, after_calls = interrupts._sites_of(calls.__code__)
    following = {i.offset: i.opname for i in dis.get_instructions(calls)}
    assert "STORE_FAST" in {following[offset] for offset in sites & after_calls}  # `found` may be lost
    leaving = [i.offset for i in dis.get_instructions(calls) if i.opname == "SWAP"]
    assert leaving
    assert not sites & set(leaving)  # the lock is released all the same


def test_a_loop_runs_tasks_in_virtual_time() -> None:
    import asyncio

    w, process = world_of()
    loop = Loop(process, "loop")
    seen: list[float] = []

    async def waits() -> None:
        await asyncio.sleep(3.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2.0)
        seen.append(w.now - START_S)
        w.finish()

    loop.call_soon(lambda: loop.create_task(waits()))
    w.run()
    assert seen == [5.0]
    w.end()


def test_contents_check_themselves() -> None:
    oracle = Oracle(World(1))
    content = oracle.fresh(8)
    attempt = oracle.begin("m", {"t": content}, durable=False)
    attempt.failed = True
    array = oracle.array(content)
    assert oracle.read("a load", None, "m", {"t": array}, True) is attempt
    assert not oracle.broken
    oracle.read("a load", None, "m", {"t": np.zeros_like(array)}, True)
    assert [rule for rule, _ in oracle.broken] == ["R1"]


def test_the_rules_that_it_checks_stand_in_the_design() -> None:
    checked = re.findall(r"^- (R\d): ", oracle_rules.__doc__ or "", re.MULTILINE)
    assert checked == [f"R{number}" for number in range(1, 9)]
    design = ROOT / "docs/design"
    promised = (design / "catalog.md").read_text()
    assert re.findall(r"^\| (R\d) \|", promised, re.MULTILINE) == checked
    named = set(re.findall(r"\bM\d+\b", promised))
    assert named <= set(re.findall(r"\*\*(M\d+)[ ,]", (design / "memory.md").read_text()))
    rules = set(re.findall(r"^- \*\*([a-z ]+)\.\*\*", promised, re.MULTILINE))
    rests = set(", ".join(re.findall(r"(?<!\*)\*([a-z, ]+)\*(?!\*)", promised.partition("## Rules")[0])).split(", "))
    assert rests <= rules
