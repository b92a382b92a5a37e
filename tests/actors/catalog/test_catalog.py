"""A catalog and shards: saves, loads, retirements, and deaths of either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorvine.actors.catalog import placement
from tensorvine.actors.catalog.lines import SILENT_S, Line
from tensorvine.actors.catalog.parts.shards import Shards
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.catalog_messages import Declared
from tensorvine.actors.rpc.registry import FLOOR
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts.copies import Copies
from tensorvine.store.errors import (
    ModelLostError,
    ModelNotFoundError,
    OperationTimeoutError,
    StorageError,
    TensorVineError,
)
from tensorvine.store.holders import Lease
from tensorvine.store.refs import ModelRef

from tests.support.catalog_room import LARGE, CatalogRoom, catalog_room
from tests.support.shard_room import CLIENT, WAIT_S, disk_at
from tests.support.waiting import eventually


def until(condition: Callable[[], object]) -> None:
    eventually(condition, "the catalog and its shards to agree", ignoring=(TensorVineError, AssertionError))


def calm(room: CatalogRoom) -> None:
    """Have all clients known, so that the catalog frees what may be freed."""
    room.ask(CatalogCalls.renew(CLIENT, Declared((), room.number, room.real._context.lease.number)))


def is_empty(room: CatalogRoom) -> bool:
    return not any(list(room.state(index).segments()) or room.state(index).known_files for index in room.shards)


@pytest.mark.parametrize("on_path", [False, True])
def test_save_load_retire(tmp_path: Path, on_path: bool) -> None:
    disk = disk_at(tmp_path / "path") if on_path else None
    with catalog_room(tmp_path / "private", 2, disk) as room:
        first = room.saved(b"abcd", LARGE)
        second = room.saved(LARGE[::-1], shard=1)
        assert room.read(first) == [b"abcd", LARGE]
        assert room.read(second) == [LARGE[::-1]]
        assert room.ask(CatalogCalls.models("")) == [first, second]
        if on_path:
            room.ask(CatalogCalls.flush(30.0))
            assert len(list((tmp_path / "path" / "manifests").iterdir())) == 2
        calm(room)
        room.retire(first)
        room.retire(second)
        with pytest.raises(ModelNotFoundError):
            room.locate(first)
        until(lambda: is_empty(room))
        if on_path:
            until(lambda: not list((tmp_path / "path" / "segments").iterdir()))
        room.ask(CatalogCalls.check())


def test_a_pinned_version_stays_until_its_pin_goes(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private") as room:
        ref = room.saved(LARGE)
        query = room.request()
        assert room.ask(CatalogCalls.pin({Lease(query): ref})) == {}
        room.ask(CatalogCalls.renew(CLIENT, Declared((query.number,), room.number, room.real._context.lease.number)))
        room.retire(ref)
        assert room.read(ref) == [LARGE]
        room.ask(CatalogCalls.unpin([Lease(query)]))
        until(lambda: is_empty(room))


@pytest.mark.parametrize("on_path", [False, True])
def test_the_catalog_starts_again(tmp_path: Path, on_path: bool) -> None:
    disk = disk_at(tmp_path / "path") if on_path else None
    with catalog_room(tmp_path / "private", 2, disk) as room:
        first, second, third = room.saved(LARGE), room.saved(b"abcd", shard=1), room.saved(b"efgh", name="n")
        calm(room)
        room.retire(second)
        room.start_catalog()
        until(lambda: room.read(first) == [LARGE])
        assert room.read(third) == [b"efgh"]
        assert room.ask(CatalogCalls.models("")) == [first, third]
        assert room.saved(b"ijkl") == ModelRef("m", 3)
        calm(room)
        until(lambda: len(list(room.state(1).segments())) == 0)
        room.ask(CatalogCalls.check())


def test_only_a_later_term_waits_for_clients_before_it_frees(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private") as room:
        room.saved(LARGE)
        placement: Any = room.real._context.on_freed
        assert placement.__self__.may_free
        room.start_catalog()
        later: Any = room.real._context.on_freed
        until(lambda: later.__self__._awaited == {CLIENT})
        assert not later.__self__.may_free
        room.ask(CatalogCalls.goodbye(CLIENT))
        assert later.__self__.may_free


def test_a_retirement_is_answered_alike_by_the_next_term(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private") as room:
        ref, request = room.saved(LARGE), room.request()
        assert room.ask(CatalogCalls.retire(request, "m", None)) == ref
        room.saved(b"abcd")
        room.start_catalog()
        assert room.ask(CatalogCalls.retire(request, "m", None)) == ref
        assert len(room.ask(CatalogCalls.models(""))) == 1


def test_a_shard_that_dies_loses_what_it_alone_had(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 2) as room:
        lost, kept = room.saved(LARGE), room.saved(LARGE, shard=1)
        room.kill_shard(0)
        until(lambda: room.ask(CatalogCalls.models("")) == [kept])
        with pytest.raises(ModelLostError, match="m@1 is lost"):
            room.locate(lost)
        room.retire(lost)
        with pytest.raises(ModelNotFoundError, match="retired"):
            room.locate(lost)


def test_a_save_waits_while_only_silent_shards_have_what_it_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with catalog_room(tmp_path / "private", 2) as room:
        at_0, at_1 = room.saved(LARGE), room.saved(LARGE, name="other", shard=1)
        monkeypatch.setattr(Line, "is_silent", property(lambda each: each.shard == 1))
        waiting = room.send(ShardCalls.commit(room.inheriting(at_1, b"own", durable=False)))
        handed = replace(room.inheriting(at_1, b"own", durable=False), timeout=0.2)
        with pytest.raises(OperationTimeoutError, match=r"shards \[1\], .* are silent"):
            room.send(ShardCalls.commit(handed)).result(WAIT_S)
        room.send(ShardCalls.commit(room.inheriting(at_0, b"own", durable=False))).result(WAIT_S)
        assert not waiting.done()
        monkeypatch.undo()
        assert sorted(room.read(waiting.result(WAIT_S).ref)) == sorted([LARGE, b"own"])
        line: Any = room.real.parts[Shards]._lines.get(1)  # type: ignore[attr-defined]
        line.heard -= 2 * SILENT_S
        assert line.is_silent
        until(lambda: not line.is_silent)


def test_what_is_on_the_path_survives_a_shard(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 2, disk_at(tmp_path / "path")) as room:
        ref = room.saved(LARGE, b"abcd")
        room.ask(CatalogCalls.flush(30.0))
        room.kill_shard(0)
        until(lambda: 0 in room.real._context.topology.shards)
        assert room.ask(CatalogCalls.models("")) == [ref]


def test_a_new_start_on_the_path_has_all_that_was_flushed(tmp_path: Path) -> None:
    disk = disk_at(tmp_path / "path")
    with catalog_room(tmp_path / "private", 2, disk) as room:
        first, second = room.saved(LARGE), room.saved(b"abcd", shard=1)
        room.ask(CatalogCalls.flush(30.0))
        calm(room)
        room.retire(second)
    with catalog_room(tmp_path / "private", 3, disk) as room:
        assert room.ask(CatalogCalls.models("")) == [first]
        assert room.saved(b"efgh") == ModelRef("m", 3)
        until(lambda: room.locate(first).places)


def test_a_durable_save_exists_when_it_is_on_the_path(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path")) as room:
        ref = room.saved(LARGE, durable=True)
        assert [file.name for file in (tmp_path / "path" / "manifests").iterdir()] == [f"{ref}.arrow"]
        assert room.read(ref) == [LARGE]
        room.ask(CatalogCalls.check())


def test_with_two_replicas_one_shard_may_die(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 2, replicas=2) as room:
        until(lambda: room.state(0).backups == (1,) and room.state(1).backups == (0,))
        ref = room.saved(LARGE, b"abcd")
        room.kill_shard(0)
        until(lambda: room.read(ref) == [LARGE, b"abcd"])
        assert room.ask(CatalogCalls.models("")) == [ref]
        until(lambda: not room.ask(CatalogCalls.stats()).replicas_missing)
        second = room.saved(b"efgh")
        room.kill_shard(1)
        until(lambda: room.read(second) == [b"efgh"])
        until(lambda: room.read(ref) == [LARGE, b"abcd"])
        calm(room)
        room.retire(ref)
        room.retire(second)
        until(lambda: is_empty(room))


@pytest.mark.parametrize("on_path", [False, True])
def test_a_shard_drains(tmp_path: Path, on_path: bool) -> None:
    disk = disk_at(tmp_path / "path") if on_path else None
    with catalog_room(tmp_path / "private", 2, disk) as room:
        first, second = room.saved(LARGE, b"abcd"), room.saved(LARGE[::-1], shard=1)
        calm(room)
        assert room.ask(CatalogCalls.drain([0])).leaving == (0,)
        assert room.ask(CatalogCalls.drained([0], 60.0)) == [0]
        assert room.ask(CatalogCalls.topology()).shards == (1,)
        if not on_path:  # else it was read from its file
            assert room.read(first) == [LARGE, b"abcd"]
        assert room.read(second) == [LARGE[::-1]]
        assert all(shard == 1 for shard, _ in room.locate(first).places.values())
        room.ask(CatalogCalls.check())


def test_a_shard_joins(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 1) as room:
        first = room.saved(LARGE)
        assert room.ask(CatalogCalls.grow(1)).shards == (0, 1)
        room.start(1)
        second = room.saved(b"abcd", shard=1)
        assert [room.read(ref) for ref in (first, second)] == [[LARGE], [b"abcd"]]
        room.start_catalog()
        until(lambda: [room.read(ref) for ref in (first, second)] == [[LARGE], [b"abcd"]])


def test_catalog_and_shard_die_together(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 2) as room:
        lost, kept = room.saved(LARGE), room.saved(LARGE, shard=1)
        room.kill_shard(0)
        room.start_catalog()
        until(lambda: room.ask(CatalogCalls.models("")) == [kept])
        with pytest.raises(ModelLostError):
            room.locate(lost)
        assert room.saved(b"abcd") == ModelRef("m", 3)


def test_a_path_that_fails_moves_the_journal_to_this_node(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path")) as room:
        room.saved(LARGE)
        folder = tmp_path / "path" / "catalog"
        assert room.real._context.journal.on_path
        moved = folder.rename(tmp_path / "moved")
        folder.write_text("no folder")
        ref = room.saved(b"abcd")
        assert not room.real._context.journal.on_path
        folder.unlink()
        moved.rename(folder)
        room.start_catalog()
        assert room.ask(CatalogCalls.models("")) == [ModelRef("m", 1), ref]


def test_no_number_is_used_again_if_all_but_the_path_is_gone_while_the_journal_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, data: bytes) -> bool:
        raise StorageError(f"{name}: no space for {len(data)} bytes")

    for start in range(2):
        with catalog_room(tmp_path / f"private-{start}", 1, disk_at(tmp_path / "path")) as room:
            assert room.saved(LARGE).version == start * FLOOR + 1
            journal = room.real._context.journal
            monkeypatch.setattr(journal._path, "append", full)
            room.saved(LARGE)
            assert not journal.on_path
    for number in (1, 2):
        with catalog_room(tmp_path / f"private-{number}", 1, disk_at(tmp_path / "path")) as room:
            assert room.saved(LARGE).version == 2 * FLOOR + number


def test_a_shard_that_joins_takes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MOVED_BYTES", 2 * len(LARGE))
    with catalog_room(tmp_path / "private", 1) as room:
        calm(room)
        refs = [room.saved(bytes([number]) + LARGE[1:]) for number in range(8)]
        room.ask(CatalogCalls.grow(1))
        room.start(1)
        room.saved(LARGE, shard=0)
        until(lambda: room.state(1).totals.allocated > 0 and len(list(room.state(0).segments())) < 9)
        assert [room.read(ref)[0][0] for ref in refs] == list(range(8))
        room.ask(CatalogCalls.check())


def test_copies_of_a_backup_that_has_started_again_since_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with catalog_room(tmp_path / "private", 2, replicas=2) as room:
        until(lambda: room.state(0).backups == (1,))
        sent = Copies.sent

        async def restarted(self: Copies, *arguments: Any) -> dict[int, int]:
            kept = await sent(self, *arguments)
            if self._context.index == 0:
                incarnation = room.state(1).incarnation
                await asyncio.to_thread(room.kill_shard, 1)
                lines = room.real.parts[Shards]._lines  # type: ignore[attr-defined]
                await asyncio.to_thread(until, lambda: (line := lines.get(1)) and line.incarnation > incarnation)
            return kept

        monkeypatch.setattr(Copies, "sent", restarted)
        ref = room.saved(LARGE)
        ((segment, _),) = room.locate(ref).places.items()
        assert room.content(segment, [0], shard=1) == [LARGE]
        assert not room.ask(CatalogCalls.stats()).replicas_missing
