"""What processes took is kept, however they end."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

from tensorvine.store import waiting

from tests.branches import __main__ as branches
from tests.branches.hook import sitecustomize as hook

PROGRAM = """
import glob, os, signal, sys, time
from tensorvine.store import waiting

if os.fork() == 0:
    waiting.seconds_of(3)
    until = time.monotonic() + 60.0
    while time.monotonic() < until and not glob.glob(f"{sys.argv[1]}/{os.getpid()}-*"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
waiting.Deadline.after(1.0)
os._exit(0)
"""


def test_of_a_killed_child_and_its_parent(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(hook.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, hook.FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, check=True, timeout=120.0)
    arcs = branches.taken(tmp_path)
    ends = {line for pair in arcs[waiting.__file__] for line in branches.unpacked(pair)}
    for function in (waiting.seconds_of, waiting.Deadline.after.__func__):
        lines, first = inspect.getsourcelines(function)
        assert ends & set(range(first + len(lines) - 2, first + len(lines)))
    lines, first = inspect.getsourcelines(waiting.Deadline.left)
    assert first + len(lines) - 1 not in ends
    assert branches.reported(arcs)["totals"]["covered_branches"] > 0
