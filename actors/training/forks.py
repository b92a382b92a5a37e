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
from ...store.traces import traced
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
    """Fork a data-parallel training run: start clones from the state of the run after a given step (DeepClone).

    The original run continues during and after the fork. If the fork fails, all clones are stopped, and the original
    run continues.

    `metadata["fork"]` of each version that the clones save contains the id of the fork, the name of the original run
    and the step. If `build` is None and the clones save to the repository of the original run, the parent of the
    clones' first version is the version that the original run saved or restored last.

    Args:
        trainers: Handles of all ranks of the run: `Trainers`, or the result of `find_trainers`.
        count: Number of clones. Defaults to the number of ranks.
        at_step: Number of the step after which the state is captured: a step that has not begun, or, if no step is
            running, the last completed step. None captures the state as soon as possible.
        transport: Collective back end that sends the state: "auto", "shared", "gloo" or "nccl".
        build: Function that builds the `Training` of a clone. Defaults to the function that built the original ranks.
            Required for ranks from `find_trainers`. If `build` is given, the clones do not inherit the options, back
            end, repository, CPUs or GPUs of the original ranks.
        options: Options to change for the clones, such as the learning rate. If `build` is None, an option is accepted
            if it was passed to `start_trainers`, the original `build` reads it, or `Trainers.configure` allows it.
        name: Name of the clones' run. Defaults to the name of the original run with a suffix.
        repository: Repository that the clones save versions to, or the name of that repository. Defaults to the
            repository of the original run if `build` is None. Otherwise, None means that the clones cannot save.
        steps: Number of steps that the clones train immediately. The first step can start before the whole state is
            received. `Trainers.results` returns the losses. With 0, the clones wait for `Trainers.train`.
        timeout: Seconds to wait until all clones have received the whole state.

    Returns:
        The clones. The attribute `Trainers.report` is the `ForkReport` of the fork.

    Raises:
        ForkError: if a rank or a clone fails or dies, `at_step` is in the past, another fork is in progress, the
            timeout expires, the tensors of the clones do not match the tensors of the run, an option is unknown, or a
            clone rejects the value of an option. The message names the cause.
        ValueError: if an argument is invalid.
        Exception: any error that `build` raises.

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


@traced("fork")
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
    """Fork a training run into several groups of clones, which all start from the state after the same step.

    Each group becomes a separate run. The amount of data that the original ranks send depends on the total number of
    clones, and not on the number of groups.

    Args:
        trainers, at_step, transport, build, repository, steps, timeout: As in `fork`.
        counts: Number of clones in each group.
        options: Options to change for the clones, one mapping per group. None means no changes.
        names: Names of the new runs, one per group. None means the name of the original run with a suffix.

    Returns:
        The clones, one `Trainers` object per group.

    Raises:
        ForkError, ValueError, Exception: As in `fork`.

    >>> slow, fast = fork_many(                                                  # doctest: +SKIP
    ...     trainers, [2, 2], at_step=100, options=[{"learning_rate": 0.01}, {"learning_rate": 0.1}]
    ... )
    """
    options = [dict[str, Any]()] * len(counts) if options is None else options
    names = [None] * len(counts) if names is None else names
    _check(trainers, counts, at_step, transport, options, names, steps)
    saves_to = repository_name(repository, "fork")
    return ForkDirector(trainers, at_step, transport, build, saves_to, timeout).run(counts, options, names, steps)


@traced("fork")
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
    """Start a training run with any number of ranks from a version that `Trainers.save` created.

    If the start fails, all ranks that were started are stopped.

    Args:
        repository: Repository that contains the version, or the name of that repository. The new run saves to the same
            repository. `model` becomes the parent of the first version that the new run saves.
        model: The version to start from. A name without a version number means the latest version.
        build: Function that builds the `Training` of a rank, as in `start_trainers`.
        count: Number of ranks. All ranks get the same saved state, including the states of random generators.
        options, name, backend, cpus, gpus: As in `start_trainers`.
        timeout: As in `start_trainers`. After the ranks have started, loading the state can take another `timeout`
            seconds.

    Returns:
        The ranks of the new run.

    Raises:
        ValueError: if `Trainers.save` did not create the version, if the saved state does not fit the training that
            `build` creates (for example, a different number of parameter groups), or if an argument is invalid.
        TensorMismatchError: if the version's tensors do not match the tensors of the new run.
        TensorVineError: As in `Repository.load`.

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
        (not trainers, "trainers: expected at least one rank; found none"),
        (not counts or min(counts) < 1, f"count: expected at least 1 clone per group; found {list(counts)}"),
        (
            at_step is not None and not (isinstance(at_step, int) and at_step >= 0),
            f"at_step: expected a step from 0, or None; found {at_step!r:.100}",
        ),
        (transport not in BACKENDS, f"transport: expected one of {', '.join(BACKENDS)}; found {transport!r}"),
        (len(options) != len(counts), f"options: expected {len(counts)}, one per group; found {len(options)}"),
        (len(names) != len(counts), f"names: expected {len(counts)}, one per group; found {len(names)}"),
        (steps < 0, f"steps: expected at least 0; found {steps}"),
    ]
    for wrong, text in problems:
        if wrong:
            raise OptionError(f"fork: {text}")
