"""The token of this user's Rays: where it is, who may read it, and that it is one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
from ray._private.authentication import authentication_token_setup
from tensorvine.actors.engine.ray import auth_token, control_service
from tensorvine.actors.engine.warned import warn_once
from tensorvine.store.errors import StorageError

ENABLED = """
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode
from tensorvine.actors.engine.ray import auth_token
before = get_authentication_mode() == AuthenticationMode.TOKEN
auth_token.guard()
after = get_authentication_mode() == AuthenticationMode.TOKEN
print(before, after, AuthenticationTokenLoader.instance().get_raw_token())
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a token, of a process that is told of none. Ray's core is not told: it may run in this process."""
    warn_once.cache_clear()
    monkeypatch.setattr(
        authentication_token_setup, "_enable_token_auth", lambda: os.environ.update(RAY_AUTH_MODE="token")
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (auth_token.MODE, auth_token.TOKEN, auth_token.PATH):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return tmp_path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_token_is_made_for_this_user_alone(home: Path) -> None:
    auth_token.guard()
    path = home / ".ray" / "auth_token"
    assert auth_token.presented()
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert len(path.read_text()) == 64
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_token_that_is_there_is_kept_and_taken_from_other_users(home: Path) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("mine\n")
    path.chmod(0o644)
    auth_token.guard()
    assert (path.read_text(), mode(path)) == ("mine\n", 0o600)


def test_a_token_of_the_environment_is_enough(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(auth_token.TOKEN, "mine")
    auth_token.guard()
    assert auth_token.presented()
    assert not (home / ".ray").exists()


def test_the_file_that_the_user_names_is_made_and_its_mode_is_the_users(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = home / "elsewhere" / "token"
    monkeypatch.setenv(auth_token.PATH, str(path))
    auth_token.guard()
    assert mode(path) == 0o600
    path.chmod(0o640)
    auth_token.guard()
    assert caplog.messages == []
    path.chmod(0o644)
    auth_token.guard()
    auth_token.guard()
    assert mode(path) == 0o644
    (warning,) = caplog.messages
    assert f"{path}: every user of this machine can read this token" in warning


def test_all_who_make_it_at_once_get_one_token(home: Path) -> None:
    path, count = home / ".ray" / "auth_token", 8
    together, found = threading.Barrier(count), set[str]()

    def start() -> None:
        together.wait(60.0)
        auth_token._ensure(path)
        found.add(path.read_text())

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found == {path.read_text()}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("written", ["", " \n"])
def test_a_file_without_a_token_is_said(home: Path, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_token, "WRITTEN_S", 0.05)
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text(written)
    with pytest.raises(StorageError, match=f"{path}.*empty"):
        auth_token.guard()


def test_a_file_that_is_written_meanwhile_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_token, "WRITTEN_S", 60.0)
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("")
    writer = threading.Timer(0.05, lambda: path.write_text("late"))
    writer.start()
    auth_token.guard()
    writer.join(60.0)
    assert path.read_text() == "late"


def test_a_home_that_takes_no_file_is_said_with_what_helps(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("HOME", str(home / "file"))
    with pytest.raises(StorageError, match=f"{home}/file/.ray/auth_token.*set RAY_AUTH_TOKEN"):
        auth_token.guard()


def test_who_wants_no_token_gets_none_and_is_warned_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(auth_token.MODE, "disabled")
    auth_token.guard()
    auth_token.guard()
    assert not auth_token.presented()
    assert not (home / ".ray").exists()
    (warning,) = caplog.messages
    assert "RAY_AUTH_MODE=disabled" in warning
    assert "run code as the user who started it" in warning


def test_only_a_token_that_is_there_is_offered_and_only_where_nothing_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth_token.offer()
    assert not auth_token.presented()
    path = home / ".ray" / "auth_token"
    auth_token._ensure(path)
    monkeypatch.setenv(auth_token.MODE, "disabled")
    auth_token.offer()
    assert not auth_token.presented()
    monkeypatch.delenv(auth_token.MODE)
    auth_token.offer()
    assert auth_token.presented()


def test_rays_core_is_told_and_reads_the_same_token(tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    done = subprocess.run(
        [sys.executable, "-c", ENABLED],
        env={**without, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", (tmp_path / ".ray" / "auth_token").read_text()]


def test_an_embedded_ray_asks_for_it(cluster: object) -> None:
    assert control_service.asks_for_token(ray.get_runtime_context().gcs_address) is True
