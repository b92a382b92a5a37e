"""A forked child of a client: its calls are refused at once, and what it ends is not its parent's."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import numpy as np
import pytest
from tensorvine.actors import Publisher
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.planner.calls import PlannerCalls
from tensorvine.actors.updates.remote import Remote
from tensorvine.store import Layer, ModelGraph, ModelRef

from tests.support.forked import in_child, outcomes

pytestmark = pytest.mark.both_engines

GRAPH = ModelGraph([Layer("in", {"class": "Dense"}, (), ("w",))])
VALUES = np.arange(30_000, dtype=np.int64)


def test_every_call_of_a_forked_child_is_refused_and_its_closes_end_nothing(repository: Repository) -> None:
    repository.save("m", {"w": VALUES}, graph=GRAPH)
    arrays = repository.load("m")
    repository.load("m", transport="socket")
    match = repository.longest_prefix(GRAPH)
    assert match is not None
    answer = repository._session.planner.send(PlannerCalls.topology())
    pending = repository.save_async("n", {"w": VALUES})
    pending.committed(60.0)
    publisher = Publisher(repository, "p", schedule=1, keep=1)
    publisher.step(1.0, {"w": VALUES})
    publisher.finish()
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: repository.save("m", {"w": VALUES}),
        "save_async": lambda: repository.save_async("m", {"w": VALUES}),
        "load": lambda: repository.load("m"),
        "load by socket": lambda: repository.load("m", transport="socket"),
        "info": lambda: repository.info("m"),
        "graph": lambda: repository.graph("m"),
        "models": repository.models,
        "find": lambda: repository.find([{}]),
        "longest_prefix": lambda: repository.longest_prefix(GRAPH),
        "stats": repository.stats,
        "stats_by_shard": repository.stats_by_shard,
        "shards": lambda: repository.shards,
        "scale": lambda: repository.scale(1),
        "flush": repository.flush,
        "retire": lambda: repository.retire("m"),
        "wait_newer": lambda: repository.wait_newer("m", 9, timeout=math.inf),
        "stop": repository.stop,
        "with": repository.__enter__,
        "connect": lambda: Repository.connect(repository.name),
        "planner": lambda: repository._session.planner.call(PlannerCalls.topology(), 60.0),
        "answer": lambda: answer.result(60.0),
        "pending": lambda: pending.committed(math.inf),
        "staged": lambda: pending.staged(math.inf),
        "step": lambda: publisher.step(1.0, {"w": VALUES}),
        "publish": lambda: publisher.publish({"w": VALUES}),
        "finish": publisher.finish,
        "find an actor": lambda: repository.engine.find(f"{repository.name}/planner"),
    }

    def child() -> object:
        found = outcomes(calls)
        match.release()
        publisher.close()
        repository.leave()
        repository.close()
        repository._session.close()
        gc.collect()
        return [found, repr(repository), int(arrays["w"].sum())]

    found, text, total = in_child(child)
    assert set(found.values()) == {"ClosedError"}, found
    assert text == f"Repository({repository.name!r}, closed)"
    assert total == VALUES.sum()
    repository.retire(match.ref)
    assert (repository.load(match.ref)["w"] == VALUES).all(), "the child has dropped the parent's pin"
    match.release()
    assert answer.result(60.0).repository == repository.name
    assert publisher.step(1.0, {"w": VALUES})
    publisher.close()
    assert str(repository.save("m", {"w": VALUES}).ref) == "m@2"


def test_a_forked_child_ends_no_consumer(repository: Repository) -> None:
    class Answers(Remote):
        role = "planner"

    engine = repository.engine
    name = f"{repository.name}/planner"
    with_actor = Answers(engine, "m", name, engine.find(name))
    calls = {"call": lambda: with_actor._call(PlannerCalls.topology(), 60.0), "with": with_actor.__enter__}
    assert in_child(lambda: [outcomes(calls), with_actor.close()]) == [dict.fromkeys(calls, "ClosedError"), None]
    assert with_actor._call(PlannerCalls.topology(), 60.0).repository == repository.name
    assert repository.models() == list[ModelRef]()
