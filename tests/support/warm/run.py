"""`python -m tests.support.warm.run MODULES FILE ARGUMENTS`: run a program as `python FILE ARGUMENTS` would; the Rays
that it starts fork their workers, which have these modules (`torch,matplotlib`; `-`: none), and go without agents."""

from __future__ import annotations

import os
import runpy
import sys

from tests.support.warm import warm_workers


def main(modules: str, file: str, *arguments: str) -> None:
    """Run a program."""
    sys.argv = [file, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    with warm_workers(modules.split(",") if modules != "-" else ()):
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
