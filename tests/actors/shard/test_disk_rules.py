"""What a shard does with its path, in one process and without Ray. The disk is real; what it refuses is scripted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorvine.actors.shard.context import ShardContext
from tensorvine.actors.shard.disk import persister as persister_module
from tensorvine.actors.shard.disk.persister import Persister
from tensorvine.actors.shard.disk.tiers import Tiers
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import CorruptDataError, StorageError
from tensorvine.store.holders import Request
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import HEADER_BYTES
from tensorvine.store.segments.segment import File, Label, SegmentId
from tensorvine.store.shard import ShardState

from tests.support.contexts import context_of
from tests.support.disklife import CAPACITY, MIB
from tests.support.waiting import eventually

SEGMENT = (0, 1)
SAVE, OTHER = Request("c", 1), Request("c", 9)


class Bench:
    """One shard's memory and disk, on their own; the catalog takes every file."""

    def __init__(self, path: Path) -> None:
        self.state = ShardState(0, 1)
        self.context: ShardContext = context_of(self.state, capacity=CAPACITY)
        self.lock = self.context.lock
        self.segment_memory = self.context.segment_memory
        self.archive = Archive(str(path))
        self.tiers = Tiers(self.context, self.archive, None, self.settle)
        self.persister = Persister(self.context, self.tiers, CAPACITY, self.settle, lambda: None)

    def settle(self) -> None:
        with self.lock:
            for segment in self.state.offered():
                self.state.accept(segment)
            self.segment_memory.settle()

    def fill(self, segment: SegmentId, sizes: Sequence[int]) -> None:
        """Have a segment of noise in the memory."""
        with self.lock:
            (offset,) = self.segment_memory.grant(SAVE, [sum(sizes)])
            part = Part(offset, sum(sizes))
            noise = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
            self.segment_memory.memory.part(part)[:] = noise
            labels = [Label(slot, f"t{slot}", None, "uint8", (size,)) for slot, size in enumerate(sizes)]
            self.state.stage(SAVE, segment, part, sizes, labels)
            self.segment_memory.keep(part, segment)
            self.state.commit(SAVE, {segment: range(len(sizes))})

    def write(self, segment: SegmentId) -> None:
        self.tiers.write(segment)
        self.settle()

    def free(self, segment: SegmentId, *slots: int) -> None:
        with self.lock:
            self.state.free({segment: slots})
        self.settle()

    def evict(self, segment: SegmentId) -> None:
        with self.lock:
            assert self.state.residents.evict(segment)

    def granted(self, nbytes: int) -> Part:
        with self.lock:
            return Part(self.segment_memory.grant(OTHER, [nbytes])[0], nbytes)

    def delete_dead(self) -> None:
        dead, self.state.dead_files = self.state.dead_files, []
        self.tiers.forget(dead)
        self.archive.delete_segments(dead)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class TestRefused:
    def test_what_waits_to_be_written_again_locks_no_memory(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(name: str, fill: Callable[[Any], None]) -> int:
            raise StorageError(f"{name}: no space left")

        monkeypatch.setattr(bench.archive.directory, "write", full)
        bench.fill(SEGMENT, [CAPACITY // 2, CAPACITY // 2])
        bench.persister.add([SEGMENT])
        eventually(lambda: bench.persister.error is not None, "the first try has failed")
        error = bench.persister.late("save of m")
        assert isinstance(error, StorageError)
        bench.free(SEGMENT, 0, 1)

        def room() -> list[int]:
            with bench.lock:
                return bench.segment_memory.grant(OTHER, [CAPACITY])

        assert eventually(room, "nobody has a view between two tries") == [HEADER_BYTES]
        eventually(lambda: bench.persister.behind() == (0, 0), "nothing waits")

    @pytest.mark.parametrize("where", ["settle", "encode"])
    def test_the_threads_that_write_outlive_any_exception(
        self, bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(persister_module, "RETRY_LAST_S", 0.01)
        failing = 2
        write, settle = bench.tiers.write, bench.settle

        def fail() -> None:
            nonlocal failing
            failing -= 1
            if failing >= 0:
                raise RuntimeError("nobody expected this")

        def failing_write(segment: SegmentId, plain: bool = False) -> None:
            fail()
            write(segment, plain)

        def failing_settle() -> None:
            settle()
            fail()

        if where == "encode":
            monkeypatch.setattr(bench.tiers, "write", failing_write)
        else:
            monkeypatch.setattr(bench.persister, "_settle", failing_settle)
        with caplog.at_level(logging.WARNING):
            for number in (1, 2, 3):
                bench.fill((0, number), [64])
                bench.persister.add([(0, number)])
            eventually(lambda: bench.persister.behind() == (0, 0), "nothing waits")
        bench.settle()
        assert all(segment.is_safe for segment in bench.state.segments())
        assert "nobody expected this" in caplog.text


class TestFilesThatAreReplaced:
    def test_a_load_that_meets_a_retirement_and_a_rewrite_calls_no_sound_file_corrupt(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.fill(SEGMENT, [MIB, 3 * MIB])
        bench.write(SEGMENT)
        bench.evict(SEGMENT)
        chosen, _ = bench.tiers.plan(SEGMENT, [0, 1])
        real = bench.tiers._file

        def freed_first(stored: File) -> Any:
            monkeypatch.setattr(bench.tiers, "_file", real)
            bench.free(SEGMENT, 1)
            bench.write(SEGMENT)
            bench.delete_dead()
            return real(stored)

        monkeypatch.setattr(bench.tiers, "_file", freed_first)
        assert bench.tiers.load(SEGMENT, chosen, bench.granted(4 * MIB), OTHER) is None
        chosen, _ = bench.tiers.plan(SEGMENT, [0])
        assert bench.tiers.load(SEGMENT, chosen, bench.granted(4 * MIB), OTHER) is not None

    def test_one_that_meets_it_between_its_look_and_the_file_neither(self, bench: Bench) -> None:
        bench.fill(SEGMENT, [MIB, 3 * MIB])
        bench.write(SEGMENT)
        bench.evict(SEGMENT)
        chosen, _ = bench.tiers.plan(SEGMENT, [0, 1])
        part = bench.granted(4 * MIB)
        real, first = bench.segment_memory.memory.part, [True]

        def rewritten_first(part: Part) -> np.ndarray:
            if first.pop() if first else False:
                bench.free(SEGMENT, 1)
                bench.write(SEGMENT)
            return real(part)

        bench.segment_memory.memory.part = rewritten_first
        assert bench.tiers.load(SEGMENT, chosen, part, OTHER) is None

    def test_a_file_that_is_damaged_is_called_so(self, bench: Bench, tmp_path: Path) -> None:
        bench.fill(SEGMENT, [MIB])
        bench.write(SEGMENT)
        bench.evict(SEGMENT)
        (file,) = tmp_path.glob("segments/*.arrow")
        with open(file, "r+b") as content:
            content.seek(-100_000, 2)
            content.write(b"other")
        with pytest.raises(CorruptDataError, match=f"{file}.*checksum"):
            bench.tiers.load(SEGMENT, [0], bench.granted(MIB), OTHER)

    def test_no_two_shards_and_no_two_processes_write_the_same_file(self) -> None:
        names: set[int] = set()
        for index in (0, 1, 70_000):
            for incarnation in (1, 2):
                state = ShardState(index, incarnation)
                state.stage(SAVE, SEGMENT, b"few", [3])
                segment = state.segment(SEGMENT)
                assert segment is not None
                names |= {state.next_generation(segment) for _ in range(10)}
        assert len(names) == 60
        assert max(names) < 10**18
