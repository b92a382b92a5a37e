"""The clients that a shard watches by their processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tensorvine.actors.memory.process import ProcessId, pid_namespace, this_process
from tensorvine.actors.shard.local_clients import LocalClients

from tests.support.waiting import eventually


def test_a_client_is_watched_until_its_process_ends() -> None:
    clients = LocalClients()
    clients.watch("stays", this_process())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        clients.watch("ends", ProcessId(pid_namespace(), process.pid))
        assert clients.died() == []
        process.kill()
    eventually(lambda: clients.died() == ["ends"], "the shard to see that the client ended")
    clients.drop("ends")
    clients.drop("stays")
    assert clients.died() == []


def test_a_client_of_another_namespace_of_process_ids_is_not_watched(caplog: pytest.LogCaptureFixture) -> None:
    """Its number means another process here, which may run on when the client has died, or end while it runs."""
    clients = LocalClients()
    clients.watch("elsewhere", ProcessId((0, 1), this_process().pid))
    assert not clients.watches("elsewhere")
    assert "client elsewhere cannot be watched, so it cannot write to shared memory: its process" in caplog.text
