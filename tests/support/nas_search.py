"""A search of `examples/nas` in this process, its workers on the engine of the repository that is given."""

from __future__ import annotations

from pathlib import Path

from tensorvine.actors import Repository

from examples.nas.controller import Controller
from examples.nas.crew import Crew
from examples.nas.evolution import Evolution
from examples.nas.journal import Journal, Told
from examples.nas.plan import Plan
from examples.nas.store import Access, Keeper
from examples.nas.trainer import Trainer


def run(
    repository: Repository, plan: Plan, trainer: Trainer, folder: Path, workers: int = 2
) -> tuple[list[Told], Keeper, int]:
    """Run a search in a repository; gives what was told, who keeps the models, and how many workers died."""
    access = Access(repository=repository.name)
    search = Evolution(trainer.space, plan.population, plan.sample, plan.seed)
    with (
        Repository.connect(repository.name, engine=repository.engine) as store,
        Journal(folder / f"{plan.name}.jsonl", plan) as journal,
        Crew(repository.engine, trainer, access, workers) as crew,
    ):
        keeper = Keeper(store, plan.name, plan.population)
        controller = Controller(plan, search, keeper, journal)
        controller.replay()
        return controller.run(crew), keeper, crew.deaths
