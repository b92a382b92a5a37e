"""Starts repositories where the package zstandard cannot be imported, and says what happens, as JSON.

    python -m tests.support.without_zstandard PATH RUNNING

It opens the history at PATH, and tries to start a second repository at RUNNING.

Rules
- The workers of Ray are other processes: what forks them gets a `sitecustomize` that hides the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODULE = "tests.support.without_zstandard"
HOOK = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "zstandard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def outcome(work: Callable[[], object]) -> list[str]:
    from tensorvine.store.errors import StorageError

    try:
        work()
    except (ImportError, StorageError) as exc:
        return [type(exc).__name__, str(exc)]
    return ["", ""]


def main() -> None:
    """See the top."""
    from tensorvine.actors import Repository
    from tensorvine.clusters import LocalCluster
    from tensorvine.store import Zstd

    from tests.support.warm import warm_workers

    path, running = sys.argv[1:]
    options = {"shards": 1, "path": path, "store_bytes": 64 << 20, "preallocate_bytes": 0}
    with warm_workers(), LocalCluster(object_store_bytes=128 << 20, cpus=2):
        said: dict[str, object] = {"start": outcome(lambda: Repository.start("with", codec=Zstd(), **options))}
        said["second"] = outcome(lambda: Repository.start("second", **{**options, "path": running}))
        with Repository.start("without", **options) as repo:
            said["load"] = outcome(lambda: repo.load("m"))
            said["noise"] = repo.load("noise")["a"].nbytes
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    if "HIDDEN" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(HOOK)
            found = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
            hidden = {**os.environ, "PYTHONPATH": found, "HIDDEN": "1"}
            code = subprocess.run([sys.executable, "-m", MODULE, *sys.argv[1:]], env=hidden, check=False).returncode
        sys.exit(code)
