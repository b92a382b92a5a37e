"""Cloning a data-parallel training while it runs: ours, an HDF5 file, and the object store from rank to rank.

DeepClone's experiment (section VI): N ranks are cloned into N clones that stand by, at one step of a training; measured
are runtime overhead, standby and readiness as section VI-B has them.

Rules
- All ways clone one and the same training in turn. The first clone by each does not count, for it makes pages and
  compiles what later ones find; that of ours is kept apart. With --quick, files and objects count from the first.
- Ranks and clones share this machine's cores, as the paper's on nodes of their own do not: what a clone computes to
  receive, the ranks do without meanwhile.
- Files are not synced and lie in the page cache, which is the best case for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .fork_networks import Net, densenet121, nt3, resnet50, shaped
from .fork_ranks import Way
from .fork_report import FILE, OBJECTS, PUBLISHED, Case, ForkReport
from .fork_runs import Training, Transport, mailbox
from .measure import GIB, MIB, Effort, Report, copy_floor, progress
from .update_parties import Loopback

STORE_BYTES = 3 * GIB
"""Capacity of the object store; memory is taken as it is used."""
FLOORS = 3
"""Times that each floor is measured."""
NAMES: dict[Way, str] = {"file": FILE, "objects": OBJECTS}


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    cases: Sequence[tuple[Net, Sequence[int]]]
    """What is trained, on how many ranks."""
    rounds: int
    """Clones of each case by each way."""
    transports: Sequence[Transport] = ("shared", "gloo")


NT3_SMALL = nt3("NT3, D 60 of 600", 60, features=6048, filters=64, batch=10)
NT3 = nt3("NT3, D 400 of 600", 400, features=6048, filters=64, batch=10)
NT3_LARGE = nt3("NT3, D 200, filters 128", 200, features=30240, filters=128, batch=2)
RESNET, DENSENET = shaped("ResNet-50 shapes", resnet50, 800), shaped("DenseNet-121 shapes", densenet121, 800)
DENSENET_QUICK = shaped("DenseNet-121 shapes", densenet121, 400)
PLANS = {
    Effort.QUICK: Plan([(NT3_SMALL, (1,)), (DENSENET_QUICK, (1, 2))], 1, ("shared",)),
    Effort.NORMAL: Plan([(DENSENET, (1, 2, 4)), (RESNET, (1, 4)), (NT3, (1, 2, 4))], 3),
    Effort.FULL: Plan([*((net, (1, 2, 4)) for net in (DENSENET, RESNET, NT3)), (NT3_LARGE, (1, 2))], 5),
}


def run(effort: Effort) -> Report:
    """Clone all trainings by all ways."""
    from tensorvine.clusters.local import LocalCluster

    plan = PLANS[effort]
    report = ForkReport("fork")
    with (
        LocalCluster(object_store_bytes=STORE_BYTES),
        mailbox() as mail,
        tempfile.TemporaryDirectory(prefix="fork-") as folder,
    ):
        for net, sizes in plan.cases:
            for ranks in sizes:
                progress(f"{net.name}, {ranks} ranks: started")
                with closing(Training(net, ranks, Path(folder), mail)) as training:
                    report.cases.append(cloned(training, net, ranks, plan))
    largest = max(report.cases, key=lambda case: (case.ranks, case.nbytes))
    for case in report.cases:
        for transport in plan.transports:
            report.add(case.row(ours(transport)), headline=case is largest and transport == plan.transports[0])
    report.notes += [
        PUBLISHED,
        "overhead: mean slowdown of the step that is cloned and the next; noise: that of two ordinary steps, without "
        "its sign; ranks' CPU: the same of processor time; held up: seconds in which ours ran in the training's thread "
        "in both steps",
        "files are not synced and lie in the page cache; clones share the ranks' cores",
    ]
    return report


def cloned(training: Training, net: Net, ranks: int, plan: Plan) -> Case:
    """Clone one training by all ways, in turn."""
    copy_s, loopback_s = floors(training.nbytes)
    case = Case(net.name, ranks, training.nbytes, training.tensors, copy_s, loopback_s)
    progress(f"{case.name}, {training.nbytes / MIB:.0f} MiB in {training.tensors} tensors: cloned")
    case.first = training.forked(plan.transports[0])
    for way in NAMES if plan.rounds > 1 else ():
        training.loaded(way)
    for turn in range(plan.rounds):
        for place, transport in enumerate(plan.transports):
            case.ways.setdefault(ours(transport), []).append(training.forked(transport))
            for way in turns(turn + place, len(plan.transports)):
                case.ways.setdefault(NAMES[way], []).append(training.loaded(way))
    return case


def turns(turn: int, transports: int) -> list[Way]:
    """Choose who loads into the clones of one fork: all where there is one transport, else one, so that all have as
    many turns.

    >>> turns(0, 2), turns(1, 2), turns(0, 1)
    (['file'], ['objects'], ['file', 'objects'])
    """
    ways: list[Way] = list(NAMES)
    return ways if transports == 1 else [ways[turn % len(ways)]]


def ours(transport: Transport) -> str:
    """Name a way of ours."""
    return f"ours, {transport}"


def floors(nbytes: int) -> tuple[float, float]:
    """Time one memory copy of so many bytes, and their way through a loopback socket."""
    source: Any = SimpleNamespace(arrays={"state": np.ones(nbytes, np.uint8)})
    with closing(Loopback(source, {"state": np.ones(nbytes, np.uint8)})) as loopback:
        loopback_s = sorted(loopback.update().total_s for _ in range(FLOORS))[FLOORS // 2]
    return copy_floor(nbytes, rounds=FLOORS).median, loopback_s
