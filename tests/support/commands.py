"""Commands of `tensorvine` in this process: their exit codes, and what they printed."""

from __future__ import annotations

import contextlib
import io

import pytest
import ray
from tensorvine.actors import Repository
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.clusters.cli.main import main


def run(*words: str) -> tuple[int, str, str]:
    """Run a command; give its exit code, and what it wrote to standard output and error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0, out.getvalue(), err.getvalue()


def on(repository: Repository, *words: str) -> tuple[int, str, str]:
    """Run a command on a repository of this process's Ray, which it leaves alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayEngine, "leave", lambda _: None)
        return run(*words, "--name", repository.name, "--address", ray.get_runtime_context().gcs_address)
