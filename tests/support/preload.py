"""Libraries that tests build with the machine's C compiler, and put before the system's in processes of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BUILD_S = 120.0


def compiler() -> str | None:
    """Find a C compiler."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def preloaded(source: Path, folder: Path) -> dict[str, str]:
    """Build a library into a folder; give the environment of processes, and of workers of Ray, that have it.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    library = folder / source.with_suffix(".so").name
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_S)
    return {"LD_PRELOAD": str(library), "RAY_LD_PRELOAD_ON_WORKERS": "1"}
