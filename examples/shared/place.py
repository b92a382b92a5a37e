"""Where an example runs: on an own Ray or Dask and repository, or on running ones.

Rules
- What was started here is stopped at the end, also after Ctrl-C and SIGTERM. What was joined continues.
- In a named repository, the models are called EXAMPLE-RUN/..., with another RUN each time. A repository without a name
  is called EXAMPLE-RUN, because others may use the same Ray.
- A wrong address or name is one line on standard error and exit code 1. Wrong combinations of options are exit code 2.
- Only the chosen engine is imported. An example without `--engine` needs Ray.
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
"""Engine -> package of its extra."""
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with the configuration of a Ray job."""
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="a running Ray; auto: the one of RAY_ADDRESS, or of `ray start` on this machine. Without it: an own one",
        show_default=False,
    ),
]
EngineName = Annotated[str, typer.Option("--engine", metavar="NAME", help="ray or dask")]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT",
        help="scheduler of a running Dask, with --engine dask. Without it: that of DASK_SCHEDULER_ADDRESS, or an own "
        "Dask",
        show_default=False,
    ),
]
Named = Annotated[
    str | None,
    typer.Option(
        "--repository",
        metavar="NAME",
        help="join this repository, or start it. A joined one keeps the models EXAMPLE-RUN/... at the end. Without it: "
        "an own one, which ends with the example",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an example runs."""

    example: str
    """Name of the example."""
    address: str | None = None
    """Of a running Ray, "auto", or of a scheduler of Dask. None: the example starts its own."""
    named: str | None = None
    """Name of the repository. None: the example starts its own."""
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    engine: str = RAY

    @classmethod
    def chosen(cls, example: str, engine: str, address: str | None, scheduler: str | None, named: str | None) -> Place:
        """Return the place of an example's options.

        Raises:
            BadParameter: if there is no such engine, or the options cannot be combined.
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
        """Prefix of the names of models.

        >>> Place("nas", "auto").prefix, Place("nas", named="models", run="3f9a").prefix
        ('', 'nas-3f9a/')
        """
        return "" if self.named is None else f"{self.example}-{self.run}/"

    @property
    def title(self) -> str:
        """Description of the start."""
        name = self.engine.capitalize()
        return f"Starting {name} on this machine" if self.address is None else f"Joining {name} ({self.address})"

    @property
    def choice(self) -> str:
        """The argument `engine` of `Repository.start`. This process is connected to Ray by then."""
        return RAY if self.engine == RAY else self.address or DASK

    @contextmanager
    def cluster(self, object_store_bytes: int = 1 << 30, cpus: int | None = None) -> Iterator[Engine]:
        """Join the cluster, or start one for the block. The arguments are those of `ray`."""
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
        """Join the Ray of the address, or start one for the block with these arguments of `LocalCluster`."""
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
        """Join a Ray, or start one for the block, for workers with a CPU slot each. Yields the number of workers.

        Args:
            count: How many. 0: one for each slot of the joined Ray.
            elastic: Whether the nodes of an own Ray are added and removed by an autoscaler.
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
        """Connect to the repository, or start one for the block, on the joined or started cluster.

        Args:
            own: Arguments of `Repository.start`, if it is started.
            needed: Further arguments, with which a joined repository must have been started, too.
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
    """Connect to the Ray at HOST:PORT, or to the one that "auto" finds, for the block."""
    import ray
    from tensorvine.actors.engine.ray import embedded
    from tensorvine.store.errors import RepositoryNotFoundError

    attached = ray.is_initialized()
    with _one_line(), sigterm_kept():
        found = embedded.running() if address == AUTO else address
        if found is None:
            raise RepositoryNotFoundError(
                "--address auto: expected a Ray in RAY_ADDRESS, or one of `ray start` on this machine; found none"
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
    """Return the scheduler of Dask's configuration, if it has one."""
    import dask.config

    return dask.config.get("scheduler-address", None)


def _script_folder() -> dict[str, Any] | None:
    """Return the runtime environment of the workers of a Ray job: they import modules from the folder of the script.

    Returns None outside a job with a `working_dir`, where Ray does the same.
    """
    job = json.loads(os.environ.get(JOB, "{}"))
    if "working_dir" not in job.get("runtime_env", {}):
        return None
    folder = os.path.relpath(os.path.dirname(os.path.realpath(sys.argv[0])))  # workers start in the `working_dir`, too
    return {"env_vars": {"PYTHONPATH": folder}}


@contextmanager
def _one_line() -> Iterator[None]:
    """End the example with one line if its cluster or its repository cannot be joined or started."""
    from tensorvine.store.errors import TensorVineError

    try:
        yield
    except (TensorVineError, ValueError) as exc:
        typer.echo(" ".join(str(exc).split()), err=True)
        raise typer.Exit(1) from exc
