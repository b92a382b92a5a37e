"""Forking a running training into clones (DeepClone).

Rules
- The caller of `fork` directs it (`directing`). Wrong arguments are refused before anybody is asked.
- The clones are trainers like the others: they belong to who forked, and can be forked themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...store.errors import OptionError
from ...store.refs import Model
from ..client.repository import Repository
from ..engine.engine import Actor
from .directing import ForkDirector
from .start import BACKENDS, repository_name, start_trainers
from .trainers import Trainers
from .training import Build


def fork(
    trainers: Sequence[Actor],
    count: int | None = None,
    *,
    at_step: int | None,
    transport: str = "auto",
    build: Build | None = None,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
    repository: Repository | str | None = None,
    steps: int = 0,
    timeout: float = 120.0,
) -> Trainers:
    """Fork a data-parallel training into clones that have its state after a step (DeepClone).

    Args:
        trainers: handles of all its rank actors: `Trainers`, or what `find_trainers` gave.
        count: ranks of the clones; None: as many as the training has.
        at_step: the step after which the clones' state is that of the training; None: as soon as it can be. The last
            step that ended will do only if the training stands still.
        transport: by which back end the state goes: "auto", "shared", "gloo" or "nccl".
        build: makes a clone's training; None: what made the ranks'. It must be given for ranks that are not ours.
        options: what the clones change of the ranks' options, such as the learning rate. Without `build`, an option
            must be one that the ranks were started with, that their `build` reads, or that `configure` takes.
        name: of the clones' run; None: made from the run's.
        repository: a repository, or its name, that the clones save to; None: the ranks'. Ranks that are not ours have
            none.
        steps: the clones train so many steps at once, the first of them while their state is still being gathered;
            `Trainers.results` gives the losses.
        timeout: seconds until the clones must be whole.

    Returns:
        The clones, each with the training's state, which go on when they are told to. `.report` tells how it went.

    Raises:
        ForkError: a rank or clone failed or died, the step is past, another fork is under way, or the training does
            not have an option; names which. No clone is left.
        ValueError: an argument is wrong.

    >>> clones = fork(trainers, at_step=100, options={"learning_rate": 0.1})     # doctest: +SKIP
    """
    counts = [len(trainers) if count is None else count]
    return fork_many(
        trainers,
        counts,
        at_step=at_step,
        transport=transport,
        build=build,
        options=[options or {}],
        names=[name],
        repository=repository,
        steps=steps,
        timeout=timeout,
    )[0]


def fork_many(
    trainers: Sequence[Actor],
    counts: Sequence[int],
    *,
    at_step: int | None,
    transport: str = "auto",
    build: Build | None = None,
    options: Sequence[Mapping[str, object]] | None = None,
    names: Sequence[str | None] | None = None,
    repository: Repository | str | None = None,
    steps: int = 0,
    timeout: float = 120.0,
) -> list[Trainers]:
    """Fork a training into several groups of clones from one step; its ranks send no more than for one.

    Args:
        trainers, at_step, transport, build, repository, steps, timeout: as in `fork`.
        counts: ranks of each group.
        options: what each group changes of the ranks' options; None: nothing.
        names: of the groups' runs; None: made from the run's.

    Raises:
        ForkError, ValueError: as in `fork`.
    """
    options = [dict[str, Any]()] * len(counts) if options is None else options
    names = [None] * len(counts) if names is None else names
    _check(trainers, counts, at_step, transport, options, names, steps)
    saves_to = repository_name(repository, "fork")
    return ForkDirector(trainers, at_step, transport, build, saves_to, timeout).run(counts, options, names, steps)


def fork_version(
    repository: Repository | str,
    model: Model,
    build: Build,
    count: int = 1,
    *,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
    backend: str = "auto",
    cpus: float = 0.0,
    gpus: float = 0.0,
    timeout: float = 120.0,
) -> Trainers:
    """Fork a training from a version that `Trainers.save` made: it goes on from there, in any number of ranks.

    Args:
        repository: where the version is, or its name; the new run saves there, too, as the version's child.
        model: the version; a name without one means the latest.
        build: makes a rank's training.
        count: ranks. All get the state of the rank that saved, its random state included.
        options, name, backend, cpus, gpus, timeout: as in `start_trainers`.

    Raises:
        ValueError: the version has no facts of such a training, or an argument is wrong.
        TensorMismatchError: its tensors are not those of the training.
        TensorVineError: what `Repository.load` raises. No rank is left.

    >>> clones = fork_version(repo, "run@3", build, 2, options={"learning_rate": 0.1})     # doctest: +SKIP
    """
    trainers = start_trainers(
        build,
        count,
        name=name,
        options=options,
        backend=backend,
        repository=repository,
        cpus=cpus,
        gpus=gpus,
        timeout=timeout,
    )
    try:
        trainers.restore_from(model, timeout)
    except BaseException:
        trainers.close()
        raise
    return trainers


def _check(
    trainers: Sequence[Actor],
    counts: Sequence[int],
    at_step: int | None,
    transport: str,
    options: Sequence[object],
    names: Sequence[object],
    steps: int,
) -> None:
    """Refuse wrong arguments before anybody is asked."""
    problems = [
        (not trainers, "trainers: expected at least one; found none"),
        (not counts or min(counts) < 1, f"count: expected clones from 1; found {list(counts)}"),
        (
            at_step is not None and not (isinstance(at_step, int) and at_step >= 0),
            f"at_step: expected a step from 0, or None; found {at_step!r:.100}",
        ),
        (transport not in BACKENDS, f"transport: expected one of {', '.join(BACKENDS)}; found {transport!r}"),
        (len(options) != len(counts), f"options: expected {len(counts)}, one for each group; found {len(options)}"),
        (len(names) != len(counts), f"names: expected {len(counts)}, one for each group; found {len(names)}"),
        (steps < 0, f"steps: expected from 0; found {steps}"),
    ]
    for wrong, text in problems:
        if wrong:
            raise OptionError(f"fork: {text}")
