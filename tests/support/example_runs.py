"""Examples as their users run them: `python examples/NAME/run.py --quick`, in a process of its own. Workers of their
Rays are forked (`tests.support.warm`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from tensorvine.actors import Repository

from tests.support.marked import MARK, outlive

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-u", "-m", "tests.support.warm.run")
WITHOUT_RAY = ROOT / "tests/support/without_ray"
"""Where nothing imports Ray, although it is installed."""
LIMIT_S = 880.0


def address() -> str:
    """Return HOST:PORT of the Ray of this process."""
    return ray.get_runtime_context().gcs_address


def start(
    example: str, mark: str, *options: str, modules: str = "-", without_ray: bool = False
) -> subprocess.Popen[str]:
    """Start an example, at its smallest.

    Args:
        example: its folder.
        mark: of all that it starts.
        options: of its command line.
        modules: that workers of its Ray are forked with.
        without_ray: it, and all that it starts, find no Ray to import.
    """
    python = (sys.executable, "-u") if without_ray else (*PYTHON, modules)
    path = {"PYTHONPATH": str(WITHOUT_RAY)} if without_ray else {}
    return subprocess.Popen(
        [*python, str(ROOT / "examples" / example / "run.py"), "--quick", *options],
        cwd=ROOT,
        env={**os.environ, MARK: mark, "RAY_ADDRESS": "local", "COLUMNS": "120", **path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )


def check(
    example: str,
    says: tuple[str, ...],
    mark: str,
    out: Path,
    *options: str,
    modules: str = "-",
    without_ray: bool = False,
) -> None:
    """Run an example to its end: it says what it must, draws its picture, and leaves no process.

    Args:
        example: its folder.
        says: regular expressions of lines.
        mark: of all that it starts.
        out: where the picture goes.
        options: of its command line, besides.
        modules, without_ray: as of `start`.
    """
    process = start(example, mark, "--out", str(out), *options, modules=modules, without_ray=without_ray)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    for line in says:
        assert re.search(line, output), f"{line!r} not in:\n{output}"
    assert "Traceback" not in output
    picture = Path(re.findall(r"Picture[^:\n]*: (.+)", output)[0])
    assert picture.parent == out
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 20_000
    assert outlive(mark) == []


def await_line(process: subprocess.Popen[str], part: str) -> None:
    """Read what an example prints up to the line that has this part."""
    assert process.stdout is not None
    seen = ""
    while part not in seen:
        line = process.stdout.readline()
        assert line, f"ended before {part!r}:\n{seen}"
        seen += line


def interrupt(process: subprocess.Popen[str], *, group: bool = True) -> None:
    """Send Ctrl-C: an example says that it was stopped, and ends without a traceback.

    Args:
        process: the example.
        group: to its process group, as a terminal does; False: to the process alone, as `kill -INT` does.
    """
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "stopped by Ctrl-C" in rest
    assert "Traceback" not in rest


def await_no_pins(repository: Repository) -> None:
    """Wait until nothing is held for those who are gone."""
    deadline = time.monotonic() + LIMIT_S
    while repository.stats().catalog.pins:
        assert time.monotonic() < deadline, "the pins of who is gone stay"
        threading.Event().wait(0.02)
