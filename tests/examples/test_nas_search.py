"""The search of `examples/nas` on a real Ray: failing candidates, dying workers, searches that share a repository."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from tensorvine.actors import Repository
from tensorvine.actors.client.match import Prefixes, PrefixMatch
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.actors.search.parts import ModelParts
from tensorvine.clusters import LocalCluster
from tensorvine.store import ModelRef
from tensorvine.store.errors import OperationTimeoutError

from examples.nas import catalogue
from examples.nas import crew as crews
from examples.nas.catalogue import Catalogue
from examples.nas.controller import Controller
from examples.nas.crew import Crew
from examples.nas.data import Data
from examples.nas.evolution import Evolution
from examples.nas.files import FileStore
from examples.nas.journal import Journal, Told
from examples.nas.plan import Mode, Plan
from examples.nas.space import AttnSpace
from examples.nas.store import Access, Keeper
from examples.nas.trainer import Trainer
from examples.nas.worker import Task, Worker
from tests.support.nas_search import run
from tests.support.redis_server import RedisServer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.timeout(300), pytest.mark.workers_import("torch", "torch._dynamo")]

SPACE = AttnSpace(2, range(4, 82))
PLAN = Plan(data="wine", candidates=20, population=5, sample=3)
PIN_S = 90.0
"""By when the pin of a client that was killed must be gone."""


@dataclass(frozen=True)
class Troubled(Trainer):
    """A trainer with trouble for some candidates."""

    trouble: tuple[tuple[int, str], ...] = ()
    """Number of a candidate -> what befalls it."""
    folder: str = ""
    """Where it is noted whose worker was killed: it happens once."""

    def build(self, candidate: tuple[int, ...], data: Data, seed: int) -> Any:
        trouble = dict(self.trouble).get(seed, "")
        if trouble == "invalid":
            return Trainer.build(self, (9999, *candidate[1:]), data, seed)
        if trouble.startswith("killed") and not (note := Path(self.folder, str(seed))).exists():
            note.touch()
            arm(trouble)
        model = Trainer.build(self, candidate, data, seed)
        model.trouble = trouble
        return model

    def train(self, model: Any, data: Data, seed: int) -> float:
        quality = Trainer.train(self, model, data, seed)
        if model.trouble == "raises":
            raise ZeroDivisionError("it does not train")
        if model.trouble == "memory":
            raise MemoryError("no memory for it")
        return math.nan if model.trouble == "not a number" else quality


def arm(phase: str) -> None:
    """Let this process be killed in a phase of the candidate that it evaluates now."""

    def die(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def then_die(call: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            call(*arguments, **options)
            die()

        return called

    match phase.removeprefix("killed "):
        case "in the query":
            ModelParts.prepare = die  # pyright: ignore[reportAttributeAccessIssue]
        case "after the query":
            Prefixes.longest = then_die(Prefixes.longest)
        case "in the load":
            Repository.load = then_die(Repository.load)
        case "in training":
            Trainer.train = die  # pyright: ignore[reportAttributeAccessIssue]
        case "before the save":
            Repository._submit = die  # pyright: ignore[reportAttributeAccessIssue]
        case "while it saves":
            Repository._submit = then_die(Repository._submit)
        case _:
            PrefixMatch.release = die  # pyright: ignore[reportAttributeAccessIssue]


PHASES = {
    7: "in the query",
    8: "after the query",
    10: "in the load",
    11: "in training",
    13: "before the save",
    14: "while it saves",
    16: "in the release",
}
TROUBLES = {2: "invalid", 4: "raises", 6: "memory", 9: "not a number"}


@dataclass(frozen=True)
class Ended:
    """A search that has ended."""

    told: dict[int, Told]
    repository: Repository
    keeper: Keeper
    deaths: int


@pytest.fixture(scope="module")
def ended(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """One search in which all sorts of trouble befall some candidates."""
    folder = tmp_path_factory.mktemp("search")
    trouble = (*TROUBLES.items(), *((number, f"killed {phase}") for number, phase in PHASES.items()))
    trainer = Troubled(SPACE, "wine", trouble=trouble, folder=str(folder))
    with Repository.start("test-nas", shards=1, preallocate_bytes=0) as repository:
        told, keeper, deaths = run(repository, PLAN, trainer, folder)
        yield Ended({one.outcome.number: one for one in told}, repository, keeper, deaths)


@dataclass(frozen=True)
class Opened(Access):
    """Leads a worker of this process to a client, which the test closes."""

    client: Repository | None = None

    def open(self) -> Repository | None:
        return self.client


@pytest.fixture
def client(repository: Repository) -> Iterator[Repository]:
    with Repository.connect(repository.name) as connected:
        yield connected


def pins(repository: Repository) -> int:
    return repository.stats().catalog.pins


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2, "GraphError: decision 'sub-graph 1, cell 1: dense': expected an option 0 to 390; found 9999"),
        (4, "ZeroDivisionError: it does not train"),
        (6, "MemoryError: no memory for it"),
        (9, "quality: expected a finite number; found nan"),
    ],
)
def test_a_candidate_that_fails_to_train_is_told_with_its_reason_and_not_kept(
    number: int, message: str, ended: Ended
) -> None:
    outcome = ended.told[number].outcome
    assert outcome.quality is None
    assert message in (outcome.error or "")
    assert ended.repository.models(ended.keeper.name_of(number, 1)) == []


@pytest.mark.parametrize("number", PHASES, ids=PHASES.values())
def test_a_worker_that_is_killed_costs_its_candidate_and_nothing_else(number: int, ended: Ended) -> None:
    outcome = ended.told[number].outcome
    assert outcome.quality is not None
    assert outcome.ref == f"{ended.keeper.name_of(number, 2)}@1"
    orphan = ModelRef(ended.keeper.name_of(number, 1), 1)
    assert orphan not in ended.repository.models()


def test_after_all_that_the_population_is_whole_and_no_pin_is_left(ended: Ended) -> None:
    assert sorted(ended.told) == list(range(PLAN.candidates))
    assert ended.deaths == len(PHASES)
    good = [told.outcome for told in ended.told.values() if told.outcome.quality is not None]
    last = [ModelRef.parse(outcome.ref or "") for outcome in good[-PLAN.population :]]
    assert ended.repository.models() == sorted(last)
    assert ended.repository.verify() == []
    deadline = time.monotonic() + PIN_S
    while pins(ended.repository) and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert pins(ended.repository) == 0
    assert [shard.bytes_staged for shard in ended.repository.stats().shards] == [0]


def test_no_ancestor_is_lost(ended: Ended) -> None:
    inherited = 0
    for ref in ended.repository.models():
        (told,) = [told for told in ended.told.values() if told.outcome.ref == str(ref)]
        lineage = [str(one) for one in ended.repository.lineage(ref)]
        assert lineage[1:2] == ([told.outcome.ancestor] if told.outcome.ancestor else [])
        inherited += told.outcome.taken
        tensors = ended.repository.load(ref)
        assert len(tensors) == told.outcome.tensors
    assert inherited


def test_workers_that_never_start_are_an_error_with_the_reason(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "STARTS", starts := 2)
    with Crew(RayEngine(), Trainer(SPACE, "no such data"), Access(), 1) as crew:
        for _ in range(starts - 1):
            assert crew.next(60.0) is None
        with pytest.raises(RuntimeError, match=rf"(?s){starts} in a row died.*data: expected one of digits"):
            crew.next(60.0)


class Exiting(Trainer):
    """A trainer that ends its process instead of loading the data."""

    def load(self) -> Data:
        os._exit(3)


def test_workers_that_die_without_a_word_are_given_time_and_then_an_error(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "NOTICE_S", 1.0)
    with Crew(RayEngine(), Exiting(SPACE, "wine"), Access(), 1) as crew:
        deadline = time.monotonic() + 200.0

        def wait() -> None:
            while time.monotonic() < deadline:
                assert crew.next(60.0) is None

        with pytest.raises(RuntimeError, match="in a row died before"):
            wait()
        assert crew.deaths > 1


def test_two_searches_in_one_repository_leave_one_another_alone(repository: Repository, tmp_path: Path) -> None:
    trainer = Trainer(SPACE, "wine")
    plans = [Plan(name=name, data="wine", candidates=12, population=4, sample=2, seed=7) for name in ("a", "b")]
    found: dict[str, list[Told]] = {}

    def search(plan: Plan) -> None:
        found[plan.name], _, _ = run(repository, plan, trainer, tmp_path, workers=1)

    threads = [threading.Thread(target=search, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    for plan in plans:
        last = [told.outcome.ref for told in found[plan.name]][-plan.population :]
        assert [str(ref) for ref in repository.models(f"{plan.name}/")] == sorted(map(str, last))
    assert repository.verify() == []
    owns = {(name, told.outcome.ancestor[0]) for name in found for told in found[name] if told.outcome.ancestor}
    assert owns - {("a", "a"), ("b", "b")}  # both draw the same: whoever is behind finds what the other has saved


def test_an_ancestor_that_is_retired_while_it_is_loaded_is_still_inherited_from(
    repository: Repository, client: Repository
) -> None:
    worker = Worker(Trainer(SPACE, "wine"), Opened(client=client))
    candidate = (5, *(0,) * 17)
    first = worker.evaluate(Task(0, candidate, "nas/000000"))
    assert first.error is None
    load = Repository.load

    def retired_first(self: Repository, model: Any, **options: Any) -> Any:
        if repository.models() == [model]:
            repository.retire(model)
        return load(self, model, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repository, "load", retired_first)
        second = worker.evaluate(Task(1, (*candidate[:17], 1), "nas/000001"))
    assert second.error is None
    assert (second.ancestor, second.taken > 0) == (first.ref, True)
    assert [str(ref) for ref in repository.models()] == [second.ref]
    assert repository.verify() == []
    assert pins(repository) == 0


# ---- the baseline -------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server


@pytest.fixture
def files(redis: RedisServer, tmp_path: Path) -> Access:
    folder = tmp_path / "files"
    folder.mkdir()
    return Access(redis=redis.url, folder=folder)


def test_the_baseline_inherits_as_the_repository_does(files: Access, client: Repository) -> None:
    trainer = Trainer(SPACE, "wine")
    search = Evolution(SPACE, 4, 2, seed=1)
    asked = []
    for number in range(10):
        asked.append(search.ask())
        search.tell(asked[-1].number, number / 10)
    ours, theirs = (Worker(trainer, access) for access in (Opened(client=client), files))
    for one in asked:
        task = Task(one.number, one.candidate, f"nas/{one.number:06d}")
        mine, its = ours.evaluate(task), theirs.evaluate(task)
        assert its.error is mine.error is None
        assert (its.quality, its.ancestor, its.taken) == (mine.quality, mine.ancestor, mine.taken)
        assert its.bytes_written > its.bytes_total >= mine.bytes_written


def test_a_file_goes_with_the_last_reference_to_it(files: Access) -> None:
    worker = Worker(Trainer(SPACE, "wine"), files)
    candidate = (5, *(0,) * 17)
    refs = [worker.evaluate(Task(n, candidate, f"nas/{n:06d}")).ref for n in range(2)]
    store: Any = files.open()
    assert isinstance(store, FileStore)
    assert [path.suffix for path in files.folder.iterdir()] == [".h5"]  # of one architecture, one file
    assert store.bytes_stored() > 0
    from tensorvine.store.torch import graph_of

    trainer = Trainer(SPACE, "wine")
    match = store.longest_prefix(graph_of(trainer.build(candidate, trainer.load(), 0)))
    assert match is not None
    for ref in refs:
        store.retire(ModelRef.parse(ref or ""))
    assert store.models("nas/") == []
    assert store.bytes_stored() > 0  # the query still refers to it
    match.release()
    match.release()
    assert store.bytes_stored() == 0
    assert worker.evaluate(Task(2, candidate, "nas/000002")).ancestor is None
    store.close()


@pytest.mark.parametrize("what", ["read", "write"])
def test_who_was_killed_with_a_lock_does_not_stop_the_others_for_ever(
    what: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Catalogue(redis.url)) as dead, closing(Catalogue(redis.url)) as alive:
        monkeypatch.setattr(catalogue, "PATIENCE_S", 0.1)
        dead._take(dead._read if what == "read" else dead._write, what)
        with pytest.raises(OperationTimeoutError, match=r"expected the write lock within 0\.1 s; found it held"):
            alive.register("key", "name")
        with redis.client() as client:
            client.delete(f"{catalogue.LOCK}:readers", f"{catalogue.LOCK}:writer")
        monkeypatch.setattr(catalogue, "PATIENCE_S", 30.0)
        monkeypatch.setattr(catalogue, "EXPIRY_S", 0.5)
        dead._take(dead._read if what == "read" else dead._write, what)
        assert alive.register("key", "name")
        assert not alive.register("key", "other")


def test_a_search_with_files_keeps_as_many_as_its_population(
    cluster: LocalCluster, files: Access, tmp_path: Path
) -> None:
    plan = Plan(mode=Mode.HDF5, data="wine", candidates=12, population=4, sample=2)
    trainer = Trainer(SPACE, "wine")
    store = files.open()
    with Journal(tmp_path / "journal", plan) as journal, Crew(RayEngine(), trainer, files, 2) as crew:
        search = Evolution(SPACE, plan.population, plan.sample, plan.seed)
        controller = Controller(plan, search, Keeper(store, plan.name, plan.population), journal)
        controller.replay()
        told = controller.run(crew)
    assert all(one.outcome.error is None for one in told)
    assert len(list(files.folder.iterdir())) <= plan.population
    assert isinstance(store, FileStore)
    store.close()
