"""What README.md and docs/api.md show is what their code prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"```python\n(?P<code>(?:(?!```).)*)```\n+(?:It prints\n+)?```\n(?P<prints>.*?)```", re.DOTALL)
MARK = "----- next -----"
RUN = f"""
import sys
from tensorvine.clusters import LocalCluster
with LocalCluster(object_store_bytes=256 << 20, cpus=2):
    for block in sys.stdin.read().split({MARK!r}):
        exec(compile(block, "page", "exec"), {{"__name__": "__main__"}})
        print({MARK!r}, flush=True)
"""


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("docs/api.md", 2)])
def test_each_example_prints_what_the_page_says(page: str, least: int) -> None:
    shown = [(found["code"], found["prints"]) for found in SHOWN.finditer((ROOT / page).read_text())]
    assert len(shown) >= least
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        input=MARK.join(code for code, _ in shown),
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = ended.stdout.split(f"{MARK}\n")[:-1]
    assert [block.strip() for block in printed] == [prints.strip() for _, prints in shown]
