"""`Repository.diff`: what differs between two versions, computed at the shards."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import KeepLast
from tensorvine.store.errors import ModelNotFoundError, OptionError
from tensorvine.store.patches.comparing import TensorDiff, difference
from tensorvine.store.waiting import Deadline

from tests.support.disk import name_at
from tests.support.far import connect_from_afar
from tests.support.waiting import eventually

RNG = np.random.default_rng(9)
TENSORS = {
    "large": RNG.normal(size=(100, 200)).astype(np.float32),
    "small": np.arange(5),
    "number": np.ones(()),
    "empty": np.zeros((0, 3)),
}


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("diffs", shards=2, store_bytes=64 << 20, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:8]}"


def test_versions_of_one_model(repo: Repository, name: str) -> None:
    first = repo.save(name, {**TENSORS, "old": np.ones(2)})
    large = TENSORS["large"].copy()
    large[::10] += 1
    second = repo.save(name, {**TENSORS, "large": large, "number": np.ones((), np.float32), "fresh": np.ones(2)})
    found = repo.diff(first, second, histogram=8)
    assert (found.a, found.b) == (first.ref, second.ref)
    assert (set(found.equal), found.new, found.gone) == ({"small", "empty"}, ("fresh",), ("old",))
    assert found.changed["large"] == difference(large, TENSORS["large"], 8)
    other = found.changed["number"]
    assert (other.share, str(other.norm), other.counts) == (1.0, "nan", ())
    back = repo.diff(second, first)
    assert (back.new, back.gone) == (("old",), ("fresh",))
    assert back.changed["large"].norm == found.changed["large"].norm
    assert repo.diff(name, name).changed == {}


def test_versions_of_other_names_and_in_other_shards(repo: Repository, name: str) -> None:
    """What a client elsewhere saves lies at the home of the name."""
    with connect_from_afar(repo.name) as far:
        for shard in (0, 1):
            at = name_at(repo, shard, f"{name}-")
            far.save(at, {**TENSORS, "small": TENSORS["small"] + shard})
        one, other = repo.models(f"{name}-0-") + repo.models(f"{name}-1-")
        found = [repo._reader.located(ref, "auto", Deadline.after(30.0)) for ref in (one, other)]
        places = [{shard for shard, _ in located.places.values()} for located in found]
        assert places == [{0}, {1}]
        for client in (repo, far):
            found = client.diff(one, other)
            assert found.changed == {"small": TensorDiff(1.0, 5**0.5)}
            assert set(found.equal) == {"large", "number", "empty"}


def test_no_tensor_is_sent(repo: Repository, name: str) -> None:
    first = repo.save(name, {"large": TENSORS["large"]}, inherit=None)
    second = repo.save(name, {"large": TENSORS["large"] + 1}, inherit=None)
    before = [shard.bytes_sent for shard in repo.stats().shards]
    assert repo.diff(first, second).changed["large"].share == 1.0
    assert [shard.bytes_sent for shard in repo.stats().shards] == before


def test_what_is_on_disk_only_is_read(cluster: object, tmp_path: Path, name: str) -> None:
    keep = KeepLast(1)
    with Repository.start("disk-diffs", shards=1, path=tmp_path, keep=keep, preallocate_bytes=0) as repo:
        first = repo.save(name, TENSORS, inherit=None, durability="disk")
        changed = {**TENSORS, "small": TENSORS["small"] * 2}
        second = repo.save(name, changed, inherit=None, durability="disk")
        eventually(lambda: repo.stats().bytes_memory < 1.5 * TENSORS["large"].nbytes, "the first to leave memory")
        assert repo.diff(first, second).changed == {"small": TensorDiff(0.8, 30**0.5)}


def test_pins_end_with_the_comparison(repo: Repository, name: str) -> None:
    first, second = repo.save(name, TENSORS), repo.save(name, TENSORS)
    repo.diff(first, second)
    eventually(lambda: not repo.stats().catalog.pins, "the pins to go")


def test_bad_input(repo: Repository, name: str) -> None:
    repo.save(name, TENSORS)
    for bins in (0, -1, 2.5, True, 10_001):
        with pytest.raises(OptionError, match="histogram"):
            repo.diff(name, name, histogram=bins)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelNotFoundError):
        repo.diff(name, f"{name}@7")
