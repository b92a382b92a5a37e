"""Where an example runs: a Ray or a Dask, and a repository on it; its own, or ones that run already.

Rules
- What was started here is stopped at the end, after Ctrl-C and SIGTERM too. What was joined goes on, and of this run it
  keeps the models.
- In a repository that was asked for by name, models are called EXAMPLE-RUN/..., and RUN is another one each time: a
  second run, or somebody else's, does not meet them.
- Nobody's repository is joined unasked: one of the example's own is called EXAMPLE-RUN, for others may be on its Ray.
- In a job, workers import what lies beside the script as they do elsewhere: Ray gives them the job's `working_dir`, and
  this the script's folder in it.
- What is wrong with the address or the name is one line on standard error, and exit code 1. Options that do not go
  together are wrong usage: exit code 2.
- Only the engine that was asked for is imported. An example that takes no `--engine` needs Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tensorvine.store.lazy import to_install

from .starting import sigterm_kept

if TYPE_CHECKING:
    from tensorvine.actors import Repository
    from tensorvine.actors.engine.engine import Engine

AUTO = "auto"
RAY, DASK = "ray", "dask"
PACKAGES = {RAY: "ray", DASK: "distributed"}
"""Engine -> the package that its extra installs."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where Ray tells a job's program what the job was submitted with."""
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="a Ray that runs; auto: the one that RAY_ADDRESS names, or `ray start` started on this machine. "
        "Without it: one of its own, on this machine",
        show_default=False,
    ),
]
EngineName = Annotated[str, typer.Option("--engine", metavar="NAME", help="what it runs on: ray, or dask")]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT",
        help="the scheduler of a Dask that runs, with --engine dask. Without it: the one that DASK_SCHEDULER_ADDRESS "
        "names, or a Dask of its own, on this machine",
        show_default=False,
    ),
]
Named = Annotated[
    str | None,
    typer.Option(
        "--repository",
        metavar="NAME",
        help="join this repository, or start it under this name if it does not run. What was joined goes on at the "
        "end, and keeps the models; they are named EXAMPLE-RUN/..., so that no other run has the same names. "
        "Without it: one of its own, which ends with the example",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an example runs."""

    example: str
    """Its name."""
    address: str | None = None
    """Of a Ray that runs, or "auto", or of a Dask's scheduler; None: the example has its own."""
    named: str | None = None
    """The repository that was asked for; None: the example has its own."""
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    engine: str = RAY

    @classmethod
    def chosen(cls, example: str, engine: str, address: str | None, scheduler: str | None, named: str | None) -> Place:
        """Return the place that an example's options say.

        Raises:
            BadParameter: there is no such engine here, or the options do not go together.
        """
        if engine not in PACKAGES:
            raise typer.BadParameter(f"expected one of {', '.join(PACKAGES)}; found {engine!r}", param_hint="--engine")
        wrong, hint = (scheduler, "--scheduler") if engine == RAY else (address, "--address")
        if wrong is not None:
            raise typer.BadParameter(f"expected none with --engine {engine}; found {wrong!r}", param_hint=hint)
        if find_spec(PACKAGES[engine]) is None:
            raise typer.BadParameter(
                f"expected {PACKAGES[engine]} to be installed; it is not: {to_install(engine)}", param_hint="--engine"
            )
        return cls(example, address if engine == RAY else scheduler or _configured(), named, engine=engine)

    @property
    def repository(self) -> str:
        """Name of the repository.

        >>> Place("nas", run="3f9a").repository, Place("nas", named="models").repository
        ('nas-3f9a', 'models')
        """
        return self.named or f"{self.example}-{self.run}"

    @property
    def prefix(self) -> str:
        """What all names of models begin with.

        >>> Place("nas", "auto").prefix, Place("nas", named="models", run="3f9a").prefix
        ('', 'nas-3f9a/')
        """
        return "" if self.named is None else f"{self.example}-{self.run}/"

    @property
    def title(self) -> str:
        """Say how the example begins."""
        name = self.engine.capitalize()
        return f"Starting {name} on this machine" if self.address is None else f"Joining {name} ({self.address})"

    @property
    def choice(self) -> str:
        """What `Repository.start` takes for its engine; a Ray runs in this process by then."""
        return RAY if self.engine == RAY else self.address or DASK

    @contextmanager
    def cluster(self, object_store_bytes: int = 1 << 30, cpus: int | None = None) -> Iterator[Engine]:
        """Join what the example was told to run on, or have one within the block; arguments as of `ray`, for a Ray."""
        from tensorvine.actors.engine.choice import engine_for, start_engine

        if self.engine == RAY:
            with self.ray(object_store_bytes, cpus):
                yield engine_for(RAY)
            return
        with _one_line():
            engine, started = start_engine(self.choice)
        try:
            yield engine
        finally:
            if started:
                engine.leave()

    @contextmanager
    def ray(self, object_store_bytes: int = 1 << 30, cpus: int | None = None) -> Iterator[None]:
        """Join the Ray of the address, or have one within the block; arguments as of `LocalCluster`, for an own one."""
        if self.address is not None:
            with joined(self.address):
                yield
            return
        from tensorvine.clusters import LocalCluster

        with sigterm_kept():
            cluster = LocalCluster(object_store_bytes=object_store_bytes, cpus=cpus)
        with cluster:
            yield

    @contextmanager
    def workers(self, count: int, *, elastic: bool = False) -> Iterator[int]:
        """Join a Ray, or have one within the block, for workers with a CPU slot each.

        Args:
            count: How many. 0: one for each slot of the Ray that is joined.
            elastic: Whether an own Ray consists of nodes that an autoscaler adds and removes.

        Yields:
            The number of workers.
        """
        if elastic and self.address is None:
            from .elastic import ElasticCluster

            with ElasticCluster(count):
                yield count
            return
        with self.ray(cpus=count):
            import ray

            yield count or max(int(ray.cluster_resources().get("CPU", 0)), 1)

    @contextmanager
    def open(self, own: Mapping[str, Any] | None = None, **needed: Any) -> Iterator[Repository]:
        """Connect to the repository, or have one within the block; what it runs on was joined or started.

        Args:
            own: arguments of `Repository.start` for one that is started.
            needed: those that one which is joined must have been started with, too.
        """
        with _one_line():
            repository, joined = self._open(own or {}, needed)
        with repository:
            if self.named is not None:
                typer.echo(f"{'Joined' if joined else 'Started'} {self.named!r}; models are named {self.prefix}...")
            yield repository

    def _open(self, own: Mapping[str, Any], needed: Mapping[str, Any]) -> tuple[Repository, bool]:
        from tensorvine.actors import Repository
        from tensorvine.store.errors import RepositoryNotFoundError

        if self.named is None:
            return Repository.start(self.repository, engine=self.choice, **own, **needed), False
        try:
            found = Repository.connect(self.named, engine=self.choice)
        except RepositoryNotFoundError:
            return Repository.start(self.named, engine=self.choice, **own, **needed), False
        if not needed:
            return found, True
        found.close()
        return Repository.start(self.named, engine=self.choice, **needed), True


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Be attached to the Ray at HOST:PORT, or to the one that "auto" finds, within the block."""
    import ray
    from tensorvine.actors.engine.ray import embedded
    from tensorvine.store.errors import RepositoryNotFoundError

    attached = ray.is_initialized()
    with _one_line(), sigterm_kept():
        found = embedded.running() if address == AUTO else address
        if found is None:
            raise RepositoryNotFoundError(
                "--address auto: expected a Ray that RAY_ADDRESS names or that `ray start` started on this machine; "
                "found none"
            )
        if "://" in found or found == embedded.HERE:
            raise ValueError(f"--address: expected auto, or HOST:PORT of a Ray that runs; found {found!r}")
        embedded.attach(found, _script_folder())
    try:
        yield
    finally:
        if not attached:
            ray.shutdown()


def _configured() -> str | None:
    """Return the scheduler that Dask's configuration names; None: it names none."""
    import dask.config

    return dask.config.get("scheduler-address", None)


def _script_folder() -> dict[str, Any] | None:
    """Return the runtime environment of a job's workers; None: this is no job with a `working_dir`."""
    job = json.loads(os.environ.get(JOB, "{}"))
    if "working_dir" not in job.get("runtime_env", {}):
        return None
    folder = os.path.relpath(os.path.dirname(os.path.realpath(sys.argv[0])))  # workers start in the `working_dir`, too
    return {"env_vars": {"PYTHONPATH": folder}}


@contextmanager
def _one_line() -> Iterator[None]:
    """End the example with one line that says why its Ray or its repository cannot be had."""
    from tensorvine.store.errors import TensorVineError

    try:
        yield
    except (TensorVineError, ValueError) as exc:
        typer.echo(" ".join(str(exc).split()), err=True)
        raise typer.Exit(1) from exc
