"""A Ray and a repository that `tensorvine up` started outlive the command, and answer only who has their token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import folder_of_a_ray, of_ray_in

WAIT_S = 200.0
SAVE = """
import numpy as np
from tensorvine.actors import Repository
with Repository.connect() as repo:
    repo.save("m", {"w": np.ones(500, np.float32), "v": np.ones(3, np.float32)}, quality=0.5)
    repo.save("m", {"w": np.ones(500, np.float32), "v": np.zeros(3, np.float32)}, quality=0.75)
    print(repo.verify())
"""
INTRUDE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_put(b"k", b"v", True, b"ns", timeout=20)
    print("let in")
except AuthenticationError:
    print("refused")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_of_a_ray() as made:
        yield made


@pytest.mark.own_cluster
@pytest.mark.timeout(400)
def test_a_repository_and_its_ray_outlive_the_command_that_started_them(folder: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment = {**kept, "RAY_TMPDIR": str(folder), "RAY_raylet_start_wait_time_s": "120"}
        environment |= {"RAY_enable_metrics_collection": "0", "RAY_prestart_worker_first_driver": "0", **home}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=WAIT_S)

    def tensorvine(*words: str) -> tuple[int, str]:
        done = run(sys.executable, "-c", "from tensorvine.clusters.cli.main import main; main()", *words)
        return done.returncode, done.stdout + done.stderr if done.returncode else done.stdout

    home = {"HOME": str(folder)}
    code, said = tensorvine("up", "--port", "0", "--shards", "2", "--path", str(folder / "models"))
    assert code == 0, said
    assert "Repository default is up" in said
    address = (folder / "ray" / "ray_current_cluster").read_text()
    assert (folder / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    home = {"HOME": str(folder / "nobody")}
    intruder = run(sys.executable, "-c", INTRUDE, address)
    assert (intruder.returncode, intruder.stdout) == (0, "refused\n"), intruder.stderr
    code, said = tensorvine("ls", "--address", address)
    assert code == 1
    assert "requires a token, and this process presents none" in said
    home = {"HOME": str(folder)}
    saved = run(sys.executable, "-c", SAVE)
    assert (saved.returncode, saved.stdout) == (0, "[]\n"), saved.stderr
    code, said = tensorvine("ls", "--json")
    assert [row["ref"] for row in json.loads(said)] == ["m@1", "m@2"]
    code, said = tensorvine("down")
    assert (code, said) == (0, "Repository default is down\nRay is down\n")
    assert not psutil.wait_procs(of_ray_in(folder), timeout=90)[1]
    code, said = tensorvine("down")
    assert code == 1
    assert said.startswith("tensorvine: expected a Ray")
    assert len(list((folder / "models" / "manifests").glob("m@*"))) == 2
