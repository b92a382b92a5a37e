"""What is on the path only is brought back, and is lost only where its files are damaged or gone for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorvine.actors.catalog.care import Care
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.store.errors import ModelLostError, StorageError, TensorVineError
from tensorvine.store.refs import ModelRef

from tests.support.catalog_room import CatalogRoom, catalog_room
from tests.support.shard_room import disk_at
from tests.support.waiting import eventually

LARGE = bytes(range(256)) * 1024


@pytest.fixture
def room(tmp_path: Path) -> Iterator[CatalogRoom]:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path")) as made:
        yield made


def flushed(room: CatalogRoom, name: str = "m") -> ModelRef:
    ref = room.saved(LARGE, name=name)
    room.ask(CatalogCalls.flush(30.0))
    return ref


def test_a_path_that_is_away_loses_nothing(room: CatalogRoom, tmp_path: Path) -> None:
    ref = flushed(room)
    room.kill_shard(0)
    eventually(lambda: room.state().known_files, "the file to be given")
    (tmp_path / "path").rename(tmp_path / "away")
    with pytest.raises(StorageError, match=r"repository.json is not there|No such file"):
        room.read(ref)
    (tmp_path / "away").rename(tmp_path / "path")
    eventually(lambda: room.read(ref) == [LARGE], "the bytes", ignoring=(TensorVineError,))
    assert room.ask(CatalogCalls.models("")) == [ref]


def test_a_file_that_is_gone_is_lost_by_name_when_it_is_read(room: CatalogRoom, tmp_path: Path) -> None:
    ref, other = flushed(room), flushed(room, "n")
    room.kill_shard(0)
    eventually(lambda: len(room.state().known_files) == 2, "the files to be given")
    (segment,) = room.locate(ref).places
    (tmp_path / "path" / room.state().known_files[segment].name).unlink()
    with pytest.raises(ModelLostError):
        room.read(ref)
    eventually(lambda: room.ask(CatalogCalls.models("")) == [other], "the loss")
    with pytest.raises(ModelLostError, match="m@1 is lost"):
        room.locate(ref)
    assert room.read(other) == [LARGE]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_was_not_heard_of_is_looked_at(room: CatalogRoom, tmp_path: Path, damaged: bool) -> None:
    """The shard wrote it, and died with the catalog before that could note it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Care, "_look_at_path", lambda self: None)
        ref = room.saved(LARGE)
        (segment,) = room.locate(ref).places
        room.ask(CatalogCalls.flush(30.0))
    known = room.real._context.state.references.get(segment)
    assert known is not None
    file, known.file = known.file, None  # as if the report had not come
    room.real._context.state._entries[ref].written = False
    assert file is not None
    (stored,) = (tmp_path / "path" / "segments").iterdir()
    if damaged:
        stored.write_bytes(b"damaged")
    room.kill_shard(0)
    if damaged:
        eventually(lambda: room.ask(CatalogCalls.models("")) == [], "the loss")
        with pytest.raises(ModelLostError, match="m@1 is lost"):
            room.locate(ref)
    else:
        eventually(lambda: room.read(ref) == [LARGE], "the bytes", ignoring=(TensorVineError,))
