"""How workers find their machine's agent although other users of the machine try to prevent it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client
from tensorvine.actors.engine.dask.clients import engine_of
from tensorvine.actors.engine.dask.workers import agentfile, plugins
from tensorvine.actors.engine.dask.workers.agentfile import AgentFile, agent_file
from tensorvine.store.errors import ShardUnavailableError

from tests.support.dask_cluster import local_cluster
from tests.support.other_user import OTHER, as_other_user, needs_root

SQUATTER = """
name, = arguments
with socket.socket(socket.AF_UNIX) as taken:
    taken.bind(chr(0) + name)
    taken.listen()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> AgentFile:
    return AgentFile(tmp_path / "agent")


class TestFile:
    """One file."""

    def test_it_has_the_name_that_was_written_last(self, file: AgentFile) -> None:
        assert file.read() == ""
        file.write("a-long-name")
        file.write("name")
        assert file.read() == "name"

    def test_only_one_process_at_a_time_starts_an_agent(self, file: AgentFile) -> None:
        with file.locked() as first, file.locked() as second:
            assert (first, second) == (True, False)
        with file.locked() as third:
            assert third

    def test_an_agent_deletes_the_file_only_if_it_has_its_name_and_no_other_is_being_started(
        self, file: AgentFile
    ) -> None:
        file.write("one")
        file.delete("another")
        with file.locked():
            file.delete("one")
        assert file.path.exists()
        file.delete("one")
        assert not file.path.exists()

    def test_a_lock_of_a_file_that_was_deleted_meanwhile_is_none(
        self, file: AgentFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock = agentfile.fcntl.flock

        def deleted(descriptor: int, how: int) -> None:
            file.path.unlink()
            lock(descriptor, how)

        monkeypatch.setattr(agentfile.fcntl, "flock", deleted)
        with file.locked() as mine:
            assert not mine

    @needs_root
    def test_a_file_of_another_user_is_refused_by_path_and_owner(self, file: AgentFile) -> None:
        file.write("name")
        os.chown(file.path, OTHER, OTHER)
        with pytest.raises(PermissionError, match=rf"{file.path}: .* found one of user {OTHER} with mode 0600"):
            file.read()

    def test_a_file_that_others_can_write_is_refused(self, file: AgentFile) -> None:
        file.write("name")
        file.path.chmod(0o666)
        with pytest.raises(PermissionError, match="with mode 0666: delete it"):
            file.read()

    def test_a_link_or_a_fifo_in_its_place_is_refused(self, file: AgentFile, tmp_path: Path) -> None:
        file.path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="symbolic link"):
            file.write("name")
        file.path.unlink()
        os.mkfifo(file.path, 0o600)
        with pytest.raises(PermissionError):
            file.read()
        assert not (tmp_path / "elsewhere").exists()

    @needs_root
    def test_other_users_can_neither_read_nor_replace_it(self) -> None:
        file = agent_file("of-a-test")
        try:
            file.write("name")
            code = "print([tried(lambda: os.open(arguments[0], how)) for how in (os.O_RDONLY, os.O_WRONLY)],\
                tried(lambda: os.unlink(arguments[0])))"
            assert as_other_user(code, str(file.path)) == "['EACCES', 'EACCES'] EACCES"
        finally:
            file.path.unlink()

    def test_without_a_home_directory_it_lies_in_the_temporary_one(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def unknown(user: int) -> None:
            raise KeyError(user)

        monkeypatch.setattr(agentfile.pwd, "getpwuid", unknown)
        monkeypatch.setattr(agentfile.tempfile, "tempdir", str(tmp_path))
        assert agent_file("x").path == tmp_path / f"tensorvine-{os.geteuid()}-agent-x"


@pytest.fixture
def taken() -> Iterator[str]:
    """The name of a socket that another user listens on."""
    name = f"tensorvine-test-{os.getpid()}"
    become = f"import os, socket, sys; os.setgid({OTHER}); os.setuid({OTHER}); arguments = sys.argv[1:]\n"
    command = [sys.executable, "-I", "-S", "-c", become + SQUATTER, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield name


@pytest.mark.own_cluster
class TestClusters:
    """A cluster of Dask."""

    @needs_root
    def test_a_name_that_another_user_took_after_its_agent_ended_keeps_no_agent_from_starting(
        self, file: AgentFile, taken: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugins, "agent_file", lambda _: file)
        file.write(taken)
        with local_cluster(1) as cluster, Client(cluster) as client:
            engine = engine_of(client)
            assert len(engine.nodes()) == 1
            assert file.read() != taken
            engine.close()

    def test_where_no_agent_can_start_the_error_says_why_and_again_for_the_next_client(
        self, file: AgentFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugins, "agent_file", lambda _: file)
        file.write("")
        file.path.chmod(0o666)
        with local_cluster(1) as cluster:
            for _ in range(2):
                with Client(cluster) as client, pytest.raises(ShardUnavailableError) as caught:
                    engine_of(client)
                assert f"{socket.gethostname()}: {file.path}: expected a file of user" in str(caught.value)
