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
    """Start a data-parallel training run with one actor per rank.

    The ranks average their gradients during the backward pass. The ranks stop when the process that started them ends.
    If the start fails, the ranks that have already started are stopped.

    Args:
        build: Function that builds the `Training` of a rank from a `RankContext`. All ranks must begin with the same
            state, so use the same seed on all ranks. The engine sends the function to the actors. If the actors cannot
            import the function's module, define the function in the main script or inside another function.
        count: Number of ranks.
        name: Name of the run. Defaults to a generated name.
        options: Options that `build` receives in `RankContext.options`, such as learning rate, seed and data set.
        backend: Back end for collective communication: "auto", "shared", "gloo" or "nccl", as in
            `tensorvine.actors.collective.connect`.
        repository: Repository that the run saves versions to, or the name of that repository. If None, the run
            cannot save versions.
        nodes: Ids of the nodes to place the ranks on, in round-robin order. None means any node.
        placement_group: Ray placement group. Rank r is placed in bundle r of the group. Cannot be used with `nodes`.
        cpus: Number of CPUs to reserve for each rank.
        gpus: Number of GPUs to reserve for each rank. Can be a fraction of one GPU.
        timeout: Seconds to wait until all ranks have started. In each training step, a rank also waits at most
            `timeout` seconds for the other ranks.
        engine: Engine that runs the ranks, as in `Repository.start`. Defaults to the engine of `repository` if
            `repository` is a `Repository` object, else to the engine running in this process, else to Ray.

    Returns:
        The ranks.

    Raises:
        ValueError: if an argument is invalid.
        OptionError: if both Ray and Dask run in this process, and neither `engine` nor a `Repository` object is given.
        OperationTimeoutError: if a rank does not start in time, for example because no node has enough free resources.
            The message names the missing ranks.
        Exception: any error that `build` raises.

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
        (type(count) is not int or count < 1, f"count: expected at least 1 rank; found {count!r}"),
        (recipe.backend not in BACKENDS, f"backend: expected one of {', '.join(BACKENDS)}; found {recipe.backend!r}"),
        (recipe.cpus < 0, f"cpus: expected at least 0; found {recipe.cpus}"),
        (recipe.gpus < 0, f"gpus: expected at least 0; found {recipe.gpus}"),
        (timeout <= 0, f"timeout: expected seconds above 0; found {timeout}"),
        (nodes is not None and not nodes, "nodes: expected at least one node id, or None; found none"),
        (nodes is not None and placement_group is not None, "nodes: expected nodes or placement_group; found both"),
        (
            placement_group is not None and (not isinstance(bundles, int) or bundles < count),
            f"placement_group: expected one with at least {count} bundles; found {bundles}",
        ),
    ]
    for wrong, text in problems:
        if wrong:
            raise ValueError(f"{where}: {text}")
