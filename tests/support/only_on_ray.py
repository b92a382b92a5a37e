"""Tests that share a cluster and are about Ray: why each does not run with `--engine dask`."""

from __future__ import annotations

from collections.abc import Mapping

_ACTORS = "its clients are actors of Ray"
_PROGRAMS = "its programs join a Ray"

ONLY_ON_RAY: Mapping[str, str] = {
    "tests/actors/client/test_models.py::TestKeras::test_another_process_rebuilds_it_too": _PROGRAMS,
    "tests/actors/client/test_models.py::test_actors_are_called_directly": "it calls actors by Ray's handles",
    "tests/actors/planner/test_reservations.py::TestOnRay": "it counts Ray's placement groups",
    "tests/actors/search/test_search_candidate.py::test_the_pin_of_a_killed_worker": _ACTORS,
    "tests/actors/search/test_search_deephyper.py": "DeepHyper's evaluators run on Ray",
    "tests/actors/search/test_search_tune.py": "Ray Tune",
    "tests/actors/tasks/test_arrays_on_ray.py": "Dask's scheduler on Ray; the others there run on Dask",
    "tests/actors/training/test_trainers.py::test_ranks_are_placed_in_the_bundles": "Dask has no placement groups",
    "tests/actors/training/test_training_ddp.py": "its ranks are Ray Train's workers, and actors of Ray",
    "tests/actors/updates/test_group_updates.py::test_a_reader_that_is_killed": _ACTORS,
    "tests/actors/updates/test_ray_serve.py": "Ray Serve",
    "tests/benchmarks/": f"{_ACTORS}; `benchmarks engines` measures both engines",
    "tests/clusters/test_cli.py": f"{_PROGRAMS}; those of test_cli_dask.py join a Dask",
    "tests/clusters/test_cli_changes.py": f"{_PROGRAMS}; those of test_cli_dask.py join a Dask",
    "tests/examples/test_smoke.py::test_it_runs_in_a_repository_of_others": f"{_PROGRAMS}; others there run on Dask",
    "tests/examples/test_place.py": _PROGRAMS,
    "tests/test_warm_workers.py": "Ray's workers",
}
"""How the ids of tests begin -> why they are skipped there."""


def reason(test: str) -> str | None:
    """Return why a test, by its id, does not run on Dask; None: it does."""
    return next((why for start, why in ONLY_ON_RAY.items() if test.startswith(start)), None)
