"""`tensorvine web`: the command from its start to its end, and wrong usage."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
import ray
from tensorvine.actors import Repository
from tensorvine.clusters.cli.web import TOKEN

from tests.support.commands import on

SECRET = "a-token-from-a-file"  # noqa: S105
PATIENCE_S = 120.0


def test_it_serves_until_it_is_interrupted(repository: Repository, tmp_path: Path) -> None:
    repository.save("m", {"w": np.zeros(4)})
    (tmp_path / "token").write_text(f"{SECRET}\n")
    command = [str(Path(sys.executable).parent / "tensorvine"), "web", "--port", "0", "--name", repository.name]
    command += ["--address", ray.get_runtime_context().gcs_address, "--token", f"@{tmp_path / 'token'}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", TOKEN)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            assert SECRET not in url
            asked = Request(f"{url}api/versions", headers={"Authorization": f"Bearer {SECRET}"})  # noqa: S310
            with urlopen(asked, timeout=PATIENCE_S) as answer:  # noqa: S310
                assert b'"m@1"' in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("token", ["short", "@/does/not/exist"])
def test_a_token_that_is_none_is_said(repository: Repository, token: str) -> None:
    code, out, err = on(repository, "web", "--port", "0", "--token", token)
    assert (code, out) == (1, "")
    assert "token" in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_said(repository: Repository) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = on(repository, "web", "--port", str(taken.getsockname()[1]))
    assert (code, out) == (1, "")
    assert "cannot listen at 127.0.0.1" in err


def test_without_its_extra_it_says_what_to_install(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorvine.clusters.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sse_starlette", None)
    code, _, err = on(repository, "web")
    assert code == 1
    assert "[web]" in err
