"""A member that is killed, leaves or falls silent during an operation or after it, and what data its peers then have.

Rules
- What needs no look at the data, and what comes before an operation, is in test_collective_failures.py.
- Rank 2 of three is a process, and the one in trouble; the others are threads of this process.
- In no cell does anybody wait longer than its time, and in none is wrong data taken for right. Who is in trouble is
  named by whatever needs it.
"""

from __future__ import annotations

import time

import pytest
from tensorvine.actors.collective.group import Group
from tensorvine.store.errors import OperationTimeoutError, PeerLostError

from tests.support.groups import MIB, VERBS, Act, Mortal, each, mortals

NBYTES = 4 * MIB
SILENT_S = 1.0
"""How long others wait for who falls silent."""
GLOO_S = 2.0
"""In the middle of a long message Gloo knows of a death at the end of the operation's time only."""
SOON_S = 8.0
"""A death is known much sooner than at an operation's usual timeout, 20 s."""
EVENTS = ("killed", "leaves", "silent")
WORDS = {"killed": "rank 2 died", "leaves": "rank 2 left", "silent": "rank 2"}


def befall(process: Mortal, event: str) -> None:
    if event == "killed":
        process.kill()
    elif event == "silent":
        process.stop()
    else:
        process.order("close")


def check_lost(error: BaseException | None, event: str) -> None:
    assert type(error) is (OperationTimeoutError if event == "silent" else PeerLostError), error
    assert WORDS[event] in str(error)
    assert "mortal" in str(error)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("backend", "phase"), [("shared", "during"), ("shared", "after"), ("gloo", "during")])
@pytest.mark.parametrize("event", EVENTS)
def test_trouble_is_named_in_time_and_harms_no_data(backend: str, phase: str, event: str, verb: str) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")
    limit = SILENT_S if event == "silent" else GLOO_S if backend == "gloo" else None
    with mortals(backend, 3) as (members, process):
        if phase == "after":
            process.do("start", verb, NBYTES, 0)
            process.order("finish")
            assert each(members, lambda group: Act(group, verb, NBYTES, 0).finish()) == [None] * 2
            assert process.answer() is None
        if phase == "during":
            process.do("start", verb, NBYTES, 1)
        else:
            befall(process, event)
        begun = time.monotonic()
        acts: list[Act | None] = [None, None]

        def start(group: Group) -> None:
            acts[group.rank] = Act(group, verb, NBYTES, 1, limit)

        def finish(group: Group) -> None:
            act = acts[group.rank]
            if act is not None:
                act.finish()

        refused = each(members, start)
        if phase == "during":
            befall(process, event)
        found = [first or second for first, second in zip(refused, each(members, finish), strict=True)]
        for error in found:
            if phase != "during" or error is not None:
                check_lost(error, event)
        for error in each(members, lambda group: group.barrier(timeout=limit)):
            check_lost(error, event)
        assert time.monotonic() - begun < SOON_S
