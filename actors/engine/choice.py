"""Which engine a program uses: Ray or Dask, by name, by a client or an address of Dask, or the one that runs here.

Rules
- None is the engine that runs in this process: the one whose actor this is, a Ray that is initialised, a client of Dask
  that is current, or that of the task which this is. Where none runs it is Ray. Where both run the caller has to say.
- Neither Ray nor Dask is imported unless it is chosen, or the program has imported it. Nothing is started on one to see
  whether it runs: a program may use it for something else.
- A cluster that is started here for want of one ends with `Engine.leave`. What was only joined stays joined until the
  program ends.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...store.errors import EngineUnavailableError, OptionError
from ...store.lazy import to_install
from . import process
from .engine import Engine

if TYPE_CHECKING:
    from distributed import Client

EngineChoice: TypeAlias = "str | Engine | Client | None"
"""`"ray"`, `"dask"`, a client of Dask or the address of its scheduler, an engine, or None: the one that runs here."""

RAY, DASK = "ray", "dask"
_PACKAGES = {RAY: "ray", DASK: "distributed"}
"""What a program has imported that runs one."""


class Door(Protocol):
    """The module by which programs come to an engine."""

    def joined(self, where: Any = None) -> Engine:
        """Return the engine of the cluster that runs there."""
        ...

    def joined_or_started(self, where: Any = None) -> tuple[Engine, bool]:
        """Return the engine of the cluster that runs there, or of one that is started here; True: it was started."""
        ...

    def runs(self) -> bool:
        """Tell whether it runs in this process, so that `joined` needs no address."""
        ...


def engine_for(choice: EngineChoice = None) -> Engine:
    """Return the engine of a cluster that runs, which this process joins.

    Args:
        choice: which engine, and where.

    Raises:
        RepositoryNotFoundError: no such cluster runs, or it refuses this process.
        EngineUnavailableError: the engine's package is not installed.
        OptionError: the choice is none, or None where both Ray and Dask run in this process; the client of Dask is
            asynchronous, or other processes cannot reach its scheduler.

    >>> engine_for("spark")
    Traceback (most recent call last):
    tensorvine.store.errors.OptionError: engine: expected "ray", "dask", a client of Dask or HOST:PORT; found 'spark'
    """
    found = _chosen(choice)
    return found[0].joined(found[1]) if isinstance(found, tuple) else found


def start_engine(choice: EngineChoice = None) -> tuple[Engine, bool]:
    """Return the engine of the cluster that runs, or of one that is started on this machine where there is none.

    Args:
        choice: which engine, and where: with an address there must be one.

    Returns:
        The engine, and whether its cluster was started here: then `Engine.leave` ends it.

    Raises:
        As `engine_for` does.
        StoreFullError: there is too little memory to start one.
        StorageError: this user's token for Ray cannot be made or read.
    """
    found = _chosen(choice)
    return found[0].joined_or_started(found[1]) if isinstance(found, tuple) else (found, False)


def engine_here() -> Engine | None:
    """Return the engine that runs in this process; None: there is none. Where both run it is Ray."""
    running = [] if (own := process.engine()) is not None else _running()
    return running[0].joined() if running else own


def door(name: str) -> Door:
    """Return the door to "ray" or "dask".

    Raises:
        EngineUnavailableError: the engine's package is not installed.
    """
    try:
        if name == DASK:
            from .dask import clients as found
        else:
            from .ray import embedded as found
    except ModuleNotFoundError as exc:
        raise EngineUnavailableError(
            f"engine: expected the packages of {name}; found no {exc.name}: {to_install(name)}"
        ) from exc
    return found


def _chosen(choice: EngineChoice) -> tuple[Door, object] | Engine:
    """Return the engine, or the door to it and where its cluster is."""
    if choice is None:
        own = process.engine()
        if own is not None:  # an actor's is its own, whatever else it has started
            return own
        running = _running()
        if len(running) > 1:
            raise OptionError(
                'engine: expected "ray" or "dask", because both Ray and a Dask client run in this process; found None'
            )
        return (running[0] if running else door(RAY)), None
    if isinstance(choice, str):
        if choice in _PACKAGES:
            return door(choice), None
        if ":" in choice:
            return door(DASK), choice
    elif _is_client(choice):
        return door(DASK), choice
    elif isinstance(choice, Engine):
        return choice
    raise OptionError(f'engine: expected "ray", "dask", a client of Dask or HOST:PORT; found {choice!r:.100}')


def _running() -> list[Door]:
    """Return the doors to the engines that run in this process."""
    doors = [door(name) for name, package in _PACKAGES.items() if sys.modules.get(package) is not None]
    return [one for one in doors if one.runs()]


def _is_client(choice: object) -> bool:
    distributed: Any = sys.modules.get("distributed")
    return distributed is not None and isinstance(choice, distributed.Client)
