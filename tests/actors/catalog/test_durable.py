"""Durable saves and manifests, while what they need goes: real shards, and a disk that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorvine.actors.catalog.parts.shards import Shards
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.catalog_messages import Committed, Declared
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.parts.writes import Writes
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import TensorVineError
from tensorvine.store.segments.segment import Label

from tests.support.catalog_room import LARGE, CatalogRoom, catalog_room
from tests.support.shard_room import CLIENT, WAIT_S, disk_at
from tests.support.waiting import eventually


class Gate:
    """A step of the disk that waits until it is opened."""

    def __init__(self, archive: Any, step: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = getattr(archive, step)

        def waits(*arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(WAIT_S)
            return real(*arguments)

        setattr(archive, step, waits)

    def wait(self) -> None:
        """Wait until somebody waits here."""
        assert self.reached.wait(WAIT_S)

    def open(self) -> None:
        """Let all pass, now and later."""
        self._open.set()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[CatalogRoom]:
    with catalog_room(tmp_path / "private", 1, disk_at(tmp_path / "path")) as made:
        calm(made)
        yield made


@contextmanager
def held(archive: Any, step: str) -> Iterator[Gate]:
    gate = Gate(archive, step)
    try:
        yield gate
    finally:
        gate.open()


def calm(room: CatalogRoom) -> None:
    room.ask(CatalogCalls.renew(CLIENT, Declared((room.number + 1,), room.number, room.real._context.lease.number)))


def files_of(room: CatalogRoom) -> Archive:
    return room.part(Writes)._history._archive


def until(condition: Callable[[], object], what: str) -> None:
    eventually(condition, what, ignoring=(TensorVineError, FileNotFoundError))


def test_a_durable_save_keeps_graph_and_parent_that_are_retired_meanwhile(room: CatalogRoom, tmp_path: Path) -> None:
    parent = room.saved(LARGE, name="parent")
    room.ask(CatalogCalls.flush(30.0))
    handed = room.inheriting(parent, b"own")
    with held(files_of(room), "write_segment") as gate:
        saving = room.send(ShardCalls.commit(handed))
        gate.wait()
        until(lambda: room.real.parts[Shards]._saving, "the catalog to have begun")  # type: ignore[attr-defined]
        room.retire(parent)
        room.ask(CatalogCalls.abort(handed.draft.save))  # the client gave up, and is not answered before it is over
    answer = saving.result(WAIT_S)
    assert isinstance(answer, Committed), answer
    assert sorted(room.read(answer.ref)) == sorted([LARGE, b"own"])
    until(lambda: Archive(str(tmp_path / "path")).read_manifest(parent).retired, "the parent's end")
    room.start_catalog()
    until(lambda: sorted(room.read(answer.ref)) == sorted([LARGE, b"own"]), "the version, by the next term")
    room.ask(CatalogCalls.check())
    assert not room.real._context.state.pins.clients()


def test_a_durable_save_whose_file_one_term_took_is_made_by_the_next(room: CatalogRoom) -> None:
    room.number += 1
    block = room.filled(room.number, room.segment(), [LARGE], (Label(0, "own", None, "uint8", (len(LARGE),)),))
    with held(room.real._context.archive, "write_manifest") as gate:
        saving = room.committing(room.handed(room.number, [block], durable=True))
        gate.wait()
        room.start_catalog()
    answer = saving.result(WAIT_S)
    assert isinstance(answer, Committed), answer
    assert room.read(answer.ref) == [LARGE]
    assert room.ask(CatalogCalls.models("")) == [answer.ref]
    room.ask(CatalogCalls.check())


def test_a_version_that_is_retired_while_its_manifest_is_written_is_retired_on_the_path(
    room: CatalogRoom, tmp_path: Path
) -> None:
    with held(room.real._context.archive, "write_manifest") as gate:
        ref = room.saved(LARGE)
        gate.wait()
        room.retire(ref)
    until(lambda: Archive(str(tmp_path / "path")).read_manifest(ref).retired, "a manifest that says so")
    until(lambda: not list((tmp_path / "path" / "segments").iterdir()), "its file to go")
    room.ask(CatalogCalls.check())
