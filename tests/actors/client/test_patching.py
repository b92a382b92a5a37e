"""`Repository.load` with `have`: arrays that hold one version are brought to another, bit by bit.

The reader takes itself for one on another node. `patched` makes it ask for patches whatever they cost.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorvine.actors import Repository
from tensorvine.actors.client import patching
from tensorvine.actors.client.patch_costs import PatchCosts
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.calls import patches as calls
from tensorvine.store import KeepLast, ModelRef, Quantize
from tensorvine.store.arrays import as_bytes
from tensorvine.store.errors import (
    ModelNotFoundError,
    OptionError,
    ShardUnavailableError,
    TensorMismatchError,
    TensorNotFoundError,
)
from tensorvine.store.versions.manifest import digest_of

from tests.support.disk import name_at
from tests.support.far import connect_from_afar
from tests.support.waiting import eventually

RNG = np.random.default_rng(31)
Tensors = dict[str, np.ndarray]


def model() -> Tensors:
    """Tensors of several kinds, of which two are worth a patch."""
    large = RNG.integers(0, 1 << 16, (200, 1000), np.uint16).view(ml_dtypes.bfloat16)
    return {
        "large": large,
        "wide": RNG.normal(size=30_000),
        "bias": np.arange(7, dtype=np.float32),
        "number": np.float64(2.5) * np.ones(()),
        "empty": np.zeros((0, 4), np.int16),
    }


def stepped(tensors: Tensors, *names: str, share: float = 0.01) -> Tensors:
    """Copy tensors, with other bits in the first and a share of the other elements of some."""
    found = dict(tensors)
    for name in names:
        words = found[name].copy()
        chosen = RNG.random(words.size) < share
        chosen[:1] = True
        as_bytes(words).reshape(-1, words.itemsize)[chosen, 0] ^= 1
        found[name] = words
    return found


def two(repo: Repository, name: str, *changed: str) -> tuple[Tensors, Tensors, list[ModelRef]]:
    """Save a model and its next version."""
    first = model()
    second = stepped(first, *changed)
    return first, second, [repo.save(name, each).ref for each in (first, second)]


def copied(tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {name: np.array(each) for name, each in tensors.items()}


def same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)


def sizes(tensors: Tensors, *names: str) -> int:
    return sum(tensors[name].nbytes for name in names)


@pytest.fixture(scope="module")
def repo(cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    path = tmp_path_factory.mktemp("patching")
    with Repository.start("patching", shards=1, path=path, store_bytes=64 << 20, preallocate_bytes=0) as started:
        yield started


@pytest.fixture
def name() -> str:
    return f"m-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def far(repo: Repository) -> Iterator[Repository]:
    client = connect_from_afar(repo.name)
    yield client
    client.close()


@pytest.fixture
def patched() -> Iterator[None]:
    with mock.patch.object(PatchCosts, "prefers_patches", return_value=True):
        yield


@pytest.mark.usefixtures("patched")
class TestPatches:
    def test_what_changed_comes_as_patches_and_the_rest_not_at_all(
        self, repo: Repository, far: Repository, name: str
    ) -> None:
        first = model()
        second = stepped(first, "large", "bias")
        refs = [repo.save(name, each).ref for each in (first, second)]
        arrays = copied(first)
        found = far.load(name, into=arrays, have=refs[0])
        assert same(arrays, second)
        assert all(np.shares_memory(found[each], arrays[each]) for each in ("large", "wide", "bias"))
        traffic = far.traffic()
        assert (traffic.patches, traffic.whole, traffic.fallbacks) == (1, 1, {})
        assert traffic.bytes_asked == sizes(first, *first)
        assert traffic.bytes_moved["patch"] < 0.02 * first["large"].nbytes
        assert sum(traffic.bytes_moved.values()) < 0.02 * first["large"].nbytes + first["bias"].nbytes + 1

    def test_the_base_may_be_named_by_content(self, repo: Repository, far: Repository, name: str) -> None:
        first, other = model(), model()
        second = stepped(first, "large", "wide")
        for each in (first, other, second):
            repo.save(name, each, inherit=None)
        arrays = copied(first)
        hashes = {each: digest_of(as_bytes(array)) for each, array in first.items()}
        far.load(name, into=arrays, have=hashes)
        assert same(arrays, second)
        assert (far.traffic().patches, far.traffic().whole, far.traffic().fallbacks) == (2, 0, {})

    def test_any_version_leads_to_any_other(self, repo: Repository, far: Repository, name: str) -> None:
        """Back, across names, and to equal tensors that were saved twice."""
        root = model()
        versions = {
            repo.save(f"{name}-root", root).ref: root,
            repo.save(f"{name}-a", a := stepped(root, "large"), parent=f"{name}-root").ref: a,
            repo.save(f"{name}-b", b := stepped(root, "wide"), inherit=None).ref: b,
        }
        for base, holds in versions.items():
            for ref, wanted in versions.items():
                arrays = copied(holds)
                far.load(ref, into=arrays, have=base)
                assert same(arrays, wanted), (base, ref)
        assert far.traffic().whole == 0

    def test_applied_twice_nothing_changes(self, repo: Repository, far: Repository, name: str) -> None:
        first, second, refs = two(repo, name, "large")
        arrays = copied(first)
        far.load(refs[1], into=arrays, have=refs[0])
        before = far.traffic()
        far.load(refs[1], into=arrays, have=refs[1])
        assert same(arrays, second)
        assert far.traffic().bytes_moved == before.bytes_moved
        far.load(refs[1], into=arrays, have=refs[0])  # which they do not hold any more
        assert same(arrays, second)
        assert far.traffic().fallbacks == {patching.LIED: 1}

    def test_many_readers_share_a_patch(self, repo: Repository, name: str) -> None:
        first = model()
        second = stepped(first, "large")
        refs = [repo.save(name, each).ref for each in (first, second)]
        before = repo.stats().shards[0]
        readers = [connect_from_afar(repo.name) for _ in range(6)]
        arrays = [copied(first) for _ in readers]

        def load(reader: Repository, into: Tensors) -> None:
            reader.load(refs[1], into=into, have=refs[0])

        threads = [threading.Thread(target=load, args=each) for each in zip(readers, arrays, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = repo.stats().shards[0]
        assert all(same(each, second) for each in arrays)
        assert after.patches_made == before.patches_made + 1
        length = readers[0].traffic().bytes_moved["patch"]
        assert after.bytes_patches == before.bytes_patches + length
        assert after.bytes_sent == before.bytes_sent + 6 * length
        for reader in readers:
            reader.close()

    def test_some_tensors_and_layers(self, repo: Repository, far: Repository, name: str) -> None:
        first, second, refs = two(repo, name, "large", "wide")
        arrays = copied(first)
        far.load(refs[1], tensors=["wide"], into=arrays, have=refs[0])
        assert same(arrays, {**first, "wide": second["wide"]})
        far.load(refs[1], into={"large": arrays["large"]}, have=refs[0])
        assert same(arrays, second)

    def test_a_base_on_disk_only(self, cluster: object, tmp_path: Path, name: str) -> None:
        first = model()
        second = stepped(first, "large")
        with Repository.start("cold", shards=1, path=tmp_path, keep=KeepLast(1), preallocate_bytes=0) as repo:
            refs = [repo.save(name, each, inherit=None, durability="disk").ref for each in (first, second)]
            eventually(lambda: repo.stats().bytes_memory < 1.5 * sizes(first, *first), "the first to leave memory")
            with connect_from_afar("cold") as far:
                arrays = copied(first)
                far.load(refs[1], into=arrays, have=refs[0])
                assert same(arrays, second)
                assert (far.traffic().patches, far.traffic().fallbacks) == (1, {})

    def test_a_quantised_base(self, cluster: object, tmp_path: Path, name: str) -> None:
        """Patch or whole: the arrays get what any load gives."""
        first = {"wide": RNG.normal(size=30_000).astype(np.float32)}
        second = stepped(first, "wide")
        lossy = Quantize(8)
        with Repository.start(
            "lossy", shards=1, path=tmp_path, codec=lossy, keep=KeepLast(1), preallocate_bytes=0
        ) as repo:
            refs = [repo.save(name, each, durability="disk").ref for each in (first, second)]
            eventually(lambda: repo.stats().bytes_memory < 1.5 * first["wide"].nbytes, "the first to leave memory")
            with connect_from_afar("lossy") as far:
                for holds in (first, copied(far.load(refs[0]))):
                    arrays = copied(holds)
                    far.load(refs[1], into=arrays, have=refs[0])
                    assert same(arrays, copied(far.load(refs[1])))


@pytest.mark.usefixtures("patched")
class TestPins:
    def test_the_version_loaded_last_stays_a_base(self, repo: Repository, far: Repository, name: str) -> None:
        versions = [model()]
        repo.save(name, versions[0])
        arrays = {each: np.empty_like(array) for each, array in versions[0].items()}
        pins = repo.stats().catalog.pins
        far.load(name, into=arrays, have={})
        held = f"{name}@1"
        for number in range(2, 5):
            versions.append(stepped(versions[-1], "large"))
            repo.save(name, versions[-1])
            repo.retire(held)
            held = f"{name}@{number}"
            far.load(name, into=arrays, have=f"{name}@{number - 1}")
            assert same(arrays, versions[-1])
            eventually(lambda: repo.stats().catalog.pins == pins + 1, "one pin of the reader")
        assert (far.traffic().patches, far.traffic().fallbacks) == (3, {})
        far.close()
        eventually(lambda: repo.stats().catalog.pins == pins, "no pin of the reader")

    def test_a_load_that_fails_leaves_arrays_and_pin(
        self, repo: Repository, far: Repository, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = model()
        repo.save(name, first)
        arrays = {each: np.empty_like(array) for each, array in first.items()}
        far.load(name, into=arrays, have={})
        second = stepped(first, "large", "bias")
        repo.save(name, second)
        pins = repo.stats().catalog.pins

        def broken(*_: object, **__: object) -> None:
            raise ShardUnavailableError("shard 0: expected it to answer; it died")

        with monkeypatch.context() as patch:
            patch.setattr(far._reader, "fetch", broken)
            with pytest.raises(ShardUnavailableError):
                far.load(name, into=arrays, have=f"{name}@1")
        assert same(arrays, first)
        eventually(lambda: repo.stats().catalog.pins == pins, "the pin of the load to go")
        far.load(name, into=arrays, have=f"{name}@1")
        assert same(arrays, second)


@pytest.mark.usefixtures("patched")
class TestFallbacks:
    """Each brings the whole tensor, is counted, and logged once."""

    @pytest.fixture
    def versions(self, repo: Repository, name: str) -> list[Tensors]:
        first = model()
        second = stepped(first, "large", "wide")
        for each in (first, second):
            repo.save(name, each)
        return [first, second]

    def fallen(self, far: Repository, name: str, arrays: Any, have: Any, wanted: Tensors) -> Mapping[str, int]:
        far.load(f"{name}@2", into=arrays, have=have)
        assert same({each: np.asarray(array) for each, array in arrays.items()}, wanted)
        return far.traffic().fallbacks

    def test_arrays_that_do_not_hold_the_base(
        self, far: Repository, name: str, versions: list[Tensors], caplog: pytest.LogCaptureFixture
    ) -> None:
        for turn in (1, 2):
            arrays = copied(versions[0])
            arrays["large"][0, 0] = 9
            arrays["number"][...] = 7
            assert self.fallen(far, name, arrays, f"{name}@1", versions[1]) == {patching.LIED: 2 * turn}
        assert [record.message for record in caplog.records if patching.LIED in record.message] == [
            f"load of {name}@2: moved whole, not as a patch: {patching.LIED} (logged once for each cause)"
        ]

    def test_hashes_that_are_not_true(self, far: Repository, name: str, versions: list[Tensors]) -> None:
        new = {each: digest_of(as_bytes(array)) for each, array in versions[1].items()}
        assert self.fallen(far, name, copied(versions[0]), new, versions[1]) == {patching.LIED: 2}
        unknown = {"large": "0" * 32}
        assert self.fallen(far, name, copied(versions[0]), unknown, versions[1])[calls.GONE] == 1

    def test_a_base_that_was_retired(
        self, repo: Repository, far: Repository, name: str, versions: list[Tensors]
    ) -> None:
        repo.retire(f"{name}@1")
        found = self.fallen(far, name, copied(versions[0]), f"{name}@1", versions[1])
        assert found == {patching.RETIRED: len(versions[1])}

    def test_a_base_whose_tensors_are_gone(
        self, repo: Repository, far: Repository, name: str, versions: list[Tensors]
    ) -> None:
        far.load(f"{name}@1", tensors=["bias"])  # its table is known from here on
        repo.retire(f"{name}@1")
        eventually(lambda: is_gone(repo, far, name), "its tensors to go")
        found = self.fallen(far, name, copied(versions[0]), f"{name}@1", versions[1])
        assert found == {calls.GONE: 2}

    def test_a_base_of_another_dtype_or_shape(
        self, repo: Repository, far: Repository, name: str, versions: list[Tensors]
    ) -> None:
        other = {"large": versions[0]["large"].astype(np.float32), "wide": versions[0]["wide"][:100]}
        repo.save(f"{name}-other", other)
        found = self.fallen(far, name, copied(versions[0]), f"{name}-other@1", versions[1])
        assert found == {patching.OTHER_KIND: 2}

    def test_arrays_with_strides_or_another_byte_order(
        self, far: Repository, name: str, versions: list[Tensors]
    ) -> None:
        arrays = copied(versions[0])
        arrays["large"] = np.asfortranarray(arrays["large"])
        arrays["wide"] = arrays["wide"].astype(">f8")
        far.load(f"{name}@2", into=arrays, have=f"{name}@1")
        assert np.array_equal(arrays["wide"], versions[1]["wide"])
        assert arrays["large"].tobytes() == versions[1]["large"].tobytes()
        assert far.traffic().fallbacks == {patching.UNPLAIN: 2}

    def test_a_patch_that_is_hardly_shorter(self, repo: Repository, far: Repository, name: str) -> None:
        first, second = model(), model()
        for each in (first, second):
            repo.save(name, each)
        assert self.fallen(far, name, copied(first), f"{name}@1", second) == {calls.TOO_LONG: 2}

    def test_patches_that_are_damaged(
        self, far: Repository, name: str, versions: list[Tensors], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answered = patching.Patching._answered

        def damaged(*arguments: Any) -> list[Any]:
            sent = [np.array(each) for each in answered(*arguments)]
            sent[0][-1] ^= 1
            sent[1] = sent[1][:-3]
            return sent

        monkeypatch.setattr(patching.Patching, "_answered", damaged)
        assert self.fallen(far, name, copied(versions[0]), f"{name}@1", versions[1]) == {patching.DAMAGED: 2}

    def test_a_shard_that_sends_no_patches(
        self, far: Repository, name: str, versions: list[Tensors], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = far._session.send

        def without(shard: int, request: Any) -> Any:
            if request.remote.name == "patches":
                raise ShardUnavailableError("shard 0: expected it to answer; it died")
            return send(shard, request)

        monkeypatch.setattr(far._session, "send", without)
        assert self.fallen(far, name, copied(versions[0]), f"{name}@1", versions[1]) == {patching.FAILED: 2}


def is_gone(repo: Repository, far: Repository, name: str) -> bool:
    """Return whether the shard has let go of a tensor of the first version."""
    entry = far._catalog.table(ModelRef(name, 1), None)["large"]
    slot = entry.segment, entry.slot
    update = calls.Update(slot, "0" * 32, slot, entry.dtype, entry.shape)
    return repo._session.call(0, ShardCalls.patches([update], 30.0))[0] == calls.GONE


def test_a_base_in_another_shard(cluster: object, name: str, patched: None) -> None:
    first = model()
    second = stepped(first, "large")
    with (
        Repository.start("apart", shards=2, store_bytes=64 << 20, preallocate_bytes=0) as repo,
        connect_from_afar("apart") as far,
    ):
        at = [name_at(repo, shard, f"{name}-") for shard in (0, 1)]
        for each, tensors in zip(at, (first, second), strict=True):
            far.save(each, tensors)  # what a client elsewhere saves lies at the home of the name
        arrays = copied(first)
        far.load(at[1], into=arrays, have=f"{at[0]}@1")
        assert same(arrays, second)
        assert far.traffic().fallbacks == {patching.ELSEWHERE: len(first)}


def test_within_a_node_nothing_is_encoded(repo: Repository, name: str, patched: None) -> None:
    first, second, refs = two(repo, name, "large")
    before, made = repo.traffic(), repo.stats().shards[0].patches_made
    arrays = copied(first)
    repo.load(refs[1], into=arrays, have=refs[0])
    assert same(arrays, second)
    assert (repo.traffic().bytes_moved, repo.traffic().patches) == (before.bytes_moved, 0)
    assert repo.stats().shards[0].patches_made == made


def test_a_named_transport_brings_whole_tensors(repo: Repository, far: Repository, name: str, patched: None) -> None:
    first, second, refs = two(repo, name, "large")
    arrays = copied(first)
    far.load(refs[1], into=arrays, have=refs[0], transport="object_store")
    assert same(arrays, second)
    assert far.traffic().bytes_moved == {"object_store": first["large"].nbytes}


def test_bad_input(repo: Repository, far: Repository, name: str) -> None:
    first = model()
    ref = repo.save(name, first).ref
    arrays = copied(first)
    bad: list[dict[str, Any]] = [{"have": ref}, {"have": name, "into": arrays}, {"have": {"a": 1}, "into": arrays}]
    for options in [*bad, {"have": ref, "into": arrays, "transport": "pigeon"}]:
        with pytest.raises(OptionError):
            far.load(ref, **options)
    with pytest.raises(ModelNotFoundError):
        far.load(f"{name}@9", into=arrays, have=ref)
    with pytest.raises(TensorNotFoundError):
        far.load(ref, into={**arrays, "other": arrays["bias"]}, have=ref)
    with pytest.raises(TensorMismatchError):
        far.load(ref, into={**arrays, "wide": arrays["wide"][:9]}, have=ref)
    assert same(arrays, first)


def test_whole_tensors_where_patches_were_slower(
    repo: Repository, far: Repository, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """That is a choice, and no fallback."""
    caplog.set_level(logging.WARNING)
    first, second, refs = two(repo, name, "large")
    costs = far._patching._costs_of(name)
    costs.measured("patch", first["large"].nbytes, 10.0)
    costs.measured("whole", first["large"].nbytes, 0.001)
    arrays = copied(first)
    far.load(refs[1], into=arrays, have=refs[0])
    assert same(arrays, second)
    assert (far.traffic().patches, far.traffic().whole, far.traffic().fallbacks) == (0, 1, {})
    assert caplog.records == []


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_patch_and_whole_give_equal_bits(repo: Repository, far: Repository, data: st.DataObject) -> None:
    """Random versions that derive from each other; random holdings, some of which are not what they are said to be."""
    name = f"m-{uuid.uuid4().hex[:8]}"
    root = {"a": RNG.integers(0, 1 << 16, 3000, np.uint16), "b": RNG.normal(size=(30, 40)), "c": np.arange(5)}
    versions = {repo.save(f"{name}-0", root).ref: root}
    for _ in range(data.draw(st.integers(1, 5))):
        parent = data.draw(st.sampled_from(sorted(versions)))
        changed = data.draw(st.sets(st.sampled_from(sorted(root))))
        tensors = stepped(versions[parent], *changed, share=data.draw(st.sampled_from([0.001, 0.05, 0.5, 1.0])))
        inherit = data.draw(st.sampled_from(["auto", None]))
        line = data.draw(st.integers(0, 1))
        versions[repo.save(f"{name}-{line}", tensors, parent=parent, inherit=inherit).ref] = tensors
    wanted, holds = (data.draw(st.sampled_from(sorted(versions))) for _ in range(2))
    arrays = copied(versions[holds])
    for each in data.draw(st.sets(st.sampled_from(sorted(root)))):
        as_bytes(arrays[each])[0] ^= 255  # it is not what it is said to be
    hashes = {each: digest_of(as_bytes(array)) for each, array in versions[holds].items()}
    have = data.draw(st.sampled_from([holds, hashes, {}]))
    with mock.patch.object(PatchCosts, "prefers_patches", return_value=data.draw(st.booleans())):
        far.load(wanted, into=arrays, have=have)
    assert same(arrays, versions[wanted])
    assert same(arrays, far.load(wanted))
