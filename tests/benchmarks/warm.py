"""`python -m tests.benchmarks.warm MODULE ...`: run a module whose Rays, and its helpers' Rays, fork their workers."""

from __future__ import annotations

import runpy
import sys

from benchmarks.core import fleet
from tests.support.warm import warm_workers

if __name__ == "__main__":
    fleet.PROGRAM = (sys.executable, "-m", "tests.benchmarks.warm", fleet.__name__)
    sys.argv.pop(0)
    with warm_workers():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
