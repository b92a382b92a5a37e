"""The search of `examples/nas`, without Ray: its journal, and a controller that is stopped at any moment."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tensorvine.store import ModelRef

from examples.nas.controller import ATTEMPTS, Controller
from examples.nas.crew import Lost
from examples.nas.evolution import Asked, Evolution
from examples.nas.journal import Journal, Told, read
from examples.nas.plan import Mode, Plan
from examples.nas.results import Results, results_of
from examples.nas.space import AttnSpace
from examples.nas.store import Keeper
from examples.nas.worker import Outcome, Task

PLAN = Plan(mode=Mode.NONE, candidates=24, population=6, sample=3, seed=5)
FAILING = 9
"""A candidate that does not train."""


class StandIn:
    """A crew in this process: each candidate's quality follows from its decisions."""

    def __init__(self, size: int = 1, dying: int | None = None) -> None:
        self._tasks: deque[Task] = deque()
        self._size, self._dying = size, dying
        self.given: list[Task] = []

    @property
    def idle(self) -> int:
        return self._size - len(self._tasks)

    def give(self, task: Task) -> None:
        self.given.append(task)
        self._tasks.append(task)

    def next(self, timeout: float) -> Outcome | Lost | None:
        task = self._tasks.popleft()
        if task.number == self._dying:
            return Lost(task, "it was killed")
        quality = None if task.number == FAILING else sum(task.candidate) % 101 / 101
        return Outcome(task.number, quality, None if quality is not None else "no number", ref=f"{task.name}@1")


def controller(journal: Journal, plan: Plan = PLAN, keeper: Keeper | None = None) -> Controller:
    search = Evolution(AttnSpace(2), plan.population, plan.sample, plan.seed)
    return Controller(plan, search, keeper or Keeper(None, plan.name, plan.population), journal)


def searched(path: Path, crew: Any, *, resume: bool = False, plan: Plan = PLAN) -> list[tuple[int, Any, float | None]]:
    """Run a search to its end and give what was told, in order."""
    with Journal(path, plan, resume=resume) as journal:
        control = controller(journal, plan)
        control.replay()
        control.run(crew)
    asked = {event.number: event.candidate for event in read(path)[1] if isinstance(event, Asked)}
    return [(told.outcome.number, asked[told.outcome.number], told.outcome.quality) for told in control.told]


def test_a_search_that_is_cut_after_any_event_goes_on_the_same(tmp_path: Path) -> None:
    whole = searched(tmp_path / "whole", StandIn())
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    assert len(whole) == PLAN.candidates
    for count in range(1, len(lines)):
        part = tmp_path / f"part-{count}"
        part.write_bytes(b"".join(lines[:count]) + lines[count][:20])  # the next line was cut short
        assert searched(part, StandIn(), resume=True) == whole, f"cut after {lines[count - 1]!r}"


def test_a_search_with_several_workers_asks_again_for_what_was_in_flight(tmp_path: Path) -> None:
    searched(tmp_path / "whole", StandIn(size=3))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "part").write_bytes(b"".join(lines[:20]))
    _, events = read(tmp_path / "part")
    told = {event.outcome.number for event in events if isinstance(event, Told)}
    flying = [event.number for event in events if isinstance(event, Asked) and event.number not in told]
    crew = StandIn(size=3)
    found = searched(tmp_path / "part", crew, resume=True)
    assert sorted(number for number, _, _ in found) == list(range(PLAN.candidates))
    assert [task.number for task in crew.given][: len(flying)] == flying
    assert all(task.name.endswith("-2") for task in crew.given[: len(flying)])


def test_a_search_that_ended_is_not_run_again_and_goes_on_when_there_is_more_to_do(tmp_path: Path) -> None:
    whole = searched(tmp_path / "journal", StandIn())
    crew = StandIn()
    assert searched(tmp_path / "journal", crew, resume=True) == whole
    assert not crew.given
    longer = Plan(**{**PLAN.to_json(), "mode": Mode.NONE, "candidates": 30})
    assert searched(tmp_path / "journal", crew, resume=True, plan=longer)[:24] == whole


def test_a_candidate_that_kills_its_workers_fails_in_the_end(tmp_path: Path) -> None:
    crew = StandIn(size=2, dying=4)
    found = searched(tmp_path / "journal", crew)
    assert [task.name for task in crew.given if task.number == 4] == ["nas/000004", "nas/000004-2", "nas/000004-3"]
    assert len(crew.given) == PLAN.candidates + ATTEMPTS - 1
    assert {number for number, _, quality in found if quality is None} == {4, FAILING}
    _, events = read(tmp_path / "journal")
    (told,) = [event for event in events if isinstance(event, Told) and event.outcome.number == 4]
    assert told.outcome.error == "it cost 3 workers: it was killed"


class Recording:
    """What a keeper asks of a store."""

    def __init__(self) -> None:
        self.live: set[ModelRef] = set()
        self.retired: list[ModelRef] = []

    def models(self, prefix: str) -> list[ModelRef]:
        return sorted(ref for ref in self.live if ref.name.startswith(prefix))

    def retire(self, ref: ModelRef) -> None:
        self.live.discard(ref)
        self.retired.append(ref)

    def bytes_stored(self) -> int:
        return len(self.live)


@pytest.mark.parametrize("keep", [False, True], ids=["retiring", "keeping"])
def test_what_a_resumed_search_finds_in_store_and_nobody_knows_goes(keep: bool, tmp_path: Path) -> None:
    store: Any = Recording()
    plan = Plan(**{**PLAN.to_json(), "mode": Mode.HDF5, "keep": keep})

    class Saving(StandIn):
        def next(self, timeout: float) -> Outcome | Lost | None:
            event = super().next(timeout)
            if isinstance(event, Outcome) and event.ref is not None:
                store.live.add(ModelRef.parse(event.ref))
            return event

    def run(candidates: int) -> None:
        now = Plan(**{**plan.to_json(), "mode": Mode.HDF5, "candidates": candidates})
        keeper = Keeper(store, plan.name, None if keep else plan.population)
        with Journal(tmp_path / "journal", now, resume=True) as journal:
            control = controller(journal, now, keeper)
            control.replay()
            control.run(Saving())  # pyright: ignore[reportArgumentType]

    run(12)
    orphan, other = ModelRef("nas/000013", 1), ModelRef("other/000013", 1)
    store.live |= {orphan, other}
    run(12)
    assert orphan not in store.live
    assert other in store.live
    known = {ModelRef(f"nas/{number:06d}", 1) for number in (range(12) if keep else range(5, 12)) if number != FAILING}
    assert store.live == known | {other}
    run(20)
    assert len(store.live) == (20 - 1 if keep else 6) + 1


# ---- the journal --------------------------------------------------------------------------------------------


def told(number: int, at: float = 1.0, **facts: Any) -> Told:
    return Told(at, Outcome(number, 0.5, **facts), 7)


def test_a_journal_reads_what_was_written(tmp_path: Path) -> None:
    events = [Asked(0, (1, 2), None), told(0, ref="nas/000000@1"), Asked(1, (1, 3), 0)]
    with Journal(tmp_path / "deep" / "journal", PLAN) as journal:
        journal.ask(events[0])  # pyright: ignore[reportArgumentType]
        journal.tell(events[1])  # pyright: ignore[reportArgumentType]
        journal.ask(events[2])  # pyright: ignore[reportArgumentType]
    assert read(tmp_path / "deep" / "journal") == (PLAN, events)


def test_an_earlier_search_is_not_overwritten_unless_it_is_resumed(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", PLAN).close()
    with pytest.raises(FileExistsError, match="--resume"):
        Journal(tmp_path / "journal", PLAN)
    Journal(tmp_path / "journal", PLAN, resume=True).close()
    with pytest.raises(ValueError, match=r"resume: mode: expected <Mode.NONE: 'none'>"):
        Journal(tmp_path / "journal", Plan(mode=Mode.HDF5), resume=True)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"something": "else"}\n')
    with pytest.raises(ValueError, match="expected the journal of a search; found KeyError"):
        Journal(tmp_path / "journal", PLAN, resume=True)


def test_a_journal_of_another_seed_is_found_out(tmp_path: Path) -> None:
    searched(tmp_path / "journal", StandIn())
    text = (tmp_path / "journal").read_text()
    (tmp_path / "journal").write_text(text.replace('"seed":5', '"seed":6'))
    other = Plan(**{**PLAN.to_json(), "mode": Mode.NONE, "seed": 6})
    with pytest.raises(ValueError, match=r"journal: expected candidate .*, by the search's seed"):
        searched(tmp_path / "journal", StandIn(), resume=True, plan=other)


# ---- results ------------------------------------------------------------------------------------------------


def test_results_follow_from_the_journal() -> None:
    rows = [(0, 0.4, None, 1.0), (1, 0.7, "nas/000000@1", 2.0), (2, None, None, 3.0), (3, 0.6, "nas/000001@1", 4.0)]
    events = [
        Told(
            at,
            Outcome(
                number,
                quality,
                ref=None if quality is None else f"nas/{number:06d}@1",
                ancestor=ancestor,
                tensors=4,
                taken=number,
                bytes_written=10,
                began=at,
                ended=at + 1,
                stored_s=0.1,
            ),
            30,
        )
        for number, quality, ancestor, at in rows
    ]
    results = results_of(PLAN, events)
    assert (results.seconds, results.failed, results.bytes_written, results.bytes_most) == (4.0, 1, 40, 30)
    assert results.climb() == ([1.0, 2.0], [0.4, 0.7])
    assert (results.time_to(0.5), results.time_to(0.4), results.time_to(0.9)) == (2.0, 1.0, None)
    assert [one.outcome.number for one in results.best(2)] == [1, 3]
    assert [one.outcome.number for one in results.lineage(events[3])] == [3, 1, 0]
    assert results.share == pytest.approx(0.1)
    assert results.frozen == pytest.approx(5 / 8)
    assert Results(PLAN, []).seconds == 0.0
