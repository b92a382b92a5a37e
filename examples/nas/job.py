"""The job itself: one search per mode, one after the other, each in a cluster of its own or all in one that runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from tensorvine.actors import Repository
from tensorvine.actors.engine.choice import engine_for
from tensorvine.actors.engine.engine import Engine, Node

from ..edge_consumer.server import Server
from ..online.place import RAY, Place
from .controller import Controller
from .crew import Crew
from .evolution import Evolution
from .journal import Journal, read
from .picture import draw_searches
from .plan import Mode, Plan, Search
from .report import NAMES, Report
from .results import Results
from .space import size_of, validate
from .store import Access, Keeper

STORE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Means:
    """What searches run on."""

    place: Place = field(default_factory=lambda: Place("nas"))
    """The cluster, and the repository of the search that goes through one."""
    workers: int = 2
    """0: one for each CPU slot of the cluster that is joined."""
    elastic: bool = False
    """On nodes that the autoscaler makes: that of the Ray which is joined, or one on this machine."""
    memory: bool = False
    """A repository that is started keeps nothing on disk: its search cannot be resumed."""
    resume: bool = False

    @property
    def joins(self) -> bool:
        """Whether they run on a cluster that runs already."""
        return self.place.address is not None


def run(plan: Plan, modes: Sequence[Mode], means: Means, out: Path) -> list[Results]:
    """Run a search per mode; journals, the repository and the picture go into the directory `out`."""
    report = Report()
    describe(plan, report)
    if means.joins:
        with means.place.cluster() as engine:
            report.say(fitting(engine, modes))
    searches: list[Results] = []
    for mode in modes:
        report.title(f"Search: {NAMES[mode]}")
        searches.append(search(replace(plan, mode=mode), means, out / mode, report))
    for results in searches:
        report.best(results)
    report.compare(searches)
    report.picture(draw_searches(searches, out / "searches.png"))
    return searches


def describe(plan: Plan, report: Report) -> None:
    """Say what is searched, and on which data."""
    trainer = plan.trainer()
    space, data = trainer.space, trainer.load()
    validate(space)
    report.title(f"Space {space.name}, {plan.data}")
    report.say(f"{size_of(space):.2g} candidates in {len(space.decisions)} decisions; {plan.candidates} are evaluated")
    report.say(f"{len(data.train[1])} samples to train on, {len(data.test[1])} to judge by; {data.features} features")


def search(plan: Plan, means: Means, out: Path, report: Report) -> Results:
    """Run one search, or the rest of one."""
    trainer = plan.trainer()
    with ExitStack() as stack:
        journal = stack.enter_context(opened(out / "journal.jsonl", plan, means))
        plan = journal.plan
        if means.place.named is not None and plan.name.startswith("nas-"):  # a search that goes on keeps its names
            means = replace(means, place=replace(means.place, run=plan.name.removeprefix("nas-")))
        engine = stack.enter_context(cluster(means))
        access = stack.enter_context(stored(plan, means, out))
        store = access.open()
        if store is not None:
            stack.callback(store.close)
        keeper = Keeper(store, plan.name, None if plan.keep else plan.population)
        evolution = Evolution(trainer.space, plan.population, plan.sample, plan.seed)
        cpus = 1.0 if means.elastic or means.joins else 0.0
        workers = means.workers or max(slots(engine.nodes()), 1)
        if plan.search is Search.DEEPHYPER:
            from . import hyper

            show = stack.enter_context(report.search(plan))
            assert isinstance(store, Repository)  # noqa: S101  the only mode that is allowed with it
            return Results(
                plan,
                *hyper.search(plan, trainer, store, journal, workers, cpus, out, lambda told: show(told, workers)),
            )
        crew = stack.enter_context(Crew(engine, trainer, access, workers, cpus, spread=means.joins))
        show = stack.enter_context(report.search(plan))
        controller = Controller(plan, evolution, keeper, journal, lambda told: show(told, crew.ready))
        controller.replay()
        told = controller.run(crew)
        return Results(plan, told, crew.deaths)


def opened(path: Path, plan: Plan, means: Means) -> Journal:
    """Open the journal. A search in a repository that others know has a name that no other one has, and keeps it."""
    name = means.place.prefix.removesuffix("/") or plan.name
    if means.resume and path.exists() and path.stat().st_size:
        name = read(path)[0].name
    return Journal(path, replace(plan, name=name), resume=means.resume)


def fitting(engine: Engine, modes: Sequence[Mode]) -> str:
    """Describe the cluster that was joined.

    Raises:
        BadParameter: it does not fit the modes.
    """
    nodes = engine.nodes()
    if Mode.HDF5 in modes and len(nodes) > 1:
        raise typer.BadParameter(
            f"hdf5: expected a cluster of one node, where its files and its Redis server are; found {len(nodes)} nodes",
            param_hint="--mode",
        )
    return f"Nodes of the cluster: {len(nodes)}; CPU slots: {slots(nodes)}"


def slots(nodes: Sequence[Node]) -> int:
    """Return how many CPU slots nodes have."""
    return int(sum(node.resources.get("CPU", 0) for node in nodes))


@contextmanager
def cluster(means: Means) -> Iterator[Engine]:
    """Start the cluster that a search runs on, or join it."""
    if means.elastic and not means.joins:
        from .elastic import ElasticCluster

        with ElasticCluster(means.workers):
            yield engine_for(RAY)
    else:
        with means.place.cluster(STORE_BYTES, means.workers) as engine:
            yield engine


@contextmanager
def stored(plan: Plan, means: Means, out: Path) -> Iterator[Access]:
    """Start what candidates are stored in."""
    if plan.mode is Mode.REPOSITORY:
        path = None if means.memory else out / "repository"
        spread = means.joins and not means.elastic  # nodes that come and go are no place for what must stay
        with means.place.open({"shards": None if spread else 1, "path": path}) as repository:
            yield Access(repository=repository.name)
    elif plan.mode is Mode.HDF5:
        with Server() as server, tempfile.TemporaryDirectory(prefix="nas-") as folder:
            yield Access(redis=server.url, folder=Path(folder))
    else:
        yield Access()
