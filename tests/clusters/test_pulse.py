"""What `tensorvine top` sees and draws, without a cluster."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console
from tensorvine.clusters.cli.top import drawn, follow
from tensorvine.clusters.pulse import Pulse
from tensorvine.store.errors import (
    OperationTimeoutError,
    RepositoryNotFoundError,
    ShardUnavailableError,
    TensorVineError,
)
from tensorvine.store.shard import ShardStats

Told = Mapping[int, ShardStats | TensorVineError]
SILENT = OperationTimeoutError("default/shard-1: stats: expected an answer within 2.0 s; the call timed out")


def stats(shard: int, requests: int = 0, **more: int) -> ShardStats:
    known = {"tensors": 2, "bytes_memory": 10, "bytes_allocated": 64, "bytes_disk": 0, "capacity": 1000}
    return ShardStats(shard=shard, requests=requests, **known | more)


def cells(line: str) -> list[str]:
    return line.split()


class Shards:
    """Shards that tell what a test says, look by look; each look is two seconds after the one before."""

    def __init__(self, *looks: Told) -> None:
        self.looks = list(looks)
        self.asked_where = 0
        self.gone = False
        self.now = 0.0
        self.pulse = Pulse(self._tell, self._where, self._check, lambda: self.now)

    def _tell(self) -> Told:
        self.now += 2.0
        told = self.looks.pop(0)
        if told is CTRL_C:
            raise KeyboardInterrupt  # a signal would be ignored where the tests run in the background
        return told

    def _where(self) -> dict[int, str]:
        self.asked_where += 1
        return {0: "10.0.0.1", 1: "10.0.0.2"}

    def _check(self) -> None:
        if self.gone:
            raise RepositoryNotFoundError("repository 'default': expected it to run; it was stopped")


CTRL_C: Told = {}
"""The look at which somebody presses Ctrl-C."""


class TestPulse:
    @pytest.mark.parametrize(
        ("counted", "rate"),
        [("requests", "requests_per_s"), ("bytes_saved", "saved_per_s"), ("bytes_sent", "sent_per_s")],
    )
    def test_requests_and_bytes_are_counted_since_the_look_before(self, counted: str, rate: str) -> None:
        looks: list[Told] = [{0: stats(0, **{counted: number})} for number in (10, 30, 4, 9)]
        pulse = Shards(*looks[:3], {0: SILENT}, looks[3], {}).pulse
        rates = [pulse.look()[0].as_dict().get(rate) for _ in range(5)]
        assert rates == [None, 10.0, 2.0, None, None]  # it began anew, and was silent

    def test_memory_in_use_is_what_autoscaling_counts(self) -> None:
        (beat,) = Shards({0: stats(0, bytes_staged=100, bytes_replicated=30)}).pulse.look()
        assert beat.bytes_used == 64 + 100 + 30

    def test_a_silent_shard_hides_none_of_the_others(self) -> None:
        first, second = Shards({1: SILENT, 0: stats(0)}).pulse.look()
        assert (first.shard, first.node, first.stats) == (0, "10.0.0.1", stats(0))
        assert (second.shard, second.node, second.stats, second.trouble) == (1, "10.0.0.2", None, str(SILENT))
        told = second.as_dict()
        assert (told["answers"], told["node"], told["trouble"]) == (False, "10.0.0.2", str(SILENT))

    def test_where_shards_are_is_asked_when_one_is_new_or_silent(self) -> None:
        one, two = {0: stats(0)}, {0: stats(0), 1: stats(1)}
        shards = Shards(one, one, two, two, {0: stats(0), 1: SILENT})
        shards.pulse.look()
        shards.pulse.look()
        shards.pulse.look()
        assert shards.asked_where == 1  # it knew where the second one is
        shards.pulse.look()
        shards.pulse.look()
        assert shards.asked_where == 2

    def test_when_no_shard_answers_it_looks_whether_the_repository_is_gone(self) -> None:
        dead = {0: ShardUnavailableError("default/shard-0: it died or is being restarted")}
        shards = Shards(dead, dead)
        assert shards.pulse.look()[0].stats is None
        shards.gone = True
        with pytest.raises(RepositoryNotFoundError, match="it was stopped"):
            shards.pulse.look()


class TestDrawn:
    def text(self, told: Told, before: Told | None = None, width: int = 100) -> list[str]:
        pulse = Shards(*([before] if before is not None else []), told).pulse
        if before is not None:
            pulse.look()
        out = Console(file=io.StringIO(), width=width)
        out.print(drawn("default", pulse, pulse.look(), width))
        assert isinstance(out.file, io.StringIO)
        return [line.rstrip() for line in out.file.getvalue().splitlines()]

    @pytest.mark.parametrize("width", [100, 80])
    def test_it_says_what_each_carries_and_who_waits(self, width: int) -> None:
        waits = stats(1, 5, waiting_for_memory=2, capacity=2000, bytes_unwritten=4_000)
        busy = stats(0, 90, bytes_saved=700_000_000, bytes_sent=40_000)
        lines = self.text({0: busy, 1: waits}, {0: stats(0, 50, bytes_saved=10**8), 1: stats(1, 5)}, width)
        rows = [
            "shard node used capacity full req/s saved/s sent/s waiting unwritten",
            "0 10.0.0.1 64 B 1.0 kB 6% 20.0 300.0 MB 20.0 kB 0 0",
            "1 10.0.0.2 64 B 2.0 kB 3% 0.0 0 0 mem 2 4.0 kB",
            "all 128 B 3.0 kB 4% 20.0 300.0 MB 20.0 kB mem 2 4.0 kB",
        ]
        if width < 100:
            for word in (" capacity", " 1.0 kB", " 2.0 kB", " 3.0 kB"):
                rows = [row.replace(word, "") for row in rows]
        assert lines[0].startswith("repository default, 20")
        assert [lines[number].split() for number in (1, 3, 4, 6)] == list(map(cells, rows))

    def test_a_silent_shard_is_shown_so(self) -> None:
        lines = self.text({0: stats(0, waiting_for_disk=1), 1: SILENT})
        assert lines[4].split() == cells("1 10.0.0.2 - - - - - - - -")
        assert "disk 1" in lines[6]
        assert lines[7].startswith("shard 1 does not answer: default/shard-1: stats: expected")

    def test_one_shard_needs_no_sum(self) -> None:
        assert not [line for line in self.text({0: stats(0)}) if line.startswith("all")]


class TestFollow:
    def shown(self, *looks: Told, terminal: bool) -> str:
        out = Console(file=io.StringIO(), width=80, height=20, force_terminal=terminal)
        follow(out, "default", Shards(*looks, CTRL_C).pulse, 0.0)
        assert isinstance(out.file, io.StringIO)
        return out.file.getvalue()

    def test_a_terminal_is_given_back_after_ctrl_c(self) -> None:
        text = self.shown({0: stats(0)}, {0: SILENT}, {0: stats(0)}, terminal=True)
        assert text.count("repository default") == 3
        assert text.count("does not answer") == 1
        assert text.startswith("\x1b[?1049h")
        assert text.endswith("\x1b[?1049l")

    def test_elsewhere_one_table_stands_below_the_other(self) -> None:
        text = self.shown({0: stats(0)}, {0: stats(0)}, terminal=False)
        assert text.count("repository default") == 2
        assert "\x1b" not in text
