"""What crashes do: a client, a shard or the planner killed at every step of a save, and leases that run out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.client import session as session_module
from tensorvine.actors.client.session import Session
from tensorvine.actors.engine.engine import Engine, Lifetime
from tensorvine.actors.engine.groups import group
from tensorvine.actors.memory.process import ProcessId, pid_namespace
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.messages import Beginning
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.store import Layer, ModelGraph, ModelRef
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    ShardUnavailableError,
    StoreFullError,
    TensorVineError,
)
from tensorvine.store.holders import Save

from tests.support.actors import joining, restart_planner
from tests.support.asking import ask
from tests.support.processes import stand_still
from tests.support.waiting import PROMPT_S, eventually

BIG = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones(12 << 20, np.float32)}


@pytest.fixture
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start(f"fail-{uuid.uuid4().hex[:6]}", shards=2, preallocate_bytes=0) as repository:
        yield repository


def name_at(repo: Repository, shard: int) -> str:
    """Return a name whose home is `shard`."""
    return next(n for i in range(1000) if repo._session.home(n := f"at{shard}-{i}") == shard)


def shard_process(repo: Repository, shard: int) -> psutil.Process:
    return psutil.Process(repo._session.connection(shard).hello.pid)


def kill_shard(repo: Repository, shard: int) -> None:
    process = shard_process(repo, shard)
    process.kill()
    psutil.wait_procs([process], timeout=20)


def deadly(repo: Repository, method: str, monkeypatch: pytest.MonkeyPatch, *, carried_out: bool) -> None:
    """Have shard 0 killed at the next call of `method`, before it takes it, or when it has answered."""
    send, process = Session.send, shard_process(repo, 0)

    def killing(self: Session, shard: int, request: Request[Any]) -> object:
        if request.remote.name != method:
            return send(self, shard, request)
        monkeypatch.setattr(Session, "send", send)
        if not carried_out:
            stand_still(process)
        answer = send(self, shard, request)
        if carried_out:
            answer.result(30)
        process.kill()
        return answer

    monkeypatch.setattr(Session, "send", killing)


def nothing_left(repo: Repository) -> bool:
    try:
        shards = repo.stats().shards
    except ShardUnavailableError:
        return False
    return not any(s.tensors or s.bytes_allocated or s.pins or s.bytes_staged for s in shards)


CLIENT = textwrap.dedent("""
    import os, signal, sys
    import numpy as np
    from tensorvine.actors import Repository
    from tensorvine.actors.client.session import Session

    repository, name, method, when, *stopped = sys.argv[1:]
    repo = Repository.connect(repository, engine=os.environ.get("ENGINE"))
    send, ending = Session.send, signal.SIGTERM if stopped else signal.SIGKILL

    def deadly(self, shard, request):
        if request.remote.name == method and when == "before":
            os.kill(os.getpid(), ending)
        answer = send(self, shard, request)
        if request.remote.name == method:
            if when == "answered":
                answer.result(30)
            os.kill(os.getpid(), ending)
        return answer

    Session.send = deadly
    tensors = {"a": np.arange(100_000, dtype=np.float32), "b": np.ones(12 << 20, np.float32)}
    if stopped == ["closes"]:
        with repo:
            repo.save(name, tensors, parent="parent")
    repo.save(name, tensors, parent="parent")
""")


def killed_program(engine: Engine, *arguments: str) -> None:
    """Run the client as a program that joins the cluster."""
    environment = {**os.environ, **joining(engine)}
    command = [sys.executable, "-c", CLIENT, *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, timeout=100, check=False)
    told = (signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGABRT)  # Ray's handler aborts after 3 s
    ended = told if len(arguments) > 4 else (-signal.SIGKILL,)
    assert child.returncode in ended, child.stderr.decode()[-2000:]


def killed_actor(engine: Engine, *arguments: str) -> None:
    """Run the client in an actor, which starts for less than what a program takes."""

    class Client:
        @group("data")
        async def run(self, program: str, arguments: tuple[str, ...]) -> None:
            import sys
            import threading

            sys.argv = ["client", *arguments]
            threading.Thread(target=exec, args=(program, {})).start()
            await asyncio.sleep(100)

    name = f"client-{uuid.uuid4().hex[:8]}"
    client = engine.spawn(Client, name, {}, lifetime=Lifetime(outlives=False, restarts=False))
    with pytest.raises(ShardUnavailableError, match=name):
        ask(engine, client, "run", CLIENT, arguments, timeout=90, who=name)


WHEN = ("before", "sent", "answered")
STOPPED = [("grant", "answered", "leaves"), ("commit", "before", "leaves"), ("commit", "sent", "closes")]
CELLS = [(phase, when, killed_actor) for phase in ("begin", "grant", "commit") for when in WHEN]


@pytest.mark.both_engines
class TestClientKilledDuringASave:
    """Phase (the call it was at) x event (before it, after sending it, after its answer)."""

    @pytest.mark.parametrize(("phase", "when", "killed"), [*CELLS, ("commit", "sent", killed_program)])
    def test_nothing_visible_and_nothing_leaked(
        self, repo: Repository, phase: str, when: str, killed: Callable[..., None]
    ) -> None:
        repo.save("parent", {"a": BIG["a"]})
        name = name_at(repo, 1)
        killed(repo.engine, repo.name, name, phase, when)
        repo.retire("parent")
        if phase == "commit" and when == "answered":
            assert repo.models() == [ModelRef(name, 1)]
        if phase == "commit" and when != "before":  # a sent commit may or may not have arrived
            eventually(
                lambda: not any(s.pins or s.bytes_staged for s in repo.stats().shards),
                "no pin, nothing staged",
                timeout=PROMPT_S,
            )
            for ref in repo.models():
                assert all(np.array_equal(repo.load(ref)[k], v) for k, v in BIG.items())
                repo.retire(ref)
        eventually(lambda: nothing_left(repo), "nothing left of the save", timeout=PROMPT_S)
        assert repo.models() == []

    @pytest.mark.parametrize(("phase", "when", "closes"), STOPPED)
    def test_a_program_that_is_told_to_end(self, repo: Repository, phase: str, when: str, closes: str) -> None:
        """`ray job stop` sends SIGTERM; Ray has the program's main thread leave then, with its threads at work."""
        repo.save("parent", {"a": BIG["a"]})
        name = name_at(repo, 1)
        killed_program(repo.engine, repo.name, name, phase, when, closes)
        repo.retire("parent")
        eventually(
            lambda: not any(s.pins or s.bytes_staged for s in repo.stats().shards),
            "no pin, nothing staged",
            timeout=PROMPT_S,
        )
        for ref in repo.models():
            assert all(np.array_equal(repo.load(ref)[k], v) for k, v in BIG.items())
            repo.retire(ref)
        eventually(lambda: nothing_left(repo), "nothing left of the save", timeout=PROMPT_S)


@pytest.mark.both_engines
class TestShardKilled:
    def test_what_was_only_in_its_memory_is_lost_by_name_and_versions_go_on(self, repo: Repository) -> None:
        lost, kept = name_at(repo, 0), name_at(repo, 1)
        repo.save(lost, BIG)
        repo.save(lost, {"a": BIG["a"]})
        repo.retire(f"{lost}@1")
        repo.save(kept, BIG)
        kill_shard(repo, 0)
        with pytest.raises(ModelLostError, match=rf"{lost}@2 is lost: it was held only in the memory of shard 0"):
            repo.load(f"{lost}@2")
        with pytest.raises(ModelLostError, match=f"{lost}@2 is lost"):
            repo.load(lost)
        with pytest.raises(ModelNotFoundError, match=f"{lost}@1 was retired"):
            repo.load(f"{lost}@1")
        assert np.array_equal(repo.load(kept)["b"], BIG["b"])
        assert repo.models() == [ModelRef(kept, 1)]
        assert repo.save(lost, BIG).ref == ModelRef(lost, 3)
        assert np.array_equal(repo.load(lost)["a"], BIG["a"])

    def test_a_child_elsewhere_names_what_it_lost(self, repo: Repository) -> None:
        parent, child = name_at(repo, 0), name_at(repo, 1)
        repo.save(parent, BIG)
        ref = repo.save(child, {**BIG, "c": np.ones(3)}, parent=parent).ref
        assert repo.owners(ref)["b"] == ModelRef(parent, 1)
        kill_shard(repo, 0)
        assert repo.load(ref, tensors=["c"])["c"].sum() == 3
        with pytest.raises(ModelLostError, match=rf"{ref} is lost in part: shard 0: expected segment"):
            repo.load(ref)
        assert repo.lineage(ref) == [ref, ModelRef(parent, 1)]
        repo.retire(ref)
        eventually(lambda: nothing_left(repo), "nothing left", timeout=PROMPT_S)

    def test_what_a_dead_home_held_elsewhere_is_freed(self, repo: Repository) -> None:
        parent, child = name_at(repo, 1), name_at(repo, 0)
        repo.save(parent, BIG)
        repo.save(child, BIG, parent=parent)
        kill_shard(repo, 0)
        repo.retire(parent)
        eventually(
            lambda: nothing_left(repo),
            "the dead child's hold on its parent's tensors gone",
            timeout=PROMPT_S,
        )

    @pytest.mark.parametrize("phase", ["begin", "grant", "commit"])
    def test_killed_during_a_save(self, repo: Repository, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
        name = name_at(repo, 0)
        repo.stats()
        deadly(repo, phase, monkeypatch, carried_out=False)
        try:
            saved = repo.save(name, BIG)
        except (ShardUnavailableError, OperationTimeoutError) as exc:
            assert "shard-0" in str(exc) or "session ended" in str(exc)  # noqa: PT017  success is legal too
        else:
            assert np.array_equal(repo.load(saved.ref)["b"], BIG["b"])
            repo.retire(saved.ref)
        eventually(lambda: nothing_left(repo), "nothing left of the failed save", timeout=PROMPT_S)
        again = repo.save(name, BIG)
        assert np.array_equal(repo.load(again.ref)["b"], BIG["b"])

    def test_killed_after_a_commit(self, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        name = name_at(repo, 0)
        repo.stats()
        deadly(repo, "commit", monkeypatch, carried_out=True)
        saved = repo.save(name, BIG)
        with pytest.raises(ModelLostError, match="only in the memory of shard 0"):
            repo.load(saved.ref)
        eventually(lambda: nothing_left(repo), "nothing left of the lost version", timeout=PROMPT_S)
        again = repo.save(name, BIG)
        assert np.array_equal(repo.load(again.ref)["b"], BIG["b"])

    def test_reads_in_flight_fail_by_name_or_succeed_after_the_restart(self, repo: Repository) -> None:
        name = name_at(repo, 0)
        repo.save(name, {"t": np.ones(5)})
        outcomes: list[object] = []

        def ask() -> None:
            try:
                outcomes.append(repo.info(name))
            except TensorVineError as exc:
                outcomes.append(exc)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        process = shard_process(repo, 0)
        stand_still(process)
        for thread in threads:
            thread.start()
        process.kill()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 8
        assert all(isinstance(o, (ModelLostError, ShardUnavailableError)) for o in outcomes), outcomes

    def test_arrays_of_a_dead_shard_stay_readable(self, repo: Repository) -> None:
        name = name_at(repo, 0)
        repo.save(name, BIG)
        held = repo.load(name)
        kill_shard(repo, 0)
        with pytest.raises(ModelLostError):
            repo.load(name)
        assert all(np.array_equal(held[k], v) for k, v in BIG.items())


def test_a_client_that_cuts_the_memory_is_refused_and_the_shard_goes_on(repository: Repository) -> None:
    repository.save("m", {"w": np.ones(1 << 18)})
    hello = repository._session.connection(0).hello
    memory = os.open(f"/proc/{hello.pid}/fd/{hello.memory_fd}", os.O_RDWR)
    try:
        for length in (1 << 40, 0):  # to lengthen it comes first: it does no harm where it is not refused
            with pytest.raises(PermissionError):
                os.ftruncate(memory, length)
    finally:
        os.close(memory)
    repository.save("m", {"w": np.full(1 << 18, 2.0)})
    assert (repository.load("m")["w"] == 2).all()
    assert shard_process(repository, 0).pid == hello.pid


@pytest.mark.both_engines
class TestPlannerKilled:
    def test_its_version_facts_is_rebuilt_from_the_shards(self, repo: Repository) -> None:
        name = name_at(repo, 0)
        repo.save(name, {"t": np.ones(5)})
        restart_planner(repo)

        def saves() -> bool:
            try:
                repo.save(name, {"t": np.ones(6)})
            except ShardUnavailableError:
                return False
            return True

        eventually(saves, "saves go on after the planner's restart")
        newest = repo.info(name).ref
        kill_shard(repo, 0)
        with pytest.raises(ModelLostError, match=f"{name}@{newest.version} is lost"):
            repo.load(name)
        with pytest.raises(ModelLostError, match=f"{name}@1 is lost"):
            repo.load(f"{name}@1")


def test_a_client_that_is_killed_while_it_waits_for_memory_is_granted_none_afterwards(cluster: object) -> None:
    """The question of a dead client is answered when there is room: also one that comes only then."""
    wanted = [40 << 20]
    with Repository.start(f"fail-{uuid.uuid4().hex[:6]}", shards=1, store_bytes=64 << 20, preallocate_bytes=0) as repo:
        session = repo._session
        session.connection(0)
        other = Repository.connect(repo.name)._session
        other.connection(0)
        assert other.call(0, ShardCalls.grant(other.client, Save(other.client, 1), wanted, 60.0))
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            session.call(0, ShardCalls.hello("retired", session.node, ProcessId(pid_namespace(), process.pid)))
            waiting = session.send(0, ShardCalls.grant("retired", Save("retired", 1), wanted, 60.0))
            assert session.call(0, ShardCalls.renew("retired", [])) is not None
            process.kill()
        eventually(
            lambda: session.call(0, ShardCalls.renew("retired", [])) is None,
            "the shard to see that the client is gone",
        )
        other.close()
        with pytest.raises(ShardUnavailableError, match="save retired/s1: expected its client retired to be connected"):
            waiting.result(60.0)
        asked = Beginning(
            client="retired",
            name="m",
            version=None,
            optional=True,
            known=None,
            inherits=True,
            compares=False,
            save=Save("retired", 2),
            sizes=wanted,
            timeout=60.0,
        )
        begun = session.call(0, ShardCalls.begin(asked))
        assert not begun.offsets
        assert not session.call(0, ShardCalls.reserve("retired", Save("retired", 3, ahead=True), [1 << 20]))
        assert nothing_left(repo)


def test_memory_that_waits_for_a_save_goes_to_whoever_waits_for_memory(
    cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that saves no more keeps none from others, however long it lives."""
    monkeypatch.setattr(session_module, "RENEW_S", 0.2)
    options = {"shards": 1, "store_bytes": 64 << 20, "preallocate_bytes": 0}
    with Repository.start("fail-spare", **options) as repo, Repository.connect(repo.name) as idle:
        first = idle.save_async("idle", {"t": np.zeros(16 << 20, np.uint8)}).committed(60)
        eventually(lambda: idle._saves.saver.reserved._waiting is not None, "memory to wait for the next save")
        saved = repo.save("busy", {"t": np.ones(40 << 20, np.uint8)}, timeout=60)
        assert idle._saves.saver.reserved._waiting is None
        assert repo.load(saved.ref)["t"].all()
        idle.save_async("idle", {"t": np.zeros(1 << 20, np.uint8)}).committed(60)
        repo.retire(first.ref)


def test_a_save_that_finds_no_room_in_another_shard_than_its_home_leaves_nothing_there(cluster: object) -> None:
    options = {"shards": 2, "store_bytes": 64 << 20, "preallocate_bytes": 0}
    with Repository.start("fail-away", **options) as repo:
        name, away = name_at(repo, 0), 1
        repo._session.near = lambda home, deadline=0.0: away  # type: ignore[method-assign]  # the shard of this node
        first = repo.save(name, {"t": np.zeros(30 << 20, np.uint8)})
        with pytest.raises(StoreFullError, match="in shard 1"):  # one of the two finds room
            repo.save(name, {f"t{i}": np.ones(24 << 20, np.uint8) for i in range(2)})
        repo.retire(first.ref)
        eventually(lambda: nothing_left(repo), "nothing left of the failed save", timeout=PROMPT_S)


class TestLeases:
    def test_a_pin_whose_match_was_dropped_is_released(self, repo: Repository) -> None:
        graph = ModelGraph([Layer("in", {"class": "Input"}, tensors=["t"])])
        repo.save("m", {"t": np.ones(100_000)}, graph=graph)
        match = repo.longest_prefix(graph)
        assert match is not None
        repo.retire("m")
        assert repo.stats().tensors == 1
        del match
        eventually(lambda: nothing_left(repo), "the pin of the collected match gone")

    def test_a_pin_on_any_shard_outlives_the_session_time_while_its_client_lives(
        self, cluster: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tensorvine.actors.client.launch.SESSION_S", 4.0)
        monkeypatch.setattr("tensorvine.actors.client.session.RENEW_S", 0.2)
        monkeypatch.setattr("tensorvine.actors.client.session.TICK_S", 0.1)
        with Repository.start("renewed", shards=2, preallocate_bytes=0) as repo:
            graph = ModelGraph([Layer("in", {"class": "Input"}, tensors=["t"])])
            repo.save(name_at(repo, 1), {"t": np.ones(100_000)}, graph=graph)
            other = Repository.connect("renewed")
            with other.longest_prefix(graph) as match:
                repo.retire(match.ref)
                until, pause = time.monotonic() + 6.0, threading.Event()
                while time.monotonic() < until:
                    assert repo.stats().tensors == 1
                    pause.wait(0.05)  # what is lost stays lost
                assert other.load(match.ref)["t"].sum() == 100_000
            eventually(lambda: nothing_left(repo), "the pin gone")
            other.close()

    def test_a_silent_client_loses_its_pins(self, cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tensorvine.actors.client.launch.SESSION_S", 4.0)
        with Repository.start("lease", shards=1, preallocate_bytes=0) as repo:
            graph = ModelGraph([Layer("in", {"class": "Input"}, tensors=["t"])])
            repo.save("m", {"t": np.ones(100_000)}, graph=graph)
            other = Repository.connect("lease")
            other._session.keep_alive = lambda: None  # type: ignore[method-assign]  # it falls silent
            match = other.longest_prefix(graph)
            assert match is not None
            repo.retire("m")
            assert repo.stats().tensors == 1
            eventually(lambda: nothing_left(repo), "the lease of the silent client run out")
            with pytest.raises(ModelNotFoundError):
                other.load(match.ref)
            other.close()


CLOSED_LATE = textwrap.dedent("""
    import time

    import numpy as np
    import ray
    from tensorvine.actors import Repository
    from tensorvine.store.errors import EngineStoppedError

    repo = Repository.start("late", shards=1, store_bytes=1 << 20)
    repo.save("m", {"w": np.zeros(1)})
    ray.shutdown()
    ray.init = lambda *_, **__: print("a new Ray was started")  # Ray's calls do so by themselves
    began = time.monotonic()
    try:
        repo.load("m")
    except EngineStoppedError as exc:
        print(exc)
    repo.close()
    print("it waits for nothing:", time.monotonic() - began < 15)  # a read of a dead shard is repeated for 30 s
""")


@pytest.mark.own_cluster
def test_a_client_that_outlives_its_ray_says_so_and_starts_no_other() -> None:
    run = subprocess.run([sys.executable, "-c", CLOSED_LATE], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Ray was shut down in this process" in run.stdout
    assert "it waits for nothing: True" in run.stdout
    assert "a new Ray was started" not in run.stdout


def test_a_client_of_a_repository_that_was_stopped_says_so_once(
    cluster: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorvine.actors.client.session.RENEW_S", 0.05)
    monkeypatch.setattr("tensorvine.actors.client.session.TICK_S", 0.02)
    caplog.set_level(logging.DEBUG, logger="tensorvine.actors.client.session")
    with Repository.start("left", shards=1, preallocate_bytes=0) as repo, Repository.connect("left") as client:
        client.save("m", {"t": np.ones(5)})
        repo.close()

        def levels() -> list[str]:
            return [record.levelname for record in caplog.records if "session renewal failed" in record.getMessage()]

        before = len(levels())  # a busy machine may be late to renew, too, and warn of that
        eventually(lambda: len(levels()) > before + 2, "it goes on asking")
        assert "WARNING" in levels()
        assert levels()[before:].count("WARNING") <= 1
