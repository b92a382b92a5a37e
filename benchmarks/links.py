"""Saves, loads, updates and forks between two hosts, at any rate and at 1 Gbit/s, compared with the object store.

Rules
- The hosts are network namespaces of one machine, joined by a bridge, with a Ray node each (`tests.hosts`). Their links
  are limited by `tc tbf`, in both directions. Only root may make them.
- At each rate one process on the second host measures, all in turn with the floor and the peer. Saves go to a shard on
  the other host and loads come from there; each version is new, and is retired untimed.
- The floor is one TCP connection between the same hosts, from memory into memory that was used before: `sendall` and
  `recv_into`, in both directions. A process on the other host is its other end.
- The peer is Ray's object store: for a save `put` here and `get` by an actor there, for a load `get` of its object.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np

from .core.clusters import node_of, repository_on, started_on
from .core.fleet import Fleet
from .core.measure import GIB, MIB, alternate, equal, expect, progress, sample, timed
from .core.models import synthetic
from .core.report import Effort, Goal, Report
from .update_latency import Mapped, receive, values_at

HERE = 2
"""The host that measures; the other one is 1."""
STORE_BYTES, TIMEOUT_S = 2 * GIB, 120.0
BYTES_PER_S, SHARE_OF_SOCKET, SHARE_OF_LINK = 1e9 / 8, 0.7, 0.9
RAW, PEER = "a raw socket", "object store"
PEERS = {"save": ("raw up", "put"), "load": ("raw down", "get")}
UP, DOWN = b"u", b"d"
MODELS = {"8 tensors": 8, "2048 tensors": 2048}
MODEL_BYTES, STATE_BYTES = 256 * MIB, 64 * MIB
STEPS_AHEAD, TRIED = 60, 3
"""Steps until a fork, so that clones wait for it; updates that do not count, because each uses a new transport."""
Times = dict[str, list[float]]


def run(report: Report) -> None:
    """Measure at each rate.

    Raises:
        RuntimeError: if this machine cannot have several hosts. The message gives the reason.
    """
    from tests.hosts.cluster import hosts
    from tests.hosts.network import missing

    if (lacking := missing()) is not None:
        raise RuntimeError(f"benchmark links: {lacking}")
    rates = {"no limit": (None, 9), "1 Gbit/s": ("1gbit", 3)}
    if report.effort is Effort.QUICK:
        del rates["no limit"]
    with hosts(2, store_bytes=STORE_BYTES, gated=False) as at:
        for name, (rate, rounds) in rates.items():
            progress(name)
            if rate is not None:
                at.network.limit(rate)
            small = report.effort is not Effort.NORMAL
            sizes = (MIB, MIB) if small else (MODEL_BYTES, STATE_BYTES)
            _add(report, name, _measured(at, 1 if small else rounds), *sizes)


def _measured(at: Any, rounds: int) -> dict[str, Times]:
    """Let the second host measure."""
    from tests.hosts.network import address
    from tests.hosts.node import ray_at

    far = at.run(1, __name__, {}, "links-far", "far", address(1))
    try:
        port = far.stdout.readline().strip()
        near = at.run(2, __name__, {"RAY_ADDRESS": ray_at(1)}, "links-near", "near", address(1), port, str(rounds))
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


def _add(report: Report, rate: str, found: dict[str, Times], size: int, state: int) -> None:
    limited, whole = rate != "no limit", size == MODEL_BYTES
    for model in MODELS:
        for what, (floor, peer) in PEERS.items():
            ours, raw, theirs = (sample(found[model][key]) for key in (what, floor, peer))
            of_link = size / BYTES_PER_S / ours.median
            goal = Goal("of a raw socket", raw.median / ours.median, at_least=SHARE_OF_SOCKET)
            if limited:
                goal = Goal("of the link", of_link, at_least=SHARE_OF_LINK)
            report.add(
                f"{rate}: {what}, {model}",
                ours,
                size,
                peer=(PEER, theirs),
                floor=(RAW, raw),
                goals=[goal] if whole and (limited or what == "load") else [],
                headline=limited and what == "load" and model == "8 tensors",
                **({"of_link": of_link} if limited else {}),
            )
    for case, nbytes in (("update, 8 tensors", size), ("fork, ready", state)):
        times = found[case]
        report.add(f"{rate}: {case}", sample(times["ours"]), nbytes, floor=(RAW, sample(times["raw up"])))


# ---- the floor and the peer -------------------------------------------------------------------------------


def far(host: str) -> None:
    """Print a port, and send or receive as requested there until the connection ends."""
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    memory = np.ones(MODEL_BYTES, np.uint8).data
    with connection:
        while asked := connection.recv(9, socket.MSG_WAITALL):
            part = memory[: int.from_bytes(asked[1:], "big")]
            if asked[:1] == DOWN:
                connection.sendall(part)
            else:
                receive(connection, part)
                connection.sendall(UP)


class _Raw:
    """One connection to `far`."""

    def __init__(self, host: str, port: int) -> None:
        self._connection = socket.create_connection((host, port))
        self._memory = np.ones(MODEL_BYTES, np.uint8).data

    def up(self, nbytes: int) -> None:
        self._connection.sendall(UP + nbytes.to_bytes(8, "big"))
        self._connection.sendall(self._memory[:nbytes])
        self._connection.recv(1)

    def down(self, nbytes: int) -> None:
        self._connection.sendall(DOWN + nbytes.to_bytes(8, "big"))
        receive(self._connection, self._memory[:nbytes])


class Holder:
    """An actor on the other host."""

    def take(self, references: list[Any]) -> int:
        """Get an object from elsewhere; return its number of tensors."""
        import ray

        return len(ray.get(references[0]))

    def give(self, size: int, tensors: int) -> list[Any]:
        """Put a model; return its reference."""
        import ray

        return [ray.put(synthetic(size, tensors).tensors())]


# ---- the host that measures -------------------------------------------------------------------------------


def near(host: str, port: int, rounds: int) -> None:
    """Measure, and print the times as one line of JSON; one round is a first look, with small models."""
    import ray

    from tests.hosts.node import connect

    connect(HERE)
    here = ray.get_runtime_context().get_node_id()
    there = next(str(row["NodeID"]) for row in ray.nodes() if row["NodeID"] != here)
    raw, small, found = _Raw(host, port), rounds == 1, dict[str, Times]()
    size, state = (MIB, MIB) if small else (MODEL_BYTES, STATE_BYTES)
    room = 5 * size + 64 * MIB
    with (
        repository_on(there, "links", store_bytes=room, nodes=_only(there)) as repo,
        Fleet(Holder, [()], nodes=[there]) as holder,
    ):
        for model, tensors in MODELS.items():
            progress(f"save and load, {model}")
            found[model] = _transfers(repo, raw, holder, (size, tensors), rounds, 0 if small else 1)
    with repository_on(here, "updates", store_bytes=room, nodes=_only(here)) as repo:
        progress("update")
        found["update, 8 tensors"] = _updates(repo, raw, there, size, (0 if small else TRIED, rounds))
    progress("fork")
    found["fork, ready"] = _forks(raw, here, there, state, rounds)
    print(json.dumps(found), flush=True)


def _transfers(repo: Any, raw: _Raw, holder: Fleet, shape: tuple[int, int], rounds: int, warmup: int) -> Times:
    import ray

    nbytes, number = shape
    tensors, names = synthetic(*shape).tensors(), count()
    given: list[Any] = []
    stored: list[Any] = []

    def save() -> Any:
        return repo.save(f"model-{number}-{next(names)}", tensors, timeout=TIMEOUT_S)

    def prepare(_: object = None) -> None:
        """Put a version and an object on the other host that were not loaded before."""
        for ref in stored:
            repo.retire(ref)
        stored[:] = [save().ref]
        given[:] = holder.all("give", nbytes, number)[0]

    prepare()
    samples = alternate(
        {
            "save": (save, lambda saved: repo.retire(saved.ref)),
            "load": (lambda: repo.load(stored[0], timeout=TIMEOUT_S), prepare),
            "raw up": lambda: raw.up(nbytes),
            "raw down": lambda: raw.down(nbytes),
            "put": lambda: holder.all("take", [ray.put(tensors)]),
            "get": (lambda: ray.get(given[0], timeout=TIMEOUT_S), prepare),
        },
        rounds=rounds,
        warmup=warmup,
    )
    expect(equal(repo.load(stored[0], timeout=TIMEOUT_S), tensors), "links", "the saved tensors")
    repo.retire(stored[0])
    return {name: list(each.times) for name, each in samples.items()}


def _updates(repo: Any, raw: _Raw, there: str, size: int, turns: tuple[int, int]) -> Times:
    """Publish from here to a consumer on the other host; the shard is here."""
    from tensorvine.actors import Consumer, Publisher

    tensors, found = synthetic(size, 8).tensors(), Times({"ours": [], "raw up": []})
    with ExitStack() as stack:
        start = lambda: Consumer.start(repo, "net", Mapped, node=there)  # noqa: E731
        consumer = stack.enter_context(started_on(there, start, lambda consumer: consumer.actor))
        publisher = stack.enter_context(Publisher(repo, "net", 1, keep=1))
        for turn in range(sum(turns)):
            for each in tensors.values():
                each += 1
            took = timed(
                lambda: consumer.wait_for(publisher.publish(tensors).committed(TIMEOUT_S).ref.version, TIMEOUT_S)
            )[0]
            floor = timed(lambda: raw.up(size))[0]
            if turn >= turns[0]:
                found["ours"].append(took)
                found["raw up"].append(floor)
        answer = consumer.infer(5, TIMEOUT_S).outputs
        expect(answer == values_at(tensors, 5), "links", "the published values")
    return found


def _forks(raw: _Raw, here: str, there: str, state: int, rounds: int) -> Times:
    """Fork a training of this host into a clone on the other one; a clone that Ray places here does not count."""
    from tensorvine.actors import fork, start_trainers

    found, items = Times({"ours": [], "raw up": []}), state // 8 // 8  # 8 tensors of float64
    trainers = start_trainers(lambda context: _training(context, items), 1, nodes=[here], timeout=TIMEOUT_S)
    try:
        for _ in range(10 * rounds):
            at = trainers.describe()[0].steps_done + STEPS_AHEAD
            trainers.train_async(STEPS_AHEAD + 10)
            clones = fork(trainers, at_step=at, timeout=TIMEOUT_S)
            losses = trainers.results(TIMEOUT_S)[0]
            elsewhere = node_of(clones[0]) == there
            expect(clones.train(1, TIMEOUT_S)[0][0] == losses[STEPS_AHEAD], "links", "the clone's next loss")
            report = clones.report
            clones.close()
            if elsewhere:
                found["raw up"].append(timed(lambda: raw.up(state))[0])
                found["ours"].append(report.readiness_s)
            if len(found["ours"]) == rounds:
                break
    finally:
        trainers.close()
    return found


def _training(context: Any, items: int) -> Any:
    from tensorvine.actors.training.numpy import NumpyTraining

    state = {f"w{place}": np.full(items, 1.0 + place) for place in range(8)}

    def step(now: Any) -> float:
        time.sleep(0.05)  # a step that leaves the processor to others
        for name in state:
            now.reduce(name, now[name])
            now.update(name, now[name] * 0.99)
        return float(sum(now[name][0] for name in state))

    return NumpyTraining(context, state, step, parameters=list(state), random=np.random.default_rng(0))


def _only(node: str) -> dict[str, float]:
    """Return a resource of Ray's that only this node has."""
    import ray

    address = next(row["NodeManagerAddress"] for row in ray.nodes() if row["NodeID"] == node)
    return {f"node:{address}": 0.001}


ROLES: dict[str, Callable[..., None]] = {
    "far": far,
    "near": lambda host, port, rounds: near(host, int(port), int(rounds)),
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
