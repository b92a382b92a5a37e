"""Saves, loads, updates, forks and searches between two hosts, at any rate and at 1 Gbit/s.

Rules
- The hosts are network namespaces of one machine, joined by a bridge, with a Ray node each (`tests.hosts`); they share
  its processors. Their links are limited by `tc tbf`, in both directions. Only root may make them.
- At each rate one process on the second host measures (`links_host`), all in turn with the floor and the peer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .links_host import MODEL_BYTES, MODELS, STATE_BYTES
from .measure import GIB, MIB, Effort, Goal, Report, Row, Sample, progress

if TYPE_CHECKING:
    from tests.hosts.cluster import Hosts

STORE_BYTES = 2 * GIB
RATES = {"no limit": (None, 9), "1 Gbit/s": ("1gbit", 3)}
"""What `tc` is told, and how many rounds there are."""
BYTES_PER_S = 1e9 / 8
SHARE_OF_SOCKET, SHARE_OF_LINK = 0.7, 0.9
RAW = "a raw socket"
PEERS = {"save": ("raw up", "put"), "load": ("raw down", "get")}


def run(effort: Effort) -> Report:
    """Measure at each rate.

    Raises:
        RuntimeError: this machine cannot have several hosts; says why.
    """
    from tests.hosts.cluster import hosts
    from tests.hosts.network import missing

    lacking = missing()
    if lacking is not None:
        raise RuntimeError(f"benchmark links: {lacking}")
    quick = effort is Effort.QUICK
    report = Report("links")
    with hosts(2, store_bytes=STORE_BYTES, gated=False) as at:
        for name, (rate, rounds) in RATES.items():
            progress(name)
            if rate is not None:
                at.network.limit(rate)
            found = measured(at, 1 if quick else rounds)
            _add(report, name, found, *((MIB, MIB) if quick else (MODEL_BYTES, STATE_BYTES)))
    return report


def measured(at: Hosts, rounds: int) -> dict[str, Any]:
    """Have the second host measure."""
    from tests.hosts.network import address
    from tests.hosts.node import ray_at

    module = "benchmarks.links_host"
    far = at.run(1, module, {}, "links-far", "far", address(1))
    try:
        port = far.stdout.readline().strip() if far.stdout is not None else ""
        arguments = ("near", address(1), port, str(rounds))
        near = at.run(2, module, {"RAY_ADDRESS": ray_at(1)}, "links-near", *arguments)
        try:
            said, _ = near.communicate()
        finally:
            near.kill()
        if near.returncode:
            log = (at.folder / "links-near.log").read_text()
            raise RuntimeError(f"benchmark links: expected figures; found exit status {near.returncode}\n{log}")
        return json.loads(said.splitlines()[-1])
    finally:
        far.kill()
        far.communicate()


def _add(report: Report, rate: str, found: dict[str, Any], size: int, state: int) -> None:
    limited = RATES[rate][0] is not None
    for model in MODELS:
        for what, (floor, peer) in PEERS.items():
            ours, raw, theirs = (Sample(tuple(found[model][key])) for key in (what, floor, peer))
            goals = [Goal("of a raw socket", raw.median / ours.median, at_least=SHARE_OF_SOCKET)]
            if limited:
                goals = [Goal("of the link", size / BYTES_PER_S / ours.median, at_least=SHARE_OF_LINK)]
            if size < MODEL_BYTES or (what == "save" and not limited):
                goals = []
            row = Row(
                f"{rate}: {what}, {model}", ours, size, "object store", theirs, RAW, raw.median, tuple(goals),
                facts={"of_link": size / BYTES_PER_S / ours.median} if limited else {},
            )  # fmt: skip
            report.add(row, headline=limited and what == "load" and model == next(iter(MODELS)))
    update, fork, search = found["update"], found["fork"], found["search"]
    ours, raw = Sample(tuple(update["update"])), Sample(tuple(update["raw up"]))
    report.add(Row(f"{rate}: update, 8 tensors", ours, size, limit=RAW, limit_s=raw.median))
    ours, raw = Sample(tuple(fork["readiness"])), Sample(tuple(fork["raw up"]))
    held = Sample(tuple(fork["held"])).median
    report.add(Row(f"{rate}: fork, ready", ours, state, limit=RAW, limit_s=raw.median, facts={"held_s": held}))
    ours, theirs = (Sample(tuple(search[way])) for way in ("two hosts", "one host"))
    report.add(Row(f"{rate}: search, a candidate", ours, 0, "two searchers on one host", theirs))
