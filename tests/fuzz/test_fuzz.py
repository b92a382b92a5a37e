"""Every reader of what comes from elsewhere gets hundreds of damaged inputs, and those that ever found something.

Rules
- The seed is fixed. `scripts/soak 8h --fuzz` draws others; its findings come into `found/`, with the fix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.target import FOUND
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SEED = 1
LIGHT = [target.name for target in TARGETS if not target.heavy and not target.slow]
SLOW = [target.name for target in TARGETS if target.slow]
HEAVY = [target.name for target in TARGETS if target.heavy]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("names", "count"), [(LIGHT, 300), (SLOW, 100), (HEAVY, 20)], ids=["light", "slow", "heavy"])
def test_readers_take_whatever_comes(names: list[str], count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seed", str(SEED), "--count", str(count), "--target", *names]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-5000:]
    done = dict(re.findall(r"^(\S+): (\d+) inputs", found.stdout, re.MULTILINE))
    assert done == dict.fromkeys(names, str(count))


def test_what_was_found_is_of_a_target() -> None:
    names = tuple(f"{target.name}-" for target in TARGETS)
    assert [path.name for path in FOUND.iterdir() if not path.name.startswith(names)] == ["README.md"]
