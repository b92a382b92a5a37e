"""A catalog whose own journal is lost starts from the copy that a shard on another node keeps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tensorvine.actors.catalog.parts.shards import Shards
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.catalog_messages import Declared
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.calls.orders import Kept
from tensorvine.store.errors import ModelLostError, ModelNotFoundError, TensorVineError
from tensorvine.store.refs import ModelRef
from tensorvine.store.waiting import NEVER

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.shard_room import CLIENT, disk_at
from tests.support.waiting import eventually

LARGE = bytes(range(256)) * 1024
FLOOR = 10**12


@pytest.fixture(params=["memory", "path"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CatalogRoom]:
    disk = disk_at(tmp_path / "path") if request.param == "path" else None
    with catalog_room(tmp_path / "private", 2, disk, catalog_node="head") as made:
        calm(made)
        yield made


def calm(room: CatalogRoom) -> None:
    room.ask(CatalogCalls.renew(CLIENT, Declared((), room.number, room.real._context.lease.number)))


def copied(room: CatalogRoom, shard: int) -> bool:
    """Tell whether a shard has all of the journal."""
    with room.real._context.lock:
        journal = room.real._context.journal
        expected = Kept(journal.stream.term, journal.stream.number, journal.length)
    return room.call(ShardCalls.journals(), shard) == [expected]


def lose_journal(room: CatalogRoom) -> None:
    """Delete what the catalog wrote itself, on its node and on the path."""
    shutil.rmtree(room.private, ignore_errors=True)
    if room.disk is not None:
        shutil.rmtree(Path(room.disk.uri) / "catalog")


def test_versions_retirements_losses_and_answers_are_known_by_the_next_term(room: CatalogRoom) -> None:
    kept, retired, other = room.saved(LARGE, shard=1), room.saved(b"abcd", shard=1), room.saved(b"efgh", name="n")
    lost = room.saved(LARGE[::-1], name="lost")
    if room.disk is not None:
        room.ask(CatalogCalls.flush(30.0))
        for file in (Path(room.disk.uri) / "segments").iterdir():
            if LARGE[::-1] in file.read_bytes():
                file.unlink()
    request = room.request()
    assert room.ask(CatalogCalls.retire(request, "m", None)) == retired
    room.kill_shard(0)
    left = [kept] if room.disk is None else [kept, other]

    def is_lost() -> bool:
        with suppress(TensorVineError):
            room.read(lost)  # which finds that the file is not there
        return room.ask(CatalogCalls.models("")) == left

    eventually(is_lost, "the loss")
    eventually(lambda: copied(room, 0) and copied(room, 1), "the journal to be copied")

    lose_journal(room)
    room.start_catalog()
    assert room.ask(CatalogCalls.models("")) == left
    assert room.ask(CatalogCalls.retire(request, "m", None)) == retired
    with pytest.raises(ModelLostError, match="lost@1 is lost"):
        room.locate(lost)
    with pytest.raises(ModelNotFoundError, match="m@2 was retired"):
        room.locate(retired)
    eventually(lambda: room.read(kept) == [LARGE], "the bytes", ignoring=(TensorVineError,))
    room.retire(lost)
    with pytest.raises(ModelNotFoundError, match="lost@1 was retired"):
        room.locate(lost)
    assert room.saved(b"ijkl").version > FLOOR, "what was not copied may have had the next number"
    room.ask(CatalogCalls.check())

    calm(room)
    for ref in room.ask(CatalogCalls.models("")):
        room.retire(ref)
    eventually(
        lambda: not any(list(room.state(index).segments()) or room.state(index).known_files for index in room.shards),
        "nothing to be left",
    )


def test_what_was_not_copied_is_gone_with_its_bytes_and_its_number(room: CatalogRoom) -> None:
    kept = room.saved(LARGE)
    eventually(lambda: copied(room, 0) and copied(room, 1), "the journal to be copied")
    copies = room.real.parts[Shards]._copies  # type: ignore[attr-defined]
    copies._send = lambda shard, incarnation: False
    gone = room.saved(b"abcd", shard=1)
    assert room.read(gone) == [b"abcd"]
    lose_journal(room)
    if room.disk is not None:
        (Path(room.disk.uri) / "manifests" / f"{gone}.arrow").unlink(missing_ok=True)
    room.start_catalog()
    assert room.ask(CatalogCalls.models("")) == [kept]
    with pytest.raises(ModelNotFoundError):
        room.locate(gone)
    eventually(lambda: room.read(kept) == [LARGE], "the bytes", ignoring=(TensorVineError,))
    calm(room)
    eventually(lambda: not list(room.state(1).segments()), "the bytes to be freed")
    assert room.saved(b"efgh").version > FLOOR


def test_a_copy_is_greater_than_the_streams_of_earlier_terms(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path"), catalog_node="head") as room:
        first = room.saved(LARGE)
        folder, old = tmp_path / "path" / "catalog", tmp_path / "old"
        shutil.copytree(folder, old)
        room.start_catalog()
        second = room.saved(b"abcd")
        eventually(lambda: copied(room, 0), "the journal to be copied")
        lose_journal(room)
        shutil.copytree(old, folder, dirs_exist_ok=True)
        room.start_catalog()
        assert room.ask(CatalogCalls.models("")) == [first, second]
        eventually(lambda: room.read(second) == [b"abcd"], "the bytes", ignoring=(TensorVineError,))
        assert room.saved(b"efgh") != ModelRef("m", 3)
        room.ask(CatalogCalls.check())


def test_a_stream_on_the_path_that_went_on_elsewhere_is_not_taken_for_whole(tmp_path: Path) -> None:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path"), catalog_node="head") as room:
        first = room.saved(LARGE)
        folder, moved, journal = tmp_path / "path" / "catalog", tmp_path / "moved", room.real._context.journal
        folder.rename(moved)
        folder.write_text("no folder")
        second = room.saved(b"abcd")
        assert not journal.on_path
        journal._try_path = NEVER
        eventually(lambda: copied(room, 0), "the journal to be copied")
        folder.unlink()
        moved.rename(folder)
        shutil.rmtree(room.private)
        room.catalog_node = "another"
        room.start_catalog()
        assert room.ask(CatalogCalls.models("")) == [first, second]
        assert room.saved(b"efgh").version > FLOOR
        room.ask(CatalogCalls.check())
