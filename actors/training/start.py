"""Starting the ranks of a training.

Rules
- A training whose ranks do not all come up is none: those that did are ended, and the first cause is raised.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from ...store.refs import check_name
from ..client.repository import Repository
from ..engine.choice import EngineChoice, start_engine
from ..engine.engine import Engine, Lifetime
from .calls import TrainerCalls
from .report import Recipe
from .trainer import TrainerActor
from .trainers import Trainers
from .training import Build

BACKENDS = ("auto", "shared", "gloo", "nccl")


def start_trainers(
    build: Build,
    count: int = 1,
    *,
    name: str | None = None,
    options: Mapping[str, object] | None = None,
    backend: str = "auto",
    repository: Repository | str | None = None,
    nodes: Sequence[str] | None = None,
    placement_group: object = None,
    cpus: float = 0.0,
    gpus: float = 0.0,
    timeout: float = 120.0,
    engine: EngineChoice = None,
) -> Trainers:
    """Start a data-parallel training: an actor for each rank, on the repository's engine, or on the one that runs.

    Args:
        build: makes a rank's training from its `RankContext`. It is sent to the actors by the engine, so a function of
            a module that they cannot import must be defined in the main script, or within another function. All ranks
            must come to the same state: give them one seed.
        count: ranks.
        name: of the run; None: made up.
        options: what `build` and the training's steps are told: learning rate, seed, which data.
        backend: what carries the bytes between ranks: "auto", "shared", "gloo" or "nccl".
        repository: a repository, or its name, that the run saves to; None: it cannot save.
        nodes: ids of the nodes that ranks are placed on, in turn; None: any.
        placement_group: a Ray placement group: rank r is placed in its bundle r.
        cpus: CPU slots of each rank.
        gpus: GPUs of each rank.
        timeout: seconds for the start, and for which a rank waits for its peers in a step.
        engine: what runs the ranks, as of `Repository.start`; None: the repository's, or the one that runs.

    Raises:
        ValueError: an argument is wrong.
        OptionError: no repository is given, and both Ray and Dask run in this process.
        OperationTimeoutError: ranks did not start in time: no node has what they take; names them.
        Exception: whatever `build` raises.

    >>> trainers = start_trainers(build, 2, options={"seed": 7}, cpus=1)         # doctest: +SKIP
    """
    where = "start_trainers"
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"{where}: options: expected a mapping; found {type(options).__name__}")
    recipe = Recipe(build, dict(options or {}), backend, repository_name(repository, where), cpus, gpus)
    _check(recipe, count, nodes, placement_group, timeout, where)
    run = check_name(name if name is not None else f"run-{uuid.uuid4().hex[:8]}")
    if engine is None and isinstance(repository, Repository):
        engine = repository.engine
    runs, owns_cluster = start_engine(engine)
    token = uuid.uuid4().hex[:8]
    trainers = Trainers(runs, run, [], [f"{run}/rank-{rank}-{token}" for rank in range(count)], owns_cluster)
    try:
        places = _places(runs, count, nodes, placement_group, where)
        for rank, (node, bundle) in enumerate(places):
            lifetime = Lifetime(outlives=False, restarts=False, gpus=gpus, cpus=cpus, bundle=bundle)
            arguments = {"engine": runs, "recipe": recipe, "run": run, "group": f"{run}-{token}"}
            arguments |= {"rank": rank, "size": count, "timeout": timeout}
            trainers.append(runs.spawn(TrainerActor, f"{run}/rank-{rank}-{token}", arguments, node, lifetime))
        trainers._ask(TrainerCalls.start(), timeout)
    except BaseException:
        trainers.kill()
        raise
    return trainers


def _places(
    engine: Engine, count: int, nodes: Sequence[str] | None, placement_group: object, where: str
) -> list[tuple[str | None, tuple[object, int] | None]]:
    """Return each rank's node and bundle."""
    if placement_group is not None:
        return [(None, (placement_group, rank)) for rank in range(count)]
    if nodes is None:
        return [(None, None)] * count
    known = [node.id for node in engine.nodes()]
    if set(nodes) - set(known):
        raise ValueError(f"{where}: nodes: expected some of {known}; found {list(nodes)}")
    return [(nodes[rank % len(nodes)], None) for rank in range(count)]


def repository_name(repository: object, where: str) -> str | None:
    """Return the name of a repository that may be given as one, or None."""
    if repository is None or isinstance(repository, str):
        return repository
    if isinstance(repository, Repository):
        return repository.name
    raise ValueError(f"{where}: repository: expected a Repository or its name; found {type(repository).__name__}")


def _check(
    recipe: Recipe, count: int, nodes: Sequence[str] | None, placement_group: object, timeout: float, where: str
) -> None:
    """Refuse wrong arguments before anything is started."""
    bundles = getattr(placement_group, "bundle_count", None)
    problems = [
        (not callable(recipe.build), f"build: expected a function of a RankContext; found {recipe.build!r}"),
        (type(count) is not int or count < 1, f"count: expected ranks from 1; found {count!r}"),
        (recipe.backend not in BACKENDS, f"backend: expected one of {', '.join(BACKENDS)}; found {recipe.backend!r}"),
        (recipe.cpus < 0, f"cpus: expected from 0; found {recipe.cpus}"),
        (recipe.gpus < 0, f"gpus: expected from 0; found {recipe.gpus}"),
        (timeout <= 0, f"timeout: expected seconds above 0; found {timeout}"),
        (nodes is not None and not nodes, "nodes: expected ids of nodes, or None; found none"),
        (nodes is not None and placement_group is not None, "nodes: expected none beside placement_group; found both"),
        (
            placement_group is not None and (not isinstance(bundles, int) or bundles < count),
            f"placement_group: expected one of {count} bundles or more; found {bundles}",
        ),
    ]
    for wrong, text in problems:
        if wrong:
            raise ValueError(f"{where}: {text}")
