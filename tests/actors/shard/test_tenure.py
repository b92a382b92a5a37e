"""A shard's lease: who may answer, and when (`actors.shard.tenure`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from typing import Any

import pytest
from tensorvine.actors.memory.memory import MemoryView, SharedMemory
from tensorvine.actors.rpc.registry import Registry
from tensorvine.actors.shard import tenure as tenure_module
from tensorvine.actors.shard.tenure import LapsedError, Tenure
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
    monkeypatch.setattr(tenure_module, "RENEW_S", 0.02)


@pytest.fixture
def head() -> Head:
    return Head()


def entered(head: Any, node: str = "here", shows: list[float] | None = None) -> Tenure:
    shown = shows if shows is not None else []
    return Tenure(Registry(head, "models", "start"), "shard 3", node, shown.append)


class TestOneIncarnation:
    def test_holds_and_says_until_when(self, head: Head) -> None:
        shows: list[float] = []
        before = time.monotonic()
        tenure = entered(head, shows=shows)
        assert tenure.holds
        tenure.check()
        asyncio.run(tenure.held(Deadline.after(0.0)))
        assert shows[0] >= before + tenure_module.LEASE_S
        eventually(lambda: len(shows) > 3, "three renewals")
        assert shows == sorted(shows)

    def test_lapses_without_the_head_and_goes_on_with_it(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenure_module, "LEASE_S", 0.2)
        tenure = entered(head)
        head.cut = True
        eventually(lambda: not tenure.holds, "the lease is over")
        with pytest.raises(ShardUnavailableError, match=r"shard 3: expected the head .* the head does not answer"):
            tenure.check()
        with pytest.raises(OperationTimeoutError, match="the head does not answer"):
            asyncio.run(tenure.held(Deadline.after(0.1)))
        head.cut = False
        asyncio.run(tenure.held(Deadline.after(60.0)))

    def test_a_thread_waits_for_the_next_lease(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenure_module, "LEASE_S", 0.2)
        tenure = entered(head)
        tenure.wait(Deadline.after(0.0))
        head.cut = True
        eventually(lambda: not tenure.holds, "the lease is over")
        tenure.check_running()
        with pytest.raises(OperationTimeoutError, match="the head does not answer"):
            tenure.wait(Deadline.after(0.1))
        head.cut = False
        tenure.wait(Deadline.after(60.0))
        tenure.end()
        with pytest.raises(ShardUnavailableError, match="the actor was stopped"):
            tenure.wait(NEVER)
        with pytest.raises(ShardUnavailableError, match="the actor was stopped"):
            tenure.check_running()

    def test_what_others_wait_for_ends_with_the_lease(self, head: Head) -> None:
        tenure, ended = entered(head), list[str]()

        async def answer() -> int:
            return 3

        async def wait() -> None:
            tenure.end()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("the wait")

        assert asyncio.run(tenure.during(answer())) == 3
        with pytest.raises(LapsedError, match="the actor was stopped"):
            asyncio.run(tenure.during(wait()))
        assert ended == ["the wait"]

    def test_ends_for_good_also_while_the_head_gives_it_a_lease(self, head: Head) -> None:
        shows: list[float] = []
        tenure = entered(head, shows=shows)
        head.swift.clear()
        renewing = threading.Thread(target=tenure._keep, daemon=True)
        head.asked.clear()
        renewing.start()
        assert head.asked.wait(60.0)
        tenure.end()
        head.swift.set()
        renewing.join(60.0)
        assert shows[-1] == 0.0
        with pytest.raises(ShardUnavailableError, match=r"shard 3: .*; the actor was stopped"):
            asyncio.run(tenure.held(NEVER))

    def test_waits_for_a_head_that_does_not_answer_when_it_starts(self, head: Head) -> None:
        head.cut = True
        made: list[Tenure] = []
        thread = threading.Thread(target=lambda: made.append(entered(head)), daemon=True)
        thread.start()
        assert head.asked.wait(60.0)
        assert not made
        head.cut = False
        thread.join(60.0)
        assert made[0].holds


class TestTheNextIncarnation:
    def test_of_another_node_waits_for_the_former_lease(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenure_module, "LEASE_S", 0.5)
        former = entered(head, "there")
        monkeypatch.setattr(former, "_renew", lambda: None)  # it is cut off
        tenure = entered(head)
        assert not former.holds
        eventually(lambda: tenure.holds, "it has the lease")

    def test_of_the_same_node_waits_for_its_process(self, head: Head) -> None:
        process = subprocess.Popen(["sleep", "600"])  # noqa: S607
        head.facts["models:start:tenure/shard 3"] = f'["here", {process.pid}, ""]'.encode()
        made: list[Tenure] = []
        thread = threading.Thread(target=lambda: made.append(entered(head)), daemon=True)
        thread.start()
        eventually(
            lambda: f'"here", {os.getpid()}' in head.facts["models:start:tenure/shard 3"].decode(),
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
        head.facts["models:start:tenure/shard 3"] = f'["here", {process.pid}, ""]'.encode()
        monkeypatch.setattr(tenure_module, "LEASE_S", 3600.0)
        with contextlib.suppress(ProcessLookupError):  # its id may be another's by now, on a machine that forks much
            os.kill(process.pid, 0)
            pytest.skip("the id of a process that ended is another's")
        assert entered(head).holds

    def test_has_the_former_one_answer_nothing_for_good(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenure_module, "LEASE_S", 0.3)
        former = entered(head, "there")
        entered(head)
        eventually(lambda: not former.holds, "the former one's lease is over")
        with pytest.raises(ShardUnavailableError, match="another process has replaced it"):
            asyncio.run(former.held(NEVER))


class TestReaders:
    def test_see_that_the_lease_is_over(self) -> None:
        memory = SharedMemory(1 << 20)
        view = MemoryView(os.getpid(), memory.fd, memory.file, 1 << 20)
        memory.publish(7)
        assert view.epoch() is None  # it has none yet
        memory.lease(time.monotonic() + 60.0)
        assert view.epoch() == 7
        memory.lease(time.monotonic())
        assert view.epoch() is None
        assert view.alive
