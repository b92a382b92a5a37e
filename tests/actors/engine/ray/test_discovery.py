"""Which Rays on this machine are believed to be this user's. Other users are real: processes and files of theirs."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from tensorvine.actors.engine.ray import discovery, embedded
from tensorvine.actors.engine.warned import warn_once
from tensorvine.store.errors import RepositoryNotFoundError

from tests.support.control_service import listener_of

OTHER = 65534
"""Another user."""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

Raylet = Callable[[str, int], None]


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Raylet]:
    """Start a process that looks like a raylet at an address, of a user; no other on this machine is seen."""
    started: list[subprocess.Popen[bytes]] = []
    process_iter = psutil.process_iter

    def start(address: str, user: int) -> None:
        words = ["raylet", "-c", "echo; read _", f"--gcs-address={address}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(words, executable="/bin/sh", user=user, **pipes)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()

    def only_these(facts: list[str]) -> Iterator[psutil.Process]:
        mine = {process.pid for process in started}
        return (process for process in process_iter(facts) if process.pid in mine)

    monkeypatch.setattr(psutil, "process_iter", only_these)
    yield start
    for process in started:
        process.communicate(timeout=60.0)


@pytest.fixture
def file(raylet: Raylet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `ray start` writes an address; this process is in no Ray."""
    warn_once.cache_clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def here() -> Iterator[str]:
    """The address of a process of this user that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def theirs() -> Iterator[str]:
    """The address of a process of another user that listens."""
    with listener_of(OTHER) as address:
        yield address


class TestFile:
    def test_what_this_user_wrote_is_believed(self, file: Path, here: str) -> None:
        file.write_text(f"{here}\n")
        assert embedded.running() == here

    def test_without_one_there_is_none(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert embedded.running() is None
        assert caplog.messages == []

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda file: os.chown(file, OTHER, OTHER), f"belongs to user {OTHER}"),
            (lambda file: file.chmod(0o666), "every user may write"),
            (lambda file: as_link(file), "symbolic links"),
            (lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
            (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),
            (lambda file: file.write_text("nonsense"), "HOST:PORT"),
        ],
        ids=["another-users", "open-to-all", "a-link", "a-pipe", "a-folder", "nonsense"],
    )
    def test_what_others_may_have_written_is_not_joined_and_warned_of_once(
        self, file: Path, here: str, spoil: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file.write_text(here)
        spoil(file)
        assert embedded.running() is None
        assert embedded.running() is None
        (warning,) = caplog.messages
        assert str(file) in warning
        assert reason in warning
        with pytest.raises(RepositoryNotFoundError, match="is not joined"):
            embedded.attach()

    def test_one_whose_listener_is_another_users_is_not_joined(
        self, file: Path, theirs: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file.write_text(theirs)
        assert embedded.running() is None
        assert f"the listener at {theirs} belongs to user {OTHER}" in caplog.text
        with pytest.raises(RepositoryNotFoundError, match=f"belongs to user {OTHER}"):
            embedded.attach()

    def test_one_that_is_gone_is_warned_of(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        file.write_text(gone := nobody())
        assert embedded.running() is None
        assert f"no server answers at {gone}" in caplog.text

    def test_only_what_names_a_ray_that_ended_is_forgotten(self, file: Path, here: str) -> None:
        file.write_text(here)
        discovery.forget_ended()
        assert file.exists()
        file.write_text(nobody())
        discovery.forget_ended()
        assert not file.exists()
        discovery.forget_ended()

    def test_roots_is_believed_by_other_users(self, file: Path, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
        file.write_text(here)
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
        assert embedded.running() == here


class TestRaylets:
    def test_one_of_this_user_is_found_but_by_running(self, file: Path, raylet: Raylet, here: str) -> None:
        raylet(here, os.geteuid())
        assert discovery.find(embedded=True) == here
        assert embedded.running() is None

    def test_one_of_another_user_is_not_joined(
        self, file: Path, raylet: Raylet, here: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        raylet(here, OTHER)
        with pytest.raises(RepositoryNotFoundError, match=f"its raylet belongs to user {OTHER}"):
            embedded.attach()
        assert len(caplog.messages) == 1

    def test_one_of_this_user_is_found_beside_those_of_others(
        self, file: Path, raylet: Raylet, here: str, theirs: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        raylet(theirs, OTHER)
        raylet(here, os.geteuid())
        assert discovery.find(embedded=True) == here
        assert caplog.messages == []

    def test_a_file_of_another_user_does_not_hide_this_users(
        self, file: Path, raylet: Raylet, here: str, theirs: str
    ) -> None:
        file.write_text(theirs)
        os.chown(file, OTHER, OTHER)
        raylet(here, os.geteuid())
        assert discovery.find(embedded=True) == here

    def test_a_head_on_another_machine_is_believed_where_a_raylet_of_this_user_is_its(
        self, file: Path, raylet: Raylet
    ) -> None:
        head = "203.0.113.7:6379"  # of documentation (RFC 5737): nobody's
        reason = discovery.doubt(head)
        assert reason is not None
        assert "another machine" in reason
        raylet(head, OTHER)
        assert discovery.doubt(head) == reason
        raylet(head, os.geteuid())
        assert discovery.doubt(head) is None


class TestListeners:
    @pytest.mark.parametrize(
        ("bound", "asked"),
        [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("127.0.0.1", "localhost")],  # noqa: S104
    )
    def test_a_listener_is_found_whatever_it_is_bound_to(self, bound: str, asked: str) -> None:
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        both = bound == "::"
        with socket.create_server((bound, 0), family=family, dualstack_ipv6=both) as server:
            address = f"{asked}:{server.getsockname()[1]}"
            assert discovery.doubt(address) is None
            os.fchown(server.fileno(), OTHER, -1)
            assert f"belongs to user {OTHER}" in str(discovery.doubt(address))

    def test_nobody_is_doubted(self) -> None:
        assert "no process listens" in str(discovery.doubt(nobody()))

    def test_who_listens_at_another_address_of_this_machine_does_not_count(self, theirs: str) -> None:
        port = int(theirs.rpartition(":")[2])
        with socket.create_server(("127.0.0.2", port)):
            assert discovery.doubt(f"127.0.0.2:{port}") is None
            assert discovery.doubt(theirs) is not None


def as_link(file: Path) -> None:
    """Put the file elsewhere, and a link to it in its place."""
    elsewhere = file.rename(file.with_name("elsewhere"))
    file.symlink_to(elsewhere)


def nobody() -> str:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
