"""Spans: which there are when they are on, how they belong together, and that there is nothing when they are off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tensorvine.actors import Publisher, Repository
from tensorvine.actors.training import forks
from tensorvine.actors.updates.follower import Follower
from tensorvine.store import traces
from tensorvine.store.errors import ModelNotFoundError
from tensorvine.store.graphs.graph import Layer, ModelGraph

from tests.support.waiting import PROMPT_S, eventually

Spans = Callable[[str], list[ReadableSpan]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Switch spans on; return those of a name that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setenv(traces.VARIABLE, "1")
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    traces._tracer.cache_clear()
    yield lambda name: [span for span in exporter.get_finished_spans() if span.name == f"tensorvine.{name}"]
    provider.shutdown()
    traces._tracer.cache_clear()


class Plain:
    """Takes all versions."""

    def assign(self, given: dict[str, np.ndarray]) -> None:
        self.tensors = given

    def __call__(self, batch: object) -> object:
        return batch


def test_each_operation_is_a_span(repository: Repository, spans: Spans) -> None:
    graph = ModelGraph([Layer("in", {"class": "Input"}, (), ("w",))])
    with trace.get_tracer("program").start_as_current_span("program") as program:
        repository.save("m", {"w": np.ones(10)}, graph=graph)
    repository.load("m")
    with pytest.raises(ModelNotFoundError):
        repository.load("none")
    match = repository.longest_prefix(graph)
    assert match is not None
    match.release()
    (save,), (loaded, failed), (query,) = spans("save"), spans("load"), spans("query")
    assert save.attributes == {"tensorvine.version": "m@1", "tensorvine.bytes": 80}
    assert save.parent is not None
    assert save.parent.span_id == program.get_span_context().span_id  # though another thread carries it out
    assert loaded.attributes == {"tensorvine.version": "m@1", "tensorvine.bytes": 80}
    assert not failed.status.is_ok
    assert [event.name for event in failed.events] == ["exception"]
    assert query.attributes == {"tensorvine.found": 1, "tensorvine.graphs": 1}


def test_an_update_is_published_and_swapped(repository: Repository, spans: Spans) -> None:
    follower = Follower(Repository.connect(repository.name), "net", Plain)
    try:
        with Publisher(repository, "net", schedule=1000) as publisher:
            publisher.publish({"w": np.ones(10)}).committed()
        follower.wait_for(1, PROMPT_S)
        (swap,) = eventually(lambda: spans("swap"), "the swap has ended")
    finally:
        follower.close()
    (published,), (save,) = spans("publish"), spans("save")
    assert save.parent is not None
    assert save.parent.span_id == published.context.span_id
    assert published.attributes == {"tensorvine.model": "net", "tensorvine.iteration": 0}
    assert swap.attributes == {"tensorvine.version": "net@1"}


def test_a_fork_is_a_span_whose_error_is_recorded(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(run=lambda *_: ["clones"])
    monkeypatch.setattr(forks, "ForkDirector", lambda *_: made)
    rank: object = object()
    assert forks.fork([rank], 1, at_step=None) == "clones"
    with pytest.raises(ValueError, match="at least one rank"):
        forks.fork_many([], [1], at_step=None)
    assert [span.status.is_ok for span in spans("fork")] == [True, False]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_when_they_are_off_nothing_is_imported_and_a_span_is_one_shared_object(value: str | None) -> None:
    program = (
        "import sys\n"
        "from tensorvine.store import traces\n"
        "assert traces.span('load') is traces.span('save')\n"
        "with traces.span('load') as traced:\n"
        "    traces.note(model='m')\n"
        "assert traced is traces.current() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    environment = {} if value is None else {traces.VARIABLE: value}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)


def test_where_they_are_on_and_opentelemetry_is_missing_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(traces.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    traces._tracer.cache_clear()
    try:
        for _ in range(2):
            with traces.span("load"):
                traces.note(model="m")
    finally:
        traces._tracer.cache_clear()
    (record,) = caplog.records
    assert "[web]" in record.getMessage()
    assert "unset it" in record.getMessage()
