"""The first save of a client that came a while ago: its memory is mapped already."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import closing

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.actors.memory.memory import MemoryView
from tensorvine.actors.memory.pages import CHUNK_BYTES
from tensorvine.store.segments.arena import Part
from tensorvine.store.waiting import Backoff, Deadline

SIZE = 24 << 20
WAIT_S = 60.0
TENSORS = {"w": np.ones(SIZE, np.uint8)}


@pytest.fixture
def repo(cluster: object) -> Iterator[Repository]:
    name = f"first-{uuid.uuid4().hex[:6]}"
    with Repository.start(name, shards=1, store_bytes=8 * SIZE, preallocate_bytes=0) as repo:
        yield repo


def mapped_bytes(client: Repository) -> int:
    connection = client._session.connections.present(0)
    view = connection.view if connection is not None else None
    return int(np.count_nonzero(view._pages._made)) * CHUNK_BYTES if view is not None else 0


def test_what_a_first_save_gets_was_mapped_before(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.save("m", TENSORS)
    missing, part = list[bool](), MemoryView.part
    monkeypatch.setattr("tensorvine.actors.client.save.saves.AHEAD_LOOKS", 10_000)

    def looked(view: MemoryView, granted: Part, helper: Executor | None = None) -> np.ndarray:
        missing.append(view._pages.unmade(granted.offset, granted.offset + granted.length))
        return part(view, granted, helper)

    with closing(Repository.connect(repo.name)) as came:
        pauses, deadline = Backoff(0.01, 0.1), Deadline.after(WAIT_S)
        while mapped_bytes(came) < SIZE:
            assert pauses.wait(deadline), "expected that a client maps what its first save will get"
        monkeypatch.setattr(MemoryView, "part", looked)
        came.save("n", TENSORS)
        assert missing == [False]
        assert (came.load("n")["w"] == 1).all()
        assert (repo.load("m")["w"] == 1).all()


def test_a_client_that_came_ends_at_once(repo: Repository) -> None:
    repo.save("m", TENSORS)
    came = Repository.connect(repo.name)
    came.close()
    assert came._saves._greeting is not None
    assert not came._saves._greeting.is_alive()
    assert came._saves._thread is None or not came._saves._thread.is_alive()


def test_the_thread_of_saves_ends_and_starts_again(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorvine.actors.client.save.saves.AHEAD_S", 0.001)
    for number in range(3):
        repo.save("m", {"w": np.full(8, number)})
        pauses, deadline = Backoff(0.01, 0.1), Deadline.after(WAIT_S)
        while repo._saves._thread is not None:
            assert pauses.wait(deadline), "expected that the thread ends when no save comes"
        assert (repo.load("m")["w"] == number).all()
