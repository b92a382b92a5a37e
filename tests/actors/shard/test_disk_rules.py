"""What a shard does with its path, held to the rules of docs/design/persistence.md, in one process and without Ray.

The disk is real; what it refuses, and when, is scripted. Nothing here waits for a time.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tensorvine.actors.rpc.messages import Chains, Wanted
from tensorvine.actors.shard.disk import persister as persister_module
from tensorvine.actors.shard.disk.care import named_here
from tensorvine.actors.shard.disk.persister import Job, Persister
from tensorvine.actors.shard.disk.tiers import Tiers
from tensorvine.actors.shard.handoff.reconciliation import claims_on
from tensorvine.store.archive.archive import Archive
from tensorvine.store.archive.local import LocalDirectory
from tensorvine.store.errors import CorruptDataError, ModelLostError, StorageError
from tensorvine.store.holders import Holder, Save
from tensorvine.store.recovery import readmit
from tensorvine.store.refs import ModelRef
from tensorvine.store.segments.arena import Part
from tensorvine.store.segments.blockheader import HEADER_BYTES
from tensorvine.store.segments.segment import SegmentId, Stored
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import Header, TensorEntry, encode_body
from tensorvine.store.versions.retention import Candidate, Retention

from tests.support.contexts import context_of, with_memory
from tests.support.disk import MIB, manifests, segments
from tests.support.disklife import CAPACITY, GRAPH, Life, note, put
from tests.support.waiting import eventually


class Bench:
    """One shard's memory and disk, on their own."""

    def __init__(self, path: Path) -> None:
        self.state = ShardState(0, lambda name: 0)
        self.state.open("c", 0.0)
        context = with_memory(context_of(self.state, capacity=CAPACITY))
        self.lock = context.lock
        self.segment_memory = context.segment_memory
        self.archive = Archive(str(path), 1)
        self.tiers = Tiers(context, self.archive, None, self.settle, self.nowhere)
        self.on_disk: list[ModelRef] = []
        self.persister = Persister(
            index=0,
            where=lambda segment: 0,
            archive=self.archive,
            bytes_unwritten=CAPACITY,
            parent_table=lambda ref: None,
            architecture=lambda key: (GRAPH, None),
            store=self.store,
            on_disk=lambda ref, parts: self.on_disk.append(ref),
            progressed=self.settle,
            counts=context.counts,
        )

    def nowhere(self, segment: SegmentId) -> Stored:
        raise ModelLostError(f"{segment}: no other shard")

    def store(self, shard: int, wanted: Mapping[SegmentId, Sequence[Wanted]]) -> Chains:
        return self.tiers.store(wanted)

    def settle(self) -> None:
        with self.lock:
            self.segment_memory.settle()

    def fill(self, holder: Holder, segment: SegmentId, sizes: Sequence[int], seed: int = 0) -> None:
        """Have a segment of noise in the memory."""
        with self.lock:
            (offset,) = self.segment_memory.grant(Save("c", 1), [sum(sizes)])
            part = Part(offset, sum(sizes))
            self.segment_memory.memory.part(part)[:] = np.random.default_rng(seed).integers(
                0, 256, sum(sizes), np.uint8
            )
            self.state.adopt(Save("c", 1), segment, part, sizes)
            self.segment_memory.keep(part, segment)
            self.state.hold(holder, {segment: range(len(sizes))})
            self.state.release(Save("c", 1))

    def job(self, ref: ModelRef, segment: SegmentId, sizes: Sequence[int], urgent: bool = True) -> Job:
        entries = {f"t{i}": TensorEntry("uint8", (n,), n, None, segment, i) for i, n in enumerate(sizes)}
        return Job(
            Header(
                ref=ref,
                parent=None,
                quality=None,
                metadata="{}",
                created_ns=1,
                graph_key=b"key",
                bytes_owned=1,
                bytes_total=1,
            ),
            encode_body(entries),
            urgent,
        )

    def release(self, holder: Holder) -> None:
        with self.lock:
            self.state.release(holder)
        self.settle()

    def let_go(self) -> list[str]:
        """Return the files that nobody needs any more, and delete them."""
        dead, self.state.dead_files = self.state.dead_files, []
        self.tiers.forget(dead)
        self.archive.delete_segments(dead)
        return dead


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wanted(sizes: Sequence[int]) -> list[Wanted]:
    return [Wanted(i, f"t{i}", None, "uint8", (n,), None) for i, n in enumerate(sizes)]


class TestRefusedSaves:
    def test_a_refused_save_locks_no_memory_however_long_its_error_is_kept(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = bench.archive.directory.write

        def full(name: str, fill: Callable[[Any], None]) -> int:
            try:
                raise OSError(28, "No space left on device")
            except OSError as exc:
                raise StorageError(f"{name}: {exc}") from exc

        monkeypatch.setattr(bench.archive.directory, "write", full)
        ref, segment, kept = ModelRef("m", 1), (0, 1), list[BaseException | None]()
        bench.fill(ref, segment, [CAPACITY // 2, CAPACITY // 2])
        job = bench.job(ref, segment, [CAPACITY // 2, CAPACITY // 2])
        bench.persister.add(job)
        kept.append(job.done.exception(60))
        assert isinstance(kept[0], StorageError)
        bench.release(ref)
        monkeypatch.setattr(bench.archive.directory, "write", real)
        with bench.lock:
            assert bench.segment_memory.grant(Save("c", 2), [CAPACITY]) == [HEADER_BYTES]

    def test_a_flush_does_not_call_on_disk_what_was_given_up(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited, flushing, real = threading.Event(), threading.Event(), bench.persister._changed.wait

        def lost(*arguments: object) -> Chains:
            assert waited.wait(60)
            raise ModelLostError("its segment is lost")

        def wait(timeout: float | None = None) -> bool:
            if flushing.is_set():
                waited.set()
            return real(timeout)

        monkeypatch.setattr(bench.persister, "_store", lost)
        monkeypatch.setattr(bench.persister._changed, "wait", wait)
        bench.fill(ModelRef("m", 1), (0, 1), [64])
        bench.persister.add(bench.job(ModelRef("m", 1), (0, 1), [64], urgent=False))
        flushing.set()
        with pytest.raises(StorageError, match="m@1: its segment is lost"):
            bench.persister.flush(60)

    def test_an_error_that_waits_to_be_tried_again_holds_no_memory_either(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> int:
            raise StorageError("refused")

        monkeypatch.setattr(bench.archive.directory, "write", fail)
        ref, segment = ModelRef("m", 1), (0, 1)
        bench.fill(ref, segment, [CAPACITY])
        bench.persister.add(bench.job(ref, segment, [CAPACITY], urgent=False))
        eventually(lambda: bench.persister.error is not None, "the first try has failed")
        found = bench.state.segment(segment)
        assert found is not None
        eventually(
            lambda: not bench.segment_memory.memory.is_read(found.handle),
            "nobody has a view between two tries",
        )


class TestFlush:
    def test_a_flush_gives_up_what_the_disk_has_refused_for_long_and_names_it(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = bench.archive.directory.write

        def fail(*arguments: object) -> int:
            raise StorageError("refused")

        monkeypatch.setattr(persister_module, "GIVE_UP_S", 0.0)
        monkeypatch.setattr(bench.archive.directory, "write", fail)
        refs = [ModelRef("m", number) for number in range(1, 13)]
        for number, ref in enumerate(refs):
            bench.fill(ref, (0, number), [64])
            bench.persister.add(bench.job(ref, (0, number), [64], urgent=False))
        named = ", ".join(map(str, refs[:10]))
        with pytest.raises(StorageError, match=rf"12 versions \({named}, 2 more\), refused .* for \d+ s: .*; refused"):
            bench.persister.flush(600)
        monkeypatch.setattr(bench.archive.directory, "write", real)
        monkeypatch.setattr(persister_module, "GIVE_UP_S", 60.0)
        bench.persister.flush(60)
        assert bench.on_disk == refs
        assert math.isinf(bench.persister._refused_since)

    def test_a_save_that_waits_for_its_own_write_does_not_begin_the_minute_again(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> int:
            raise StorageError("refused")

        monkeypatch.setattr(bench.archive.directory, "write", fail)
        bench.fill(ModelRef("m", 1), (0, 1), [64])
        bench.persister.add(bench.job(ModelRef("m", 1), (0, 1), [64], urgent=False))
        eventually(lambda: not math.isinf(bench.persister._refused_since), "the first try has failed")
        since = bench.persister._refused_since
        bench.fill(ModelRef("n", 1), (0, 2), [64])
        durable = bench.job(ModelRef("n", 1), (0, 2), [64])
        with bench.persister._changed:
            bench.persister._jobs[ModelRef("m", 1)].held = True
        bench.persister.add(durable)
        assert isinstance(durable.done.exception(60), StorageError)
        assert bench.persister._refused_since == since
        assert bench.persister.error is not None


class TestDeletes:
    def test_a_refused_manifest_cannot_come_back_when_the_power_fails(
        self, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        comes_back: set[str] = set()
        unlink, fsync = os.unlink, os.fsync

        def noted(path: os.PathLike[str], **named: Any) -> None:
            unlink(path, **named)
            folder = os.readlink(f"/proc/self/fd/{named['dir_fd']}") if "dir_fd" in named else ""
            comes_back.add(os.path.join(folder, os.fspath(path)))

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            comes_back.difference_update({path for path in comes_back if Path(path).parent == folder})

        monkeypatch.setattr(os, "unlink", noted)
        monkeypatch.setattr(os, "fsync", synced)

        def unheard(ref: ModelRef, parts: object) -> None:
            raise ModelLostError("a shard that has its tensors lost them")

        monkeypatch.setattr(bench.persister, "_on_disk", unheard)
        bench.fill(ModelRef("m", 1), (0, 1), [MIB])
        job = bench.job(ModelRef("m", 1), (0, 1), [MIB])
        bench.persister.add(job)
        assert isinstance(job.done.exception(60), ModelLostError)
        assert manifests(tmp_path) == []
        assert comes_back == set()


class TestFilesThatAreReplaced:
    def test_a_load_that_meets_a_retirement_and_a_rewrite_calls_no_sound_file_corrupt(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes, segment = [MIB, 3 * MIB], (0, 1)
        bench.fill(ModelRef("m", 1), segment, sizes)
        bench.tiers.store({segment: wanted(sizes)})
        with bench.lock:
            bench.state.hold(ModelRef("m", 2), {segment: [0]})
            assert bench.state.residents.evict(segment)
        chosen, _ = bench.tiers.plan(segment, [0, 1])
        real = bench.tiers._file

        def retired_first(stored: Stored) -> Any:
            monkeypatch.setattr(bench.tiers, "_file", real)
            with bench.lock:
                bench.state.release(ModelRef("m", 1))
            bench.tiers.rewrite(segment)
            bench.let_go()
            return real(stored)

        monkeypatch.setattr(bench.tiers, "_file", retired_first)
        part = Part(bench.segment_memory.grant(Save("c", 9), [4 * MIB])[0], 4 * MIB)
        assert bench.tiers.load(segment, chosen, part, Save("c", 9)) is None
        chosen, _ = bench.tiers.plan(segment, [0])
        part = Part(bench.segment_memory.grant(Save("c", 9), [4 * MIB])[0], 4 * MIB)
        assert bench.tiers.load(segment, chosen, part, Save("c", 9)) is not None

    def test_one_that_meets_it_between_its_look_and_the_file_neither(self, bench: Bench) -> None:
        sizes, segment = [MIB, 3 * MIB], (0, 1)
        bench.fill(ModelRef("m", 1), segment, sizes)
        bench.tiers.store({segment: wanted(sizes)})
        with bench.lock:
            bench.state.hold(ModelRef("m", 2), {segment: [0]})
            bench.state.residents.evict(segment)
        chosen, _ = bench.tiers.plan(segment, [0, 1])
        part = Part(bench.segment_memory.grant(Save("c", 9), [4 * MIB])[0], 4 * MIB)
        real, first = bench.segment_memory.memory.part, [True]

        def rewritten_first(part: Part) -> np.ndarray:
            if first.pop() if first else False:
                bench.release(ModelRef("m", 1))
                bench.tiers.rewrite(segment)
            return real(part)

        bench.segment_memory.memory.part = rewritten_first
        assert bench.tiers.load(segment, chosen, part, Save("c", 9)) is None

    def test_a_file_that_is_damaged_is_called_so(self, bench: Bench, tmp_path: Path) -> None:
        bench.fill(ModelRef("m", 1), (0, 1), [MIB])
        bench.tiers.store({(0, 1): wanted([MIB])})
        with bench.lock:
            bench.state.residents.evict((0, 1))
        (file,) = segments(tmp_path)
        with open(file, "r+b") as content:
            content.seek(-100_000, 2)
            content.write(b"other")
        part = Part(bench.segment_memory.grant(Save("c", 9), [MIB])[0], MIB)
        with pytest.raises(CorruptDataError, match=f"{file}.*checksum"):
            bench.tiers.load((0, 1), [0], part, Save("c", 9))


def calm() -> bool:
    return True


A, B = ModelRef("a", 1), ModelRef("b", 1)
ARRAYS = [np.full(1000 + n, n, np.uint8) for n in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A repository of `a` and `b`: one file has a tensor of both and one of each, another is of `b` alone."""
    archive = Archive(str(tmp_path), 1)
    put(archive, (0, 1), dict(enumerate(ARRAYS)))
    put(archive, (0, 2), {0: ARRAYS[0]})
    note(archive, A, [(1, 0, 1000), (1, 1, 1001)])
    note(archive, B, [(1, 0, 1000), (1, 2, 1002), (2, 0, 1000)])
    return tmp_path


class Moody:
    """A disk that does not give one file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int = errno.EIO) -> None:
        real = LocalDirectory.read
        self.ill = True

        def read(directory: LocalDirectory, wanted: str) -> Any:
            if self.ill and wanted == name:
                raise StorageError(f"{wanted}: expected to read it") from OSError(number, os.strerror(number))
            return real(directory, wanted)

        monkeypatch.setattr(LocalDirectory, "read", read)


class TestManifestsThatCannotBeRead:
    @pytest.mark.parametrize("again", [True, False], ids=["again", "first"])
    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENXIO, errno.EACCES])
    def test_what_cannot_be_read_now_is_not_lost_and_nothing_that_it_may_name_goes(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, number: int
    ) -> None:
        disk = Moody(monkeypatch, "manifests/b@1.arrow", number)
        before = segments(path)
        life = Life(path, again)
        for version in (1, None):
            with pytest.raises(StorageError, match=r"b@1 cannot be read now.*b@1.arrow"):
                life.state.resolve("b", version)
        assert life.state.version_facts()[B] == (None, True)
        assert life.state.stats().manifests_unread == 1
        assert life.content(A) == [ARRAYS[0].tobytes(), ARRAYS[1].tobytes()]
        life.retire(A)
        for _ in range(3):
            assert life.history.care.read_again() == 0
            life.history.care.look(calm)
        assert segments(path) == before
        disk.ill = False
        assert life.history.care.read_again() == 1
        life.state.check()
        assert life.state.resolve("b", None) == B
        assert life.state.stats().manifests_unread == 0
        assert life.content(B) == [ARRAYS[0].tobytes(), ARRAYS[2].tobytes(), ARRAYS[0].tobytes()]
        life.retire(B)
        assert segments(path) == []

    def test_other_shards_are_told_to_keep_it(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Moody(monkeypatch, "manifests/b@1.arrow")
        life = Life(path, again=True)
        assert claims_on(life.state, 1).keys() == {ModelRef("b", 1)}
        assert named_here(life.state, [(1, 9)]) == {(1, 9)}

    def test_what_only_it_names_is_answered_as_unreadable_and_not_as_lost(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Moody(monkeypatch, "manifests/b@1.arrow")
        life = Life(path, again=True)
        for wanted in ({(0, 1): [2]}, {(0, 2): [0]}, {(0, 77): [0]}):
            with pytest.raises(StorageError, match="cannot be read now, because b@1 cannot"):
                life.state.absent(wanted)
            with pytest.raises(StorageError, match="cannot be read now, because b@1 cannot"):
                life.state.hold(ModelRef("c", 1), wanted)
        assert life.state.absent({(0, 1): [0, 1]}) == {(0, 1): [0, 1]}

    def test_a_new_generation_of_a_file_keeps_what_it_may_name(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Moody(monkeypatch, "manifests/b@1.arrow")
        life = Life(path, again=True)
        with life.history._tiers._alone((0, 1)):
            life.history._tiers._write((0, 1), [])
        with life.lock:
            life.history.tidy()
        life.history.persister._deleter.submit(int).result(60)
        assert [file.name for file in segments(path)] == ["1.1.arrow", "2.0.arrow"]
        disk.ill = False
        life.history.care.read_again()
        assert life.content(B) == [ARRAYS[0].tobytes(), ARRAYS[2].tobytes(), ARRAYS[0].tobytes()]

    def test_a_damaged_one_is_called_so_and_its_files_stay(self, path: Path) -> None:
        file, before = path / "manifests" / "b@1.arrow", segments(path)
        whole = file.read_bytes()
        file.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
        life = Life(path, again=False)
        with pytest.raises(CorruptDataError, match=r"b@1: .*/b@1.arrow"):
            life.state.resolve("b", 1)
        life.retire(A)
        life.history.care.look(calm)
        life.history.care.look(calm)
        assert segments(path) == before
        file.write_bytes(whole)
        assert life.history.care.read_again() == 1
        assert len(life.content(B)) == 3

    def test_one_that_is_not_there_any_more_is_lost_by_name(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Moody(monkeypatch, "manifests/b@1.arrow")
        life = Life(path, again=True)
        (path / "manifests" / "b@1.arrow").unlink()
        disk.ill = False
        assert life.history.care.read_again() == 1
        with pytest.raises(ModelLostError, match="b@1 is lost"):
            life.state.resolve("b", 1)
        assert life.content(A) == [ARRAYS[0].tobytes(), ARRAYS[1].tobytes()]

    def test_a_save_goes_on_from_the_newest_version_that_can_be_read(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        note(Archive(str(path), 1), ModelRef("b", 2), [(2, 0, 1000)])
        Moody(monkeypatch, "manifests/b@2.arrow")
        life = Life(path, again=True)
        with pytest.raises(StorageError, match="b@2 cannot be read now"):
            life.state.resolve("b", None)
        assert life.state.newer("b", 0) == B
        assert life.state._names["b"].next_version == 3

    def test_it_moves_with_its_name(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Moody(monkeypatch, "manifests/b@1.arrow")
        life, successor = Life(path, again=True), ShardState(1, lambda name: 1)
        bundle = life.state.hand_over(["b"])
        assert dict(bundle.ledger.names["b"].living) == {1: None}
        successor.take_over(bundle, 0.0)
        with pytest.raises(StorageError, match="b@1 cannot be read now"):
            successor.resolve("b", 1)
        disk.ill = False
        successor.where = lambda segment: 0
        readmit(successor, B, life.history.persister.archive.read_manifest(B), {})
        assert successor.resolve("b", None) == B
        assert life.history.care.read_again() == 1
        assert not life.state.knows("b")
        assert len(life.content(B)) == 3


class TestOrphans:
    def test_files_of_no_owner_are_counted_and_go_at_the_second_look(self, path: Path) -> None:
        life = Life(path, again=True)
        before, archive = segments(path), Archive(str(path), 1)
        put(archive, (0, 9), {0: ARRAYS[0]})
        put(archive, (0, 1), {0: ARRAYS[0]}, generation=3)
        with life.lock:
            segment = life.state.segment((0, 1))
            assert segment is not None
            segment.files = 5  # as if 3 and 4 had been begun
        life.history.care.look(calm)
        assert life.history.care.orphans == 2
        assert len(segments(path)) == len(before) + 2
        life.history.care.look(calm)
        assert life.history.care.orphans == 0
        assert segments(path) == before

    def test_one_that_is_being_written_or_is_younger_than_the_look_stays(self, path: Path) -> None:
        life = Life(path, again=True)
        archive, tiers = Archive(str(path), 1), life.history._tiers
        put(archive, (0, 9), {0: ARRAYS[0]})
        put(archive, (0, 1), {0: ARRAYS[0]}, generation=1)  # the next of a segment that is there
        with tiers._alone((0, 9)):
            for _ in range(3):
                life.history.care.look(calm)
        assert (life.history.care.orphans, len(segments(path))) == (0, 4)
        life.history.care.look(calm)
        put(archive, (0, 8), {0: ARRAYS[0]})
        life.history.care.look(calm)
        assert [file.name for file in segments(path)] == ["1.0.arrow", "1.1.arrow", "2.0.arrow", "8.0.arrow"]

    def test_there_is_no_look_while_others_have_not_said_what_they_need_or_things_move(self, path: Path) -> None:
        life = Life(path, again=True)
        put(Archive(str(path), 1), (0, 9), {0: ARRAYS[0]})
        still, look = life.peers.topology, life.history.care.look
        look(calm)
        for _ in range(2):
            look(lambda: False)
        life.peers.topology = still.warned([0])
        look(calm)
        life.peers.topology = still.grown([7])
        look(calm)
        assert len(segments(path)) == 3
        life.peers.topology = still
        look(calm)
        assert len(segments(path)) == 3
        look(calm)
        assert len(segments(path)) == 2

    def test_what_was_left_half_written_goes_and_what_is_being_written_stays(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A writer was killed; another one's disk failed, and did not take back what was written."""
        life, directory = Life(path, again=True), LocalDirectory(path)
        (path / "segments" / ".killed.tmp").write_bytes(b"half")

        def fails(sink: Any, **_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", fails)
            with pytest.raises(StorageError):
                directory.write("manifests/m@1.arrow", fails)
        assert len(list(path.rglob("*.tmp"))) == 2
        left: list[int] = []

        def fill(sink: Any) -> None:
            for _ in range(3):
                life.history.care.look(calm)
                left.append(len(list(path.rglob("*.tmp"))))
            sink.write(b"whole")

        directory.write("segments/note", fill)
        assert left == [3, 1, 1]
        assert directory.read("segments/note").to_pybytes() == b"whole"
        assert life.history.care.orphans == 0

    def test_what_a_home_names_stays(self, path: Path) -> None:
        """A version in memory, whose segment's shard started again between its file and its manifest."""
        life = Life(path, again=True)
        put(Archive(str(path), 1), (0, 9), {0: ARRAYS[0]})
        life.state._begun[ModelRef("m", 1)] = (b"key", {(0, 9): [0]})
        for _ in range(3):
            life.history.care.look(calm)
        assert len(segments(path)) == 3


class Bad(Retention):
    """A policy that the user wrote."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def keep(self, versions: Sequence[Candidate]) -> set[ModelRef]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast("set[ModelRef]", self.answer)


class TestPoliciesOfTheUser:
    @pytest.mark.parametrize("answer", [KeyError("no"), None, ["a@1"], {"a@1"}, 3], ids=repr)
    def test_one_that_fails_lets_nothing_go_and_is_blamed_once(
        self, path: Path, answer: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        life = Life(path, again=True, keep=Bad(answer))
        with life.lock:
            assert [life.history.retain("a") for _ in range(3)] == [[], [], []]
        assert not life.state.residents._cold
        blamed = [record.message for record in caplog.records if "retention policy" in record.message]
        assert len(blamed) == 1
        assert "Bad" in blamed[0]
