"""Tests that are long: `scripts/soak tests` runs them, and CI does, after `scripts/test`.

Rules
- A test is long where `scripts/test` runs another of the same code: on the other engine, with other parameters, at
  another step, smaller. So is one that needs a cluster of its own for minutes, and is about one way to run one. What it
  shows of the logic is tested without a cluster, too.
- All that is long runs before a change lands. What touches one of these files runs it at home: `pytest FILE` runs all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_ON_RAY = "the same on Ray"
_OTHERS = "the same with other parameters"
_STEPS = "the same at other steps"
_ONLINE = "what it is made of: tests/actors/updates, tests/actors/search/test_search_tune.py"
_SMALLER = "the same on raylets of one machine, without cuts: tests/actors/planner/test_nodes.py"

LONG: Mapping[str, str] = {
    r"tests/actors/client/test_models.py::TestKeras::test_another_process_rebuilds": "the same in its own process",
    r"tests/actors/client/test_transports.py::.*\[dask": _ON_RAY,
    r"tests/actors/edge/test_edge_repository.py::.*\[dask": _ON_RAY,
    r"tests/actors/engine/dask/test_dask_failures.py::test_(actors_whose_template|when_all_workers)": _STEPS,
    r"tests/actors/engine/dask/test_dask_failures.py::test_a_(node_that_nobody_drains|worker_without_a_nanny)": _STEPS,
    r"tests/actors/engine/dask/test_dask_repository.py::": "test_nodes.py, on Ray, and test_dask_failures.py",
    r"tests/actors/planner/test_following.py::.*\[dask": _ON_RAY,
    r"tests/actors/planner/test_nodes.py::TestANumber::test_(scale_asks|the_load)": "test_it_means_that_number",
    r"tests/actors/planner/test_nodes.py::TestOnePerNode::test_a_client_meets": "its rules: test_nearby.py",
    r"tests/actors/planner/test_nodes.py::TestOnePerNode::test_a_(node_that_dies|planner)": _STEPS,
    r"tests/actors/planner/test_nodes.py::TestOnePerNode::test_only_nodes": "tests/planner/test_membership.py",
    r"tests/actors/planner/test_nodes.py::TestOnePerNode::test_what_lost_nodes_had": "tests/hosts/test_cuts.py",
    r"tests/actors/planner/test_scale.py::test_reads_saves.*_join$": "while they join and drain",
    r"tests/actors/planner/test_scale_failures.py::.*dies_meanwhile_loses_nothing.*\[1": _STEPS,
    r"tests/actors/search/test_search_deephyper.py::TestSearch::test_the_repo": "test_a_killed_worker, of that search",
    r"tests/actors/search/test_search_tune.py::test_a_population": "its parts, one by one",
    r"tests/actors/shard/test_durability.py::TestEverythingKilled::test_every_version": "test_no_number_is_given_again",
    r"tests/actors/shard/test_failures.py::.*\[dask": _ON_RAY,
    r"tests/actors/shard/test_failures.py::TestClientKilled.*\[ray-commit-(before-leaves|sent-closes)": _STEPS,
    r"tests/actors/shard/test_persistence.py::TestContract::.*\[(s3-lossless|local-plain)": _OTHERS,
    r"tests/actors/shard/test_persistence.py::TestContract::test_everything.*\[local": "the same on S3",
    r"tests/actors/shard/test_persistence.py::TestContract::test_(a_lossy|what_is_retired).*\[s3": "on a file system",
    r"tests/actors/shard/test_replicas.py::test_replicas\[(copies|many|one shard|no backup|an idle)": _STEPS,
    r"tests/actors/shard/test_replicas.py::test_replicas\[(home|backup) killed (before|after)": _STEPS,
    r"tests/actors/shard/test_tiers.py::.*\[two-shards": "the same with one shard",
    r"tests/actors/shard/test_tiers.py::TestStrangeTensors::.*\[(Delta|Quantize\(bits=3)": _OTHERS,
    r"tests/actors/training/test_fork.py::.*\[dask": _ON_RAY,
    r"tests/actors/training/test_fork_callback.py::test_a_fit_has_the_same_bits.*\[(conv|dense-sgd)": _OTHERS,
    r"tests/actors/training/test_training_ddp.py::test_a_ray_train_worker": "ranks of DDP that are actors",
    r"tests/actors/training/test_training_keras.py::test_a_clone_in_a_fresh": "the same in its own process",
    r"tests/actors/training/test_training_keras.py::test_the_bits.*\[dense-scaled": _OTHERS,
    r"tests/actors/updates/test_online.py::.*\[dask": _ON_RAY,
    r"tests/benchmarks/test_smoke.py::test_a_benchmark_measures.*\[(?!incremental|notify|elastic)": "three others",
    r"tests/benchmarks/test_smoke.py::test_a_benchmark_with": "those of the shared Ray",
    r"tests/clusters/test_cli_own_ray.py::": "test_cli.py, on a Ray that runs",
    r"tests/clusters/test_install.py::test_what_was_left_half_made": "the others there",
    r"tests/clusters/test_job_scripts.py::TestJobs::": "the scripts' text, and their commands",
    r"tests/clusters/web/test_browser_many.py::": "test_browser.py; the window: test_lineage_window.py",
    r"tests/examples/test_edge_example.py::test_a_server": "test_a_device_without_ray, of the same example",
    r"tests/examples/test_nas.py::test_nodes": _SMALLER,
    r"tests/examples/test_nas.py::test_a_search_that_is_killed.*\[tune": "DeepHyper runs it; its file is tested alone",
    r"tests/examples/test_smoke.py::test_ctrl_c.*\[Starting": "Ctrl-C a little later",
    r"tests/examples/test_smoke.py::test_finetune": _ON_RAY,
    r"tests/examples/test_smoke.py::test_it_runs.*\[(online|population)": _ONLINE,
    r"tests/fuzz/test_runner.py::test_readers_of_files": "test_fuzz.py, where nothing is found",
    r"tests/hosts/test_clocks.py::": "the simulation, whose clock of the day is set forward and back",
    r"tests/hosts/test_cuts.py::TestASecond::test_changes.*\[(join-(1-2|1-3|1>3)|drain-(1-2|2-3|1>3))": _OTHERS,
    r"tests/hosts/test_cuts.py::TestASecond::test_forks": "forks on one host: tests/actors/training/test_fork.py",
    r"tests/hosts/test_cuts.py::TestASecond::test_saves.*\[(?!1-2|2 alone)": _OTHERS,
    r"tests/hosts/test_cuts.py::TestGivenUp::.*\[(3-3|2-2) alone": _OTHERS,
    r"tests/hosts/test_disk.py::": "tests/actors/shard/test_disk_trouble.py, on one host",
    r"tests/hosts/test_growth.py::": _SMALLER,
    r"tests/hosts/test_head.py::": "a planner that starts again: tests/actors/shard/test_failures.py",
    r"tests/hosts/test_neighbours.py::": "two repositories in one cluster",
    r"tests/hosts/test_placement.py::": "its rules: tests/planner/test_placement.py; two raylets: test_two_nodes.py",
    r"tests/simulation/test_simulation.py::test_worlds_keep_the_rules\[more": "other worlds",
    r"tests/soak/test_soak.py::test_a_short_round": "the simulation",
    r"tests/store/patches/test_patches.py::test_a_tensor_of_more": "a tensor of several blocks",
    r"tests/test_warm_workers.py::test_workers_that_are_forked.*\[(deephyper|ray.tune)": "ray.util.collective",
    r"tests/test_wheel.py::TestAlone::test_a_repository_runs_on_dask": "the same with Ray",
    r"tests/test_wheel.py::TestAlone::.*\[3.1[23]": "the same on Python 3.11",
}
"""The file, and a regular expression of how the rest of a test's id begins -> what of it `scripts/test` runs."""


def pattern(test: str) -> str | None:
    """Return which pattern names a test, by its id; None: it is not long."""
    file, _, rest = test.partition("::")
    return next((one for one in _OF_FILE.get(file, ()) if re.match(one.partition("::")[2], rest)), None)


_OF_FILE = {
    file: [one for one in LONG if one.partition("::")[0] == file] for file in {one.partition("::")[0] for one in LONG}
}
