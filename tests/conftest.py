"""What tests share: one small Ray per process of pytest, and a fresh repository on it per test.

Rules
- Tests that `tests/support/long.py` names are `long`: `scripts/soak tests` runs them, `scripts/test` does not.
- There are three tiers. A test that asks for `cluster`, or for what stands on it, is marked `ray` here. One that
  starts a Ray of its own says `own_cluster`, and is marked `ray` as well. All others are `not ray`, and whatever in
  their process wants to start or join a Ray is refused.
- Nothing is started unless a test asks for it, and no framework is imported here.
- Workers of the shared Ray are forked from a process that has imported what they need (`tests/support/warm`). A file
  whose actors use a framework names it, `workers_import("torch")`, and it is imported once for all of them.
- A Ray that runs on this machine already, such as another test's, is not joined.
- Property tests draw the same examples everywhere and are not timed, so that what fails in CI fails at home, and a busy
  machine fails nothing. `pytest --hypothesis-profile=default` draws others. Hypothesis would mix in numbers that it
  reads in whatever modules of ours happen to be imported, which depends on who ran which file before.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
import ray
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.engine import process
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.engine.ray.engine import RayEngine
from tensorvine.clusters import LocalCluster

from tests.support import long, only_on_ray
from tests.support.dask_cluster import shared_dask
from tests.support.warm import ask_for, warm_workers

STORE_BYTES = 256 << 20
OWN_CLUSTER, BOTH_ENGINES = "own_cluster", "both_engines"
"""The markers."""
ONLY_OWN = (OWN_CLUSTER, f"{OWN_CLUSTER} and long", f"{OWN_CLUSTER} and not long")
"""Expressions of markers that choose nothing else."""
ENGINES = ("ray", "dask")
SLOW_S = 0.1
"""Of the processor: a collection that takes so long has looked at what was imported, or at what is as old."""
LONGEST = (
    "test_cuts.py",
    "test_growth.py",
    "test_nodes.py",
    "test_replicas.py",
    "test_job_scripts.py",
    "test_nas.py",
    "test_smoke.py",
    "test_soak.py",
    "test_cli_own_ray.py",
    "test_failures.py",
)
"""Files with clusters of their own that begin first, so that none of them is left alone at the end."""
os.environ.setdefault("RAY_ADDRESS", "local")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a worker for each CPU slot, whom no actor here takes
os.environ.setdefault("RAY_enable_metrics_collection", "0")  # nobody looks at them, and their thread crashed at an end

settings.load_profile("ci")
providers._get_local_constants = lambda: providers._local_constants  # pyright: ignore[reportPrivateUsage]  # stays empty

_serial = count(1)
_collecting = [0.0, 0.0]
"""When the last collection of all objects began, of `time.thread_time`, and how long it took."""
_asked: set[str] = set()
"""What workers of the shared Ray are to have imported."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read only files that name the marker where only such tests are asked for: the others import all frameworks."""
    only = config.getoption("markexpr") in ONLY_OWN and collection_path.suffix == ".py"
    return True if only and OWN_CLUSTER not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a Ray, what is about nothing else, and what is long; the longest files come first."""
    stale = set(long.LONG)
    for item in items:
        if (pattern := long.pattern(item.nodeid)) is not None:
            item.add_marker("long")
            stale.discard(pattern)
        if config.getoption("--engine") == "dask" and (why := only_on_ray.reason(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(why))
        if "cluster" in getattr(item, "fixturenames", ()) or item.get_closest_marker(OWN_CLUSTER):
            item.add_marker("ray")
    if not any("::" in argument for argument in config.args) and config.getoption("--engine") is None:
        files = {item.nodeid.partition("::")[0] for item in items}
        if gone := [pattern for pattern in stale if pattern.partition("::")[0] in files]:
            raise pytest.UsageError(f"tests/support/long.py: expected tests of each pattern; found none of {gone}")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Have an option that runs tests which share a cluster on another engine."""
    parser.addoption("--engine", choices=ENGINES, help="run the tests that share a cluster on this engine alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on all engines that say so."""
    if "cluster" in metafunc.fixturenames:
        only = metafunc.config.getoption("--engine")
        both = metafunc.definition.get_closest_marker(BOTH_ENGINES) is not None
        engines = ENGINES if both and only is None else (only or "ray",)
        if engines != ("ray",):
            metafunc.parametrize("cluster", engines, indirect=True, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported from the collector; from then on it is watched."""
    gc.disable()
    try:
        return (yield)
    finally:
        have_loggers_propagate()
        gc.callbacks.append(watch)
        gc.freeze()
        gc.enable()


def have_loggers_propagate() -> None:
    """Have the loggers of libraries tell the root what they log, as most do.

    To those that do not, pytest adds its two handlers in each phase of each test: 2 ms for PyTorch's fifty.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def watch(phase: str, info: dict[str, int]) -> None:
    """Take note of how long a collection of all objects takes."""
    if info["generation"] == 2:
        if phase == "start":
            _collecting[0] = time.thread_time()
        else:
            _collecting[1] = time.thread_time() - _collecting[0]


def keep_what_is_old_from_the_collector() -> None:
    """Freeze what is there when a collection was slow: frameworks are a million objects, which each would look at.

    Tests of what freezes and unfreezes on its own leave none frozen.
    """
    if _collecting[1] > SLOW_S:
        gc.collect()
        gc.freeze()
        _collecting[1] = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse a Ray to tests that are not marked."""
    if item.get_closest_marker("ray"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", refuse)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ask for what the workers of a test's file are to have imported; what the last test has imported is frozen."""
    keep_what_is_old_from_the_collector()
    names = {name for marker in item.iter_markers("workers_import") for name in marker.args} - _asked
    if names and item.get_closest_marker("ray"):
        _asked.update(names)
        ask_for(names)


def refuse(*_: object, **__: object) -> NoReturn:
    """Stand in for `ray.init`."""
    pytest.fail("a test that is not marked `ray` starts or joins a Ray: it is to ask for `cluster`")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayEngine]:
    """The embedded Ray, started once."""
    with warm_workers(_asked), LocalCluster(object_store_bytes=STORE_BYTES, cpus=2):
        yield RayEngine()


@pytest.fixture(scope="session")
def dask_cluster() -> Iterator[Engine]:
    """A Dask with one worker, started once; its client is nobody's current one."""
    with shared_dask() as engine:
        yield engine


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """What runs actors for tests that name no engine: the embedded Ray, or Dask."""
    engine = request.getfixturevalue(f"{getattr(request, 'param', 'ray')}_cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_engines", [engine])
        yield engine


@pytest.fixture
def repository(cluster: Engine) -> Iterator[Repository]:
    """A repository of its own for each test: one shard, no memory touched ahead."""
    with Repository.start(f"test-{next(_serial)}", shards=1, preallocate_bytes=0) as started:
        yield started
