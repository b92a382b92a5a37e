"""The runner itself: readers that do what none may do are reported, with their input, and the others are read on.

They run in a process of their own, for the runner forks.
"""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fuzz import child, mutations
from tests.fuzz.child import ENVIRONMENT

ROOT = Path(__file__).parents[2]
READERS = """
import json, logging, mmap, os, sys, threading, time
from contextlib import contextmanager
from tests.fuzz.runner import Limits, run, scratch
from tests.fuzz.target import Inputs, Target
from tensorvine.store.errors import CorruptDataError

def busy():
    while True: pass

def log():
    try: {}["a"]
    except KeyError: logging.getLogger("x").exception("it goes on")

def thread():
    started = threading.Thread(target=lambda: {}["a"])
    started.start()
    started.join()

def refused_memory():
    try: bytearray(1 << 50)
    except MemoryError as exc: raise CorruptDataError("so it says") from exc

def fine(): raise CorruptDataError("as it should be")

DO = {"busy": busy, "still": lambda: time.sleep(3600), "crash": lambda: os.kill(os.getpid(), 11),
      "ends": lambda: os._exit(3), "foreign": lambda: {}["a"], "exit": lambda: sys.exit(2), "log": log,
      "thread": thread, "memory": lambda: mmap.mmap(-1, 64 << 20).close(), "refused-memory": refused_memory,
      "fine": fine}

def target(name):
    @contextmanager
    def reading(folder):
        yield lambda content: DO[name]() if content == b"bad" else None
    return Target(name, lambda folder: [b"valid"], reading, lambda dice, _: dice.choice([b"bad", b"good", b"good"]))

with scratch() as folder:
    for name in sys.argv[1:]:
        limits = Limits(busy_s=0.3 if name == "busy" else 60, still_s=3 if name == "still" else 60, more_bytes=32 << 20)
        first, second = run([target(name), target("fine")], 196, range(6), folder, limits)
        bad = [number for number in range(6) if Inputs(target(name), folder).of(196, number) == b"bad"]
        found = [(f.kind, f.number == bad[0], f.content.decode(), "READERS" in f.what) for f in first.findings]
        print(json.dumps([found, first.times == len(bad), [second.read, second.refused, second.times]]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


@pytest.mark.parametrize("module", [child, mutations])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


@pytest.mark.timeout(600)
def test_what_no_reader_may_do_is_reported_with_its_input() -> None:
    kinds = {
        "busy": "hang",
        "still": "hang",
        "crash": "crash",
        "ends": "crash",
        "foreign": "foreign",
        "exit": "foreign",
        "log": "foreign",
        "thread": "foreign",
        "memory": "memory",
        "refused-memory": "memory",
    }
    found = subprocess.run(
        [sys.executable, "-c", READERS, *kinds, "fine"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(lines) == len(kinds) + 1, found.stderr
    for kind, (findings, all_counted, others) in zip(kinds.values(), lines, strict=False):
        assert [finding[:3] for finding in findings] == [[kind, True, "bad"]]
        assert all_counted
        assert others == lines[-1][2]  # those of the next reader
    assert lines[-1][0] == []


def test_a_target_that_never_goes_on_is_left() -> None:
    script = READERS.replace("dice.choice([", "dice.choice([b'bad'] or [").replace("range(6)", "range(60)")
    found = subprocess.run(
        [sys.executable, "-c", script, "ends"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    ((findings, all_counted, others),) = (json.loads(line) for line in found.stdout.splitlines())
    assert (len(findings), all_counted) == (1, False)
    assert others[0] + others[1] == 60


def test_readers_of_files_are_made_ready_again() -> None:
    script = """if True:
        from tests.fuzz.runner import run, scratch
        from tests.fuzz.stored import STORED
        with scratch() as folder:
            outcomes = [outcome for seed in (1, 2) for outcome in run(STORED, seed, range(9), folder)]
        print(*(not one.times and one.read + one.refused == 9 for one in outcomes))
    """
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == {"True"}, found.stderr


def test_a_fuzzer_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", "1h", "--target", "numbers", "--folder", str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("seed ")
    assert [*tmp_path.iterdir()]
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert (process.returncode, said.splitlines()[-1]) == (1, "ended by SIGTERM")
    assert not [*tmp_path.iterdir()]
