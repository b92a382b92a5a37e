"""The soak itself: what its model calls broken, what it prints, what it dares to signal; and one short real round."""

from __future__ import annotations

import doctest
import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tensorvine.store import ModelRef

from tests.soak import content as content_of_numbers
from tests.soak import disk, ground, modes, promises, report, traces
from tests.soak.__main__ import play
from tests.soak.content import KINDS, LARGE_FROM, WHO, Card, content, difference
from tests.soak.journal import Journal, read
from tests.soak.modes import DURABLE, MIB, MODES, Mode, Round, round_of, seconds_of
from tests.soak.promises import Ledger, Seen, summary

M1, M2 = ModelRef("m", 1), ModelRef("m", 2)
SHORT = DURABLE | {"fork": 8, "pool": 4}
SEED = 9704
"""Draws a client that is stopped, a shard that is killed, and a client that is."""


@pytest.mark.parametrize("module", [content_of_numbers, modes, promises, report, traces])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


class TestContent:
    def test_a_number_says_all_of_a_tensor(self) -> None:
        for number in [*range(2 * len(KINDS)), LARGE_FROM]:
            assert difference(content(number), number) is None
            if content(number).size > 1:
                assert "bytes wrong" in str(difference(content(number + 8 * len(KINDS)), number))

    def test_shifted_stale_and_cleared_bytes_are_seen(self) -> None:
        large = content(2)
        for wrong in (np.roll(large, 16), np.roll(large, 2048), np.zeros_like(large), content(10)):
            assert difference(wrong, 2) is not None
        assert "begin as number 10" in str(difference(content(10), 2))
        one = large.copy()
        one.view(np.uint8)[77_777] ^= 1
        assert difference(one, 2) == "expected number 2; found 1 of 200000 bytes wrong from 77777 on"

    def test_another_shape_or_dtype_is_named(self) -> None:
        assert difference(content(2)[:5], 2) == "expected float32 (50000,); found float32 (5,)"

    def test_a_card_names_what_is_not_its_own(self) -> None:
        card, other = Card("1", "m", {"a": 0, "b": 1}), Card("2", "m", {"a": 0, "b": 1})
        assert Card.of(card.tensor()) == card
        assert not card.wrong(card.arrays(["a", "b"]))
        assert card.wrong({WHO: other.tensor(), "c": content(1)}) == [
            "who: expected the card of 1; found other bytes",
            "c: expected one of ['a', 'b']",
        ]
        with pytest.raises(ValueError, match="expected a card"):
            Card.of(np.zeros(64, np.uint8))


class TestPlan:
    def test_the_same_seed_gives_the_same_plan(self) -> None:
        for number in range(3):
            one, two = round_of(5, number), round_of(5, number)
            assert one == two
            for _, first, second in zip(range(50), one.faults(), two.faults(), strict=False):
                assert first == second
            for _, first, second in zip(range(50), one.operations(1, 0), two.operations(1, 0), strict=False):
                assert (first[0], first[1].random()) == (second[0], second[1].random())

    def test_each_mode_has_its_turn_before_any_comes_again(self) -> None:
        for deck in range(3):
            rounds = [round_of(9, deck * len(MODES) + place).mode.text for place in range(len(MODES))]
            assert sorted(rounds) == sorted(mode.text for mode in MODES)

    def test_without_a_compiler_the_disk_is_left_in_peace(self) -> None:
        faults = {fault for n in range(len(MODES)) for fault in round_of(1, n, faults_at_disk=False).mode.faults}
        assert faults
        assert not any("disk" in fault or "trouble" in fault for fault in faults)

    @pytest.mark.parametrize("text", ["", "5", "0s", "-3s", "1d", "s", "1.s"])
    def test_a_duration_that_is_none(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected such as 90s"):
            seconds_of(text)


class Story:
    """Events of a made-up round, one a second."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def tell(self, event: str, **facts: Any) -> Story:
        self.entries.append({"event": event, "who": "client 0.0", "at": float(len(self.entries)), **facts})
        return self

    def saved(self, ref: ModelRef, save: str = "", durable: bool = False) -> Story:
        save = save or f"save of {ref}"
        self.tell("saving", save=save, name=ref.name, durable=durable)
        return self.tell("saved", save=save, ref=str(ref), durable=durable)

    def died(self, *what: str, safe: bool = True) -> Story:
        return self.tell("died", what=list(what), safe=safe, until=float(len(self.entries)))

    def rules(self, seen: Mapping[ModelRef, Seen], path: bool = False, replicas: int = 1) -> dict[str, int]:
        return summary(Ledger(self.entries, path, replicas).judge(seen))


LOST, GONE = Seen("ModelLostError"), Seen("ModelNotFoundError")
THERE = Seen("read", f"save of {M1}")
BROKEN = {"what was promised is there": 1}


class TestPromises:
    @pytest.mark.parametrize("seen", [LOST, GONE, Seen("wrong"), Seen("CorruptDataError"), Seen("foreign")])
    def test_without_a_death_nothing_may_go(self, seen: Seen) -> None:
        assert Story().saved(M1).rules({M1: seen}) == BROKEN
        others = Story().saved(M1).died("client 2").died("soak/planner").died("soak/catalog")
        assert others.rules({M1: seen}) == BROKEN
        assert Story().died("soak/shard-0").saved(M1).rules({M1: seen}) == BROKEN

    def test_what_was_in_memory_only_is_lost_by_name(self) -> None:
        story = Story().saved(M1).died("soak/shard-0", safe=False)
        assert not story.rules({M1: THERE})
        assert not story.rules({M1: LOST})
        assert story.rules({M1: GONE}) == BROKEN

    def test_what_was_in_memory_is_lost_by_name_also_when_all_died(self) -> None:
        story = Story().saved(M1).saved(M2, durable=True).died("soak/shard-0", "soak/planner", "soak/catalog")
        there = Seen("read", f"save of {M2}")
        assert not story.rules({M1: LOST, M2: there}, path=True)
        assert story.rules({M1: GONE, M2: there}, path=True) == BROKEN
        assert (
            story.tell("missing", model="m@1", began=5.0, error="ModelNotFoundError", text="none").rules(
                {M2: there}, path=True
            )
            == BROKEN
        )
        assert story.rules({M2: GONE}, path=True) == {"what was promised is there": 2}

    def test_what_was_durable_or_flushed_stays(self) -> None:
        durable = Story().saved(M1, durable=True).died("soak/shard-0", safe=False)
        assert durable.rules({M1: LOST}, path=True) == BROKEN
        flushed = Story().saved(M1).tell("flushed", began=2.0).died("soak/shard-0", safe=False)
        assert flushed.rules({M1: LOST}, path=True) == BROKEN
        too_early = Story().saved(M1).tell("flushed", began=0.5).died("soak/shard-0", safe=False)
        assert not too_early.rules({M1: LOST}, path=True)

    def test_with_replicas_one_death_loses_nothing(self) -> None:
        for what in ("soak/shard-0", "node"):
            assert Story().saved(M1).died(what).rules({M1: LOST}, replicas=2) == BROKEN
            assert not Story().saved(M1).died(what, safe=False).rules({M1: LOST}, replicas=2)

    def test_what_was_retired_stays_gone(self) -> None:
        asked = Story().saved(M1).tell("retiring", ref=str(M1))
        assert not asked.rules({M1: THERE})
        assert not asked.rules({M1: GONE})
        assert asked.tell("retired", ref=str(M1)).rules({M1: THERE}) == {"what was retired is gone": 1}

    def test_a_version_is_never_used_twice(self) -> None:
        assert Story().saved(M1, "a").saved(M1, "b").rules({}) == {"a version is never used twice": 1}
        assert Story().saved(M2).saved(M1).rules({}) == {"versions count up": 1}
        assert not Story().saved(M1).saved(M2).rules({})

    def test_a_version_is_what_was_saved(self) -> None:
        assert Story().saved(M1).rules({M1: Seen("read", "other")}) == {"a version is what was saved": 1}
        told = Story().saved(M1).tell("read", model="m@1", save="other", name="m", began=2.0)
        assert told.rules({M1: THERE}) == {"a read is of its version": 1}
        other = Story().saved(M1).tell("read", model="m", save=f"save of {M1}", name="n", began=2.0)
        assert other.rules({M1: THERE}) == {"a read is of its version": 1}

    def test_a_name_is_its_latest_version(self) -> None:
        story = Story().saved(M1).saved(M2)
        old = {"model": "m", "save": f"save of {M1}", "name": "m"}
        assert story.tell("read", began=4.0, **old).rules({}) == {"a name is its latest version": 1}
        assert not Story().saved(M1).saved(M2).tell("read", began=2.5, **old).rules({})  # both were right meanwhile
        died = Story().saved(M1, durable=True).saved(M2).died("soak/shard-0", safe=False)
        assert not died.tell("read", began=5.0, **old).rules({}, path=True)  # the latest that is left
        retired = Story().saved(M1).saved(M2).tell("retiring", ref=str(M2)).tell("read", began=4.5, **old)
        assert not retired.rules({})

    def test_a_refusal_is_held_against_what_was_promised(self) -> None:
        refused = {"error": "ModelNotFoundError", "text": "never saved"}
        assert Story().saved(M1).tell("missing", model="m@1", began=2.0, **refused).rules({}) == BROKEN
        assert Story().saved(M1).tell("missing", model="m", began=2.0, **refused).rules({}) == BROKEN
        assert not Story().saved(M1).tell("missing", model="m@1", began=0.5, **refused).rules({})
        gone = Story().saved(M1).tell("retiring", ref="m@1").tell("missing", model="m@1", began=2.0, **refused)
        assert not gone.rules({})
        lost = {"error": "ModelLostError", "text": "m@2 is lost", "model": "m", "began": 3.0}
        assert Story().saved(M1, durable=True).tell("missing", **lost).rules({}, path=True) == BROKEN
        died = Story().saved(M1, durable=True).died("soak/shard-0", safe=False).tell("missing", **lost)
        assert not died.rules({}, path=True)  # another save's version, which did not return, is lost

    def test_a_pin_holds_while_nothing_dies(self) -> None:
        broken = {"ref": "m@1", "text": "gone", "began": 3.0}
        assert Story().saved(M1).tell("unpinned", **broken).rules({}) == {"what is pinned stays": 1}
        assert not Story().saved(M1).died("soak/shard-0").tell("unpinned", **broken).rules({})

    @pytest.mark.parametrize(
        ("event", "rule"),
        [
            ("wrong", "no wrong byte"),
            ("foreign", "no foreign exception"),
            ("child", "a forked child reads what it inherited"),
            ("crashed", "nothing dies by itself"),
        ],
    )
    def test_what_clients_tell_is_a_finding(self, event: str, rule: str) -> None:
        facts = {"text": "it", "where": "there", "kind": "save", "what": "soak/planner", "pid": 1}
        assert Story().tell(event, **facts).rules({}) == {rule: 1}


class TestReport:
    OUTCOME = report.Outcome(
        "seed 3, round 1, shards (memory)",
        12.0,
        {"save": 2, "retire": 1},
        {"kill shard": 2},
        {"ModelLostError": 4},
        tuple({"rule": "no wrong byte", "expected": f"{n}", "found": "zeros"} for n in range(5)),
    )

    def test_a_table_counts_by_kind(self) -> None:
        stopped = report.Outcome("seed 3, round 2", 0.0, {}, {}, {}, (), "it goes on and on")
        assert report.table([self.OUTCOME, stopped]).splitlines() == [
            "operations      3  retire 1, save 2",
            "faults          2  kill shard 2",
            "refused         4  ModelLostError 4",
            "findings        6  no wrong byte 5, the round comes to its end 1",
        ]

    def test_a_finding_says_where_what_was_expected_and_what_was_found(self) -> None:
        text = report.findings(self.OUTCOME)
        assert text.startswith(
            "seed 3, round 1, shards (memory)\n  rule: no wrong byte\n  expected: 0\n  found: zeros\n"
        )
        assert text.endswith("rule: no wrong byte: 2 more")


def test_a_journal_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    for who in ("one", "two"):
        Journal(tmp_path / "journal", who).say("born", pid=1)
    with open(tmp_path / "journal", "ab") as file:
        file.write(b'{"event": "sav')
    assert [entry["who"] for entry in read([tmp_path / "journal"])] == ["one", "two"]


def test_only_processes_with_the_mark_are_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(ground.MARK, mark)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    environments = ({**os.environ}, {**os.environ, ground.MARK: "another's"})
    ours, others = (
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for env in environments
    )
    with ours, others:
        for process in (ours, others):
            assert process.stdout is not None
            process.stdout.readline()  # its environment is its own by now
        assert ground.processes(mark) == [ours.pid]
        assert not ground.send(others.pid, signal.SIGKILL)
        assert ground.end_all(mark) == 1
        assert ours.wait(30) == -signal.SIGKILL
        assert others.poll() is None
        others.kill()


WRITER = """
import os, sys
def attempt(folder):
    try:
        with open(os.path.join(folder, "file"), "wb", buffering=0) as file:
            file.write(b"abc")
            os.fsync(file)
        return 0
    except OSError as exc:
        return exc.errno
for _ in sys.stdin:
    print(*(attempt(folder) for folder in sys.argv[1:]), flush=True)
"""


@pytest.mark.skipif(disk.why_not() is not None, reason=str(disk.why_not()))
def test_a_disk_is_in_trouble_below_its_folder_only(tmp_path: Path) -> None:
    below, beside, own = (tmp_path / name for name in ("path", "path-beside", "own"))
    for folder in (below, beside, own):
        folder.mkdir()
    troubled = disk.Disk(below, own)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, below, beside],
        env={**os.environ, **troubled.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None

        def attempt() -> str:
            process.stdin.write("\n")
            return process.stdout.readline().strip()

        assert attempt() == "0 0"
        troubled.trouble("full disk")
        assert attempt() == f"{errno.ENOSPC} 0"
        troubled.trouble("failing disk")
        assert attempt() == f"{errno.EIO} 0"
        troubled.trouble("slow disk")
        assert attempt() == "0 0"
        troubled.heal()
        assert attempt() == "0 0"


@pytest.mark.own_cluster
@pytest.mark.timeout(1800)
def test_a_short_round_of_real_processes_has_no_finding() -> None:
    mode = Mode("short", ("kill client", "stop client", "kill shard"), path=True, store_bytes=64 * MIB, extra=SHORT)
    outcome = play(Round(SEED, 0, mode), seconds=900.0, faults=3)
    assert not outcome.wrong, report.findings(outcome)
    assert outcome.faults == {"kill client": 1, "stop client": 1, "kill shard": 1}
    assert outcome.operations
