"""Clients that have ended: after `close`, and in a forked child, which must not use its parent's connections."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tensorvine.actors import Publisher
from tensorvine.actors.client.repository import Repository
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.updates.remote import Remote, RemoteCalls
from tensorvine.store import Layer, ModelGraph, ModelRef

from tests.support.direct import Answering, answered, call_directly
from tests.support.forked import in_child, outcomes

GRAPH = ModelGraph([Layer("in", {"class": "Dense"}, (), ("w",))])
VALUES = np.arange(30_000, dtype=np.int64)


def calls_of(repository: Repository) -> dict[str, Callable[[], object]]:
    """Return the calls of a client, by name; "m" is a version with the graph `GRAPH`."""
    return {
        "save": lambda: repository.save("m", {"w": VALUES}),
        "save_async": lambda: repository.save_async("m", {"w": VALUES}),
        "load": lambda: repository.load("m"),
        "load by socket": lambda: repository.load("m", transport="socket"),
        "load_model": lambda: repository.load_model("m"),
        "info": lambda: repository.info("m"),
        "graph": lambda: repository.graph("m"),
        "owners": lambda: repository.owners("m"),
        "contributions": lambda: repository.contributions("m"),
        "lineage": lambda: repository.lineage("m"),
        "qualities": lambda: repository.qualities([ModelRef("m", 1)]),
        "descendants": lambda: repository.descendants("m"),
        "common_ancestor": lambda: repository.common_ancestor("m", "m"),
        "models": repository.models,
        "find": lambda: repository.find([{}]),
        "longest_prefix": lambda: repository.longest_prefix(GRAPH),
        "longest_prefixes": lambda: repository.longest_prefixes([GRAPH]),
        "stats": repository.stats,
        "stats_by_shard": repository.stats_by_shard,
        "catalog_stats": repository.catalog_stats,
        "shards": lambda: repository.shards,
        "scale": lambda: repository.scale(1),
        "flush": repository.flush,
        "retire": lambda: repository.retire("m"),
        "verify": repository.verify,
        "verify one": lambda: repository.verify("m"),
        "unreadable": repository.unreadable,
        "export": lambda: repository.export("m", "never-written.arrow"),
        "wait_newer": lambda: repository.wait_newer("m", 9, timeout=math.inf),
        "stop": repository.stop,
        "with": repository.__enter__,
    }


@pytest.mark.both_engines
def test_every_call_of_a_forked_child_is_refused_and_its_closes_end_nothing(repository: Repository) -> None:
    repository.save("m", {"w": VALUES}, graph=GRAPH)
    arrays = repository.load("m")
    repository.load("m", transport="socket")
    match = repository.longest_prefix(GRAPH)
    assert match is not None
    answer = repository._session.catalog.send(CatalogCalls.topology())
    pending = repository.save_async("n", {"w": VALUES})
    pending.committed(60.0)
    publisher = Publisher(repository, "p", schedule=1, keep=1)
    publisher.step(1.0, {"w": VALUES})
    publisher.finish()
    calls = calls_of(repository) | {
        "connect": lambda: Repository.connect(repository.name),
        "catalog": lambda: repository._session.catalog.call(CatalogCalls.topology(), 60.0),
        "answer": lambda: answer.result(60.0),
        "pending": lambda: pending.committed(math.inf),
        "staged": lambda: pending.staged(math.inf),
        "step": lambda: publisher.step(1.0, {"w": VALUES}),
        "publish": lambda: publisher.publish({"w": VALUES}),
        "finish": publisher.finish,
        "report": publisher.report,
        "find an actor": lambda: repository.engine.find(f"{repository.name}/catalog"),
    }

    def child() -> object:
        found = outcomes(calls)
        match.release()
        publisher.close()
        repository.leave()
        repository.close()
        repository._session.close()
        renewing = any(thread.name == "tensorvine-session" for thread in threading.enumerate())
        return [found, repr(repository), int(arrays["w"].sum()), renewing]

    gc.collect()  # otherwise the child might finalize what other tests left, such as handles of Ray's
    found, text, total, renewing = in_child(child)
    assert set(found.values()) == {"ClosedError"}, found
    assert not renewing
    assert text == f"Repository({repository.name!r}, closed)"
    assert total == VALUES.sum()
    repository.retire(match.ref)
    assert (repository.load(match.ref)["w"] == VALUES).all(), "the child has dropped the parent's pin"
    match.release()
    assert answer.result(60.0).repository == repository.name
    assert publisher.step(1.0, {"w": VALUES})
    publisher.close()
    assert str(repository.save("m", {"w": VALUES}).ref) == "m@2"


@pytest.mark.both_engines
def test_a_forked_child_ends_no_consumer(repository: Repository) -> None:
    class Answers(Remote):
        role = "catalog"

    engine = repository.engine
    name = f"{repository.name}/catalog"
    with_actor = Answers(engine, "m", name, engine.find(name))
    calls = {"call": lambda: with_actor._call(CatalogCalls.topology(), 60.0), "with": with_actor.__enter__}
    assert in_child(lambda: [outcomes(calls), with_actor.close()]) == [dict.fromkeys(calls, "ClosedError"), None]
    assert with_actor._call(CatalogCalls.topology(), 60.0).repository == repository.name
    assert repository.models() == list[ModelRef]()


@pytest.mark.both_engines
def test_every_call_after_close_is_refused_and_arrays_stay_readable(repository: Repository) -> None:
    repository.save("m", {"w": VALUES}, graph=GRAPH)
    client = Repository.connect(repository.name)
    assert repr(client) == f"Repository({repository.name!r}, 1 shards)"
    arrays = client.load("m")
    far = client.load("m", transport="socket")
    match = client.longest_prefix(GRAPH)
    assert match is not None
    pending = client.save_async("n", {"w": VALUES})
    publisher = Publisher(client, "p", schedule=1)
    publisher.step(1.0, {"w": VALUES})
    publisher.close()
    client.close()
    found = outcomes(calls_of(client))
    assert set(found.values()) == {"ClosedError"}, found
    calls = {"step": lambda: publisher.step(1.0, {"w": VALUES}), "finish": publisher.finish, "expect": publisher.expect}
    assert set(outcomes(calls).values()) == {"ClosedError"}
    assert [str(update.ref) for update in publisher.report().updates] == ["p@1"]
    assert str(pending.committed(60.0).ref) == "n@1"
    assert repr(client) == f"Repository({repository.name!r}, closed)"
    match.release()
    client.leave()
    client.close()
    assert (arrays["w"] == VALUES).all()
    assert (far["w"] == VALUES).all()
    assert [str(ref) for ref in repository.models()] == ["m@1", "n@1", "p@1"]


def test_a_closed_consumer_refuses_calls_and_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call_directly(monkeypatch)

    class Answers(Remote):
        role = "consumer"

    class Calls:
        """An engine whose calls succeed at once."""

        def __init__(self) -> None:
            self.killed: list[str] = []

        def reach(self, *_: object) -> list[Answering]:
            return [lambda *_: answered()]

        def kill(self, name: str) -> None:
            self.killed.append(name)

    engine: Any = Calls()
    consumer = Answers(engine, "m", "consumer-m", object())
    consumer._call(RemoteCalls.close(), 1.0)
    consumer.close()
    consumer.close()
    assert engine.killed == ["consumer-m"]
    calls = {"call": lambda: consumer._call(RemoteCalls.close(), 1.0), "with": consumer.__enter__}
    assert set(outcomes(calls).values()) == {"ClosedError"}
