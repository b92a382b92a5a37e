"""Every example runs to its end, says what it must, and leaves no process behind, also after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import typer

from examples.finetune.interrupt import Interrupts
from examples.online.starting import INTERRUPTED, interruptible

ROOT = Path(__file__).parents[2]
SAYS = {
    "finetune": (
        r"longest_prefix\(candidate\) = root@1 .*: 10 layers with 20 tensors match",
        r"longest_prefix\(deeper\) = extra@1 .*: 11 layers with 22 tensors match",
        r"stored in the repository",
        r"deeper@1 +root@1 \(20\), extra@1 \(2\), deeper@1 \(4\)",
        r"common_ancestor\('deeper', 'scratch'\) +None",
        r"root@1 is retired; \S+ still has [1-9]\d* tensors of it",
        r"Loaded again: all \d+ versions that are left predict the same, bit for bit",
    ),
    "fork_training": (
        r"MB of state were there \d+\.\d s after the fork was ordered; the original was at step \d+ by then",
        r"learning rate × 4 +1 +\d\.\d{4} .* rate-up@1 +original@1",  # noqa: RUF001  the sign is meant
        r"Original and control: 150 losses of each rank and 25 tensors are the same, bit for bit",
    ),
    "nas": (
        r"1\.5e\+19 candidates in 18 decisions; 24 are evaluated",
        r"The best candidates, repository",
        r"\d+ of \d+ +\d+ \d\d\.\d% > \d+ \d\d\.\d%",
        r"candidates \(of these, failed\) +24 \(0\) +24 \(0\) +24 \(0\)",
        r"share of time for storing +- +\d+\.\d+% +\d+\.\d+%",
    ),
    "online_cancer": (r"552/552 loss 0\.\d+  published @\d+", r"planned +\d+ ", r"230 answers each"),
    "online_ptychography": (
        r"16 patterns every \d+ ms",
        r"245/245 loss 0\.\d+  published @\d+",
        r"epoch +[3-6] ",
        r"196 answers each",
    ),
    "population_training": (
        r"\d\.\d s: \d becomes a copy of \d at step \d+, with learning rate 0\.\d+, after",
        r"exploits +[1-9]\d* +[1-9]\d*",
        r"accuracy of the best member at its end +9\d\.\d% +9\d\.\d%",
    ),
}
"""What an example that draws a picture must print, as regular expressions."""
EXAMPLES = sorted(SAYS)
MARK = "TENSORVINE_TEST_EXAMPLE"
"""An environment variable by which the processes that an example started are known, whatever their parents."""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A value of MARK for one test; what still runs with it at the end is killed."""
    yield str(tmp_path)
    for process in started(str(tmp_path)):
        process.kill()


def start(example: str, mark: str, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(ROOT / "examples" / example / "run.py"), "--quick", "--out", str(out)]
    return subprocess.Popen(
        command,
        cwd=out,
        env={**os.environ, MARK: mark, "RAY_ADDRESS": "local", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def hear_ctrl_c() -> None:
    """Undo what a shell does to jobs in its background: they ignore Ctrl-C, and so do the tests that run as one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(mark: str) -> list[psutil.Process]:
    """Return the processes that run with this mark in their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def outlive(mark: str, seconds: float) -> list[str]:
    """Return the command lines of marked processes that do not end within `seconds`."""
    _, alive = psutil.wait_procs(started(mark), timeout=seconds)
    return [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]


@pytest.mark.own_cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_draws_its_picture_and_leaves_no_process(example: str, mark: str, tmp_path: Path) -> None:
    process = start(example, mark, tmp_path)
    output, _ = process.communicate(timeout=880)
    assert process.returncode == 0, output
    for line in SAYS[example]:
        assert re.search(line, output), f"{line!r} not in:\n{output}"
    assert "Traceback" not in output
    picture = Path(re.findall(r"Picture[^:\n]*: (.+)", output)[0])
    assert picture.parent == tmp_path
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 20_000
    assert outlive(mark, seconds=20) == []


@pytest.mark.own_cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("moment", "group"),
    [
        pytest.param("Starting Ray", True, id="while Ray starts"),
        pytest.param("Digits 0 to 4", False, id="in training, only to Python"),
        pytest.param("longest_prefix(candidate)", True, id="while an ancestor is pinned"),
    ],
)
def test_ctrl_c_ends_an_example_promptly_and_cleanly(moment: str, group: bool, mark: str, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole process group; `kill -INT` sends it to one process."""
    process = start("finetune", mark, tmp_path)
    assert process.stdout is not None
    seen = ""
    while moment not in seen:
        line = process.stdout.readline()
        assert line, f"ended before {moment!r}:\n{seen}"
        seen += line
    if moment != "Starting Ray":
        names = {running.name() for running in started(mark)}
        assert {"raylet", "gcs_server"} <= names
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130, rest
    assert "stopped by Ctrl-C" in rest
    assert "Traceback" not in rest
    assert outlive(mark, seconds=20) == []


def test_ctrl_c_waits_for_the_framework_but_a_second_one_does_not() -> None:
    reached: list[str] = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.deferred():
            interrupts.check()
            signal.raise_signal(signal.SIGINT)
            reached.append("what must not be interrupted")
            interrupts.check()
            reached.append("what comes after a check")

    with Interrupts().handled() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work(interrupts)
        assert reached == ["what must not be interrupted"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with Interrupts().handled() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # not deferred
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            signal.raise_signal(signal.SIGINT)  # the second


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Have Python's own handler of Ctrl-C, which the background job of a shell does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_ctrl_c")
@pytest.mark.parametrize("handled", [False, True], ids=["by Python", "by Interrupts"])
def test_ctrl_c_that_comes_in_a_finalizer_is_raised_after_it(handled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    hook, reached = sys.unraisablehook, list[str]()

    def work() -> None:
        with interruptible(), Interrupts().handled() if handled else nullcontext():
            Dying()
            reached.append("the finalizer's KeyboardInterrupt is lost")
            threading.Event().wait(60)
            reached.append("nothing came")

    with pytest.raises(typer.Exit) as ended:
        work()
    assert reached == ["the finalizer's KeyboardInterrupt is lost"]
    assert ended.value.exit_code == INTERRUPTED
    assert capfd.readouterr().err == "\nstopped by Ctrl-C\n"
    assert sys.unraisablehook is hook


def test_what_else_a_finalizer_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(str(unraisable.exc_value)))
    with interruptible():
        Dying()
    assert reported == ["in a finalizer"]
