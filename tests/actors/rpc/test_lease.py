"""The lease of an actor's process: who may decide, and when (`actors.rpc.lease`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from typing import Any

import pytest
from tensorvine.actors.memory.counters import CounterPage, CounterView
from tensorvine.actors.rpc import lease as lease_module
from tensorvine.actors.rpc.lease import Lease
from tensorvine.actors.rpc.registry import Registry
from tensorvine.store.errors import OperationTimeoutError, ShardUnavailableError
from tensorvine.store.waiting import NEVER, Deadline

from tests.support.waiting import eventually


class Head:
    """Keeps facts as the head of a cluster does, unless it is cut off."""

    def __init__(self) -> None:
        self.facts: dict[str, bytes] = {}
        self.cut = False
        self.asked = threading.Event()
        self.swift = threading.Event()
        """Set while it answers at once."""
        self.swift.set()

    def keep(self, name: str, value: bytes | None) -> None:
        self._reach()
        if value is None:
            self.facts.pop(name, None)
        else:
            self.facts[name] = value

    def keep_absent(self, name: str, value: bytes) -> bool:
        self._reach()
        return self.facts.setdefault(name, value) is value

    def kept(self, prefix: str) -> dict[str, bytes]:
        self._reach()
        return {name: value for name, value in self.facts.items() if name.startswith(prefix)}

    def _reach(self) -> None:
        self.asked.set()
        self.swift.wait(60.0)
        if self.cut:
            raise ShardUnavailableError("the head is not reached")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_S", 0.02)


@pytest.fixture
def head() -> Head:
    return Head()


def entered(head: Any, node: str = "here", shows: list[float] | None = None) -> Lease:
    shown = shows if shows is not None else []
    return Lease(Registry(head, "models", "start"), "shard-3", node, shown.append)


class TestOneIncarnation:
    def test_holds_and_says_until_when(self, head: Head) -> None:
        shows: list[float] = []
        before = time.monotonic()
        lease = entered(head, shows=shows)
        assert lease.holds
        lease.check()
        asyncio.run(lease.held(Deadline.after(0.0)))
        assert shows[0] >= before + lease_module.LEASE_S
        eventually(lambda: len(shows) > 3, "three renewals")
        assert shows == sorted(shows)

    def test_lapses_without_the_head_and_goes_on_with_it(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.2)
        lease = entered(head)
        head.cut = True
        eventually(lambda: not lease.holds, "the lease is over")
        with pytest.raises(ShardUnavailableError, match=r"shard-3: expected the head .* the head does not answer"):
            lease.check()
        with pytest.raises(OperationTimeoutError, match="the head does not answer"):
            asyncio.run(lease.held(Deadline.after(0.1)))
        head.cut = False
        asyncio.run(lease.held(Deadline.after(60.0)))

    def test_a_thread_waits_for_the_next_lease(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.2)
        lease = entered(head)
        lease.wait(Deadline.after(0.0))
        head.cut = True
        eventually(lambda: not lease.holds, "the lease is over")
        lease.check_running()
        with pytest.raises(OperationTimeoutError, match="the head does not answer"):
            lease.wait(Deadline.after(0.1))
        head.cut = False
        lease.wait(Deadline.after(60.0))
        lease.end()
        with pytest.raises(ShardUnavailableError, match="the actor was stopped"):
            lease.wait(NEVER)
        with pytest.raises(ShardUnavailableError, match="the actor was stopped"):
            lease.check_running()

    def test_ends_for_good_also_while_the_head_gives_it_a_lease(self, head: Head) -> None:
        shows: list[float] = []
        lease = entered(head, shows=shows)
        head.swift.clear()
        renewing = threading.Thread(target=lease._keep, daemon=True)
        head.asked.clear()
        renewing.start()
        assert head.asked.wait(60.0)
        lease.end()
        head.swift.set()
        renewing.join(60.0)
        assert shows[-1] == 0.0
        with pytest.raises(ShardUnavailableError, match=r"shard-3: .*; the actor was stopped"):
            asyncio.run(lease.held(NEVER))

    def test_waits_for_a_head_that_does_not_answer_when_it_starts(self, head: Head) -> None:
        head.cut = True
        made: list[Lease] = []
        thread = threading.Thread(target=lambda: made.append(entered(head)), daemon=True)
        thread.start()
        assert head.asked.wait(60.0)
        assert not made
        head.cut = False
        thread.join(60.0)
        assert made[0].holds


class TestTheNextIncarnation:
    def test_of_another_node_waits_for_the_former_lease(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.5)
        former = entered(head, "there")
        monkeypatch.setattr(former, "_renew", lambda: None)  # it is cut off
        lease = entered(head)
        assert not former.holds
        eventually(lambda: lease.holds, "it has the lease")

    def test_of_the_same_node_waits_for_its_process(self, head: Head) -> None:
        process = subprocess.Popen(["sleep", "600"])  # noqa: S607
        head.facts["models:start:lease/shard-3/1"] = f'["here", {process.pid}, "", ""]'.encode()
        made: list[Lease] = []
        thread = threading.Thread(target=lambda: made.append(entered(head)), daemon=True)
        thread.start()
        eventually(
            lambda: f'"here", {os.getpid()}' in head.facts.get("models:start:lease/shard-3/2", b"").decode(),
            "the next incarnation is entered",
        )
        assert not made
        process.kill()
        process.wait(60.0)
        thread.join(60.0)
        assert made[0].holds

    def test_does_not_wait_where_that_has_ended(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        with subprocess.Popen(["true"]) as process:  # noqa: S607
            process.wait(60.0)
        head.facts["models:start:lease/shard-3/1"] = f'["here", {process.pid}, "", ""]'.encode()
        monkeypatch.setattr(lease_module, "LEASE_S", 3600.0)
        with contextlib.suppress(ProcessLookupError):  # its id may be another's by now, on a machine that forks much
            os.kill(process.pid, 0)
            pytest.skip("the id of a process that ended is another's")
        assert entered(head).holds

    def test_has_the_former_one_answer_nothing_for_good(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.3)
        former = entered(head, "there")
        entered(head)
        eventually(lambda: not former.holds, "the former one's lease is over")
        with pytest.raises(ShardUnavailableError, match="another process has replaced it"):
            asyncio.run(former.held(NEVER))

    def test_reads_what_the_former_ones_said(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "LEASE_S", 0.5)
        former = entered(head)
        former.say("a place")
        lease = entered(head)
        assert (lease.number, lease.before) == (2, {1: "a place"})
        lease.forget_earlier()
        assert entered(head).before == {2: ""}


class TestReaders:
    def test_see_that_the_lease_is_over(self) -> None:
        page = CounterPage(7)
        view = CounterView(os.getpid(), page.fd, page.file)
        assert view.value_of("m") is None  # it has none yet
        page.lease(time.monotonic() + 60.0)
        assert view.value_of("m") == 7
        page.lease(time.monotonic())
        assert view.value_of("m") is None
