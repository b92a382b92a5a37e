"""The job itself: one search per mode, one after the other, each in a cluster of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tensorvine.actors import Repository
from tensorvine.clusters import LocalCluster

from ..edge_consumer.server import Server
from .controller import Controller
from .crew import Crew
from .elastic import ElasticCluster
from .evolution import Evolution
from .journal import Journal
from .picture import draw_searches
from .plan import Mode, Plan
from .report import NAMES, Report
from .results import Results
from .space import size_of, validate
from .store import Access, Keeper

STORE_BYTES = 1 << 30
REPOSITORY = "nas"


@dataclass(frozen=True, slots=True)
class Means:
    """What searches run on."""

    workers: int = 2
    elastic: bool = False
    """On nodes that the autoscaler makes."""
    memory: bool = False
    """The repository keeps nothing on disk: its search cannot be resumed."""
    resume: bool = False


def run(plan: Plan, modes: Sequence[Mode], means: Means, out: Path) -> list[Results]:
    """Run a search per mode; journals, the repository and the picture go into the directory `out`."""
    report = Report()
    trainer = plan.trainer()
    space, data = trainer.space, trainer.load()
    validate(space)
    report.title(f"Space {space.name}, {plan.data}")
    report.say(f"{size_of(space):.2g} candidates in {len(space.decisions)} decisions; {plan.candidates} are evaluated")
    report.say(f"{len(data.train[1])} samples to train on, {len(data.test[1])} to judge by; {data.features} features")
    searches: list[Results] = []
    for mode in modes:
        report.title(f"Search: {NAMES[mode]}")
        searches.append(search(replace(plan, mode=mode), means, out / mode, report))
    for results in searches:
        report.best(results)
    report.compare(searches)
    report.picture(draw_searches(searches, out / "searches.png"))
    return searches


def search(plan: Plan, means: Means, out: Path, report: Report) -> Results:
    """Run one search, or the rest of one."""
    trainer = plan.trainer()
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(out / "journal.jsonl", plan, resume=means.resume))
        stack.enter_context(cluster(means))
        access = stack.enter_context(stored(plan, means, out))
        store = access.open()
        if store is not None:
            stack.callback(store.close)
        keeper = Keeper(store, plan.name, None if plan.keep else plan.population)
        evolution = Evolution(trainer.space, plan.population, plan.sample, plan.seed)
        crew = stack.enter_context(Crew(lambda: (trainer, access), means.workers, cpus=float(means.elastic)))
        show = stack.enter_context(report.search(plan))
        controller = Controller(plan, evolution, keeper, journal, lambda told: show(told, crew.ready))
        controller.replay()
        told = controller.run(crew)
        return Results(plan, told, crew.deaths)


@contextmanager
def cluster(means: Means) -> Iterator[None]:
    """Start the Ray that a search runs on."""
    if means.elastic:
        with ElasticCluster(means.workers):
            yield
    else:
        with LocalCluster(object_store_bytes=STORE_BYTES, cpus=means.workers):
            yield


@contextmanager
def stored(plan: Plan, means: Means, out: Path) -> Iterator[Access]:
    """Start what candidates are stored in."""
    if plan.mode is Mode.REPOSITORY:
        path = None if means.memory else out / "repository"
        with Repository.start(REPOSITORY, shards=1, path=path):
            yield Access(repository=REPOSITORY)
    elif plan.mode is Mode.HDF5:
        with Server() as server, tempfile.TemporaryDirectory(prefix="nas-") as folder:
            yield Access(redis=server.url, folder=Path(folder))
    else:
        yield Access()
