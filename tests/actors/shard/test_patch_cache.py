"""The patches that a shard keeps: made once, bounded, and let go of when they are idle. Without Ray."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tensorvine.actors.shard.serving import patch_cache
from tensorvine.actors.shard.serving.patch_cache import Key, Made, PatchCache
from tensorvine.store.errors import CorruptDataError, OperationTimeoutError

from tests.support.waiting import eventually

WAIT_S = 60.0


def key(number: int) -> Key:
    return str(number), "b", "uint8", (1,)


def patch(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def test_several_readers_wait_for_one_patch() -> None:
    cache, begun, go = PatchCache(), threading.Event(), threading.Event()
    found: list[Made] = []

    def make() -> Made:
        begun.set()
        assert go.wait(WAIT_S)
        return patch(5)

    threads = [threading.Thread(target=lambda: found.append(cache.get(key(0), make, WAIT_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(WAIT_S)
    with pytest.raises(OperationTimeoutError, match="still being made"):
        cache.get(key(0), make, 0.0)
    cache.drop_idle()
    assert cache.nbytes == 0
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 4
    assert all(each is found[0] for each in found)
    assert (cache.made, cache.nbytes) == (1, 5)


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_cache, "CACHE_BYTES", 10)
    cache = PatchCache()
    for number in (0, 1, 0, 2):
        cache.get(key(number), lambda: patch(4), WAIT_S)
    assert (cache.made, cache.nbytes) == (3, 8)
    cache.get(key(0), lambda: patch(4), WAIT_S)
    assert cache.made == 3
    cache.get(key(1), lambda: patch(4), WAIT_S)
    assert cache.made == 4
    cache.get(key(3), lambda: patch(11), WAIT_S)
    assert cache.nbytes == 11


def test_idle_patches_go(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PatchCache()
    cache.get(key(0), lambda: patch(4), WAIT_S)
    cache.drop_idle()
    assert cache.nbytes == 4
    monkeypatch.setattr(patch_cache, "IDLE_S", 0.0)
    before = time.monotonic()
    eventually(lambda: time.monotonic() > before, "the clock to go on")
    cache.drop_idle()
    assert cache.nbytes == 0


def test_a_failure_is_told_and_tried_again() -> None:
    cache = PatchCache()

    def fail() -> Made:
        raise CorruptDataError("a file is damaged")

    for _ in range(2):
        with pytest.raises(CorruptDataError):
            cache.get(key(0), fail, WAIT_S)
    assert cache.get(key(0), lambda: "too long", WAIT_S) == "too long"
    assert (cache.made, cache.nbytes) == (1, 0)
