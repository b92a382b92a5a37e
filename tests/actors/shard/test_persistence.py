"""What persistence promises, over local files and an S3-compatible server: what was on disk comes back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import Codec, Delta, ModelRef, Quantize, Shuffle, Zstd
from tensorvine.store.archive.archive import Archive
from tensorvine.store.errors import ModelNotFoundError, StorageError

from tests.support.disk import MIB, chain, is_refused, noise, same, start, weights
from tests.support.s3 import SECRET, S3Server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.workers_import("quantising")]

GRAPH = chain(["Dense", "Conv", "Dense"])
TUNED = chain(["Dense", "Conv", "Dense", "Head"])
CODECS = [None, Delta() | Shuffle() | Zstd()]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "repository")
    return request.getfixturevalue("s3").uri(uuid.uuid4().hex[:8])


def tensors(seed: int, big: int = 50_000) -> dict[str, np.ndarray]:
    return {"l0/w": weights(12, seed), "l1/w": weights(big, seed), "l2/w": noise(300, seed), "step": np.array(seed)}


class TestContract:
    @pytest.mark.parametrize("codec", CODECS, ids=["plain", "lossless"])
    def test_everything_is_back_on_another_number_of_shards(
        self, cluster: object, uri: str, codec: Codec | None
    ) -> None:
        large = weights(33 * MIB // 4, 3)  # larger than a segment
        first, tuned = tensors(1), {**tensors(1), "l2/w": noise(300, 9), "l3/w": large}
        with start(uri, shards=2, codec=codec) as repo:
            base = repo.save("base", first, graph=GRAPH, quality=0.25, metadata={"epoch": 1}, durability="disk").ref
            child = repo.save("tuned", tuned, graph=TUNED, parent=base, quality=0.75).ref
            grand = repo.save("tuned", {**tuned, "step": np.array(7)}, graph=TUNED, metadata={"ä": [None]}).ref
            head = noise(70_000, 5)
            tied = {"wrapped/w": first["l1/w"].copy(), "embed": head, "head": head}
            adapted = repo.save("adapted", tied, parent=base)
            gone = repo.save("base", tensors(2), graph=GRAPH).ref
            repo.save("deep/name/", {"t": np.zeros((0, 3), np.float16)}, durability="disk")
            repo.flush()
            repo.retire(child)
            repo.retire(gone)
            infos = {ref: repo.info(ref) for ref in repo.models()}
            owners = {ref: repo.owners(ref) for ref in infos}
            written = repo.contributions(grand)
        assert infos.keys() == {base, grand, adapted.ref, ModelRef("deep/name/", 1)}
        assert (adapted.bytes_written, adapted.bytes_inherited) == (head.nbytes, first["l1/w"].nbytes)
        assert infos[grand].codec == (codec.spec if codec else None)
        assert written == {base: ["l0/w", "l1/w"], child: ["l2/w", "l3/w"], grand: ["step"]}
        with start(uri, shards=3, codec=codec) as repo:
            assert {ref: repo.info(ref) for ref in repo.models()} == infos
            assert repo.stats().bytes_memory == 0
            assert {ref: repo.owners(ref) for ref in infos} == owners
            assert repo.lineage(grand) == [grand, child, base]
            assert repo.descendants(base) == [adapted.ref, grand]
            assert same(repo.load("adapted"), tied)
            assert repo.contributions("adapted") == {base: ["wrapped/w"], adapted.ref: ["embed", "head"]}
            assert repo.common_ancestor(grand, base) == base
            assert repo.contributions(grand) == written
            assert repo.graph("tuned") == TUNED
            assert repo.load(grand, tensors=["step"])["step"] == 7
            assert same(repo.load(grand, layers=["l1", "l3"]), {k: tuned[k] for k in ("l1/w", "l3/w")})
            assert same(repo.load(grand), {**tuned, "step": np.array(7)})
            assert same(repo.load("base"), first)
            assert repo.load("deep/name/")["t"].shape == (0, 3)
            with pytest.raises(ModelNotFoundError, match=f"{child} was retired"):
                repo.load(child)
            match = repo.longest_prefix(TUNED)
            assert match is not None
            assert match.ref == grand
            match.release()
            assert repo.find([{"class": "Conv"}, {"class": "Dense"}]) == [base, grand]
            assert repo.find([{"class": "Head"}]) == [grand]
            assert repo.verify() == []
            assert repo.save("base", first, graph=GRAPH, durability="disk").bytes_written == 0
            assert [repo.save(n, first).ref.version for n in ("base", "tuned", "new")] == [4, 3, 1]
            assert repo.wait_newer("base") == ModelRef("base", 4)
            repo.flush()
            assert repo.verify() == []

    def test_what_is_retired_leaves_the_disk_and_its_number_stays_used(self, cluster: object, uri: str) -> None:
        with start(uri, shards=2) as repo:
            repo.save("m", tensors(1), durability="disk")
            repo.save("m", {**tensors(1), "l0/w": weights(100_000, 5)})
            repo.save("other", tensors(3))
            repo.flush()
            for model in ("m@1", "other", "m"):
                repo.retire(model)
            files = Archive(uri)
            eventually(lambda: files.segments() == {}, "no tensor on disk")
            assert repo.stats().bytes_disk == 0
        with start(uri, shards=1) as repo:
            assert (repo.models(), repo.stats().tensors) == ([], 0)
            assert repo.save("m", tensors(2), durability="disk").ref == ModelRef("m", 3)
            assert repo.lineage("m") == [ModelRef("m", 3)]

    def test_a_lossy_codec_is_named_and_keeps_within_half_a_step(self, cluster: object, uri: str) -> None:
        given = {"w": weights(100_000, 1), "i": np.arange(70_000), "frozen": weights(50_000, 2)}
        with start(uri, codec=Quantize(8) | Zstd()) as repo:
            repo.save("m", given, durability="disk")
            assert same(repo.load("m"), given)
        with start(uri, codec=Quantize(8) | Zstd()) as repo:
            assert repo.info("m").codec == "quantize(8,tensor)|zstd(3)"
            loaded = repo.load("m")
            assert same({"i": loaded["i"]}, {"i": given["i"]})
            for name in ("w", "frozen"):
                step = float(np.ptp(given[name])) / 255
                worst = float(np.abs(loaded[name] - given[name]).max())
                assert 0 < worst <= step / 2 * (1 + 1e-5)
            saved = repo.save("m", {**given, "frozen": loaded["frozen"], "w": weights(100_000, 8)}, durability="disk")
            assert saved.bytes_inherited == given["i"].nbytes + given["frozen"].nbytes
            assert repo.verify() == []


class TestObjectStoreInTrouble:
    def test_what_it_refuses_is_named_without_the_credentials(self, cluster: object, s3: S3Server) -> None:
        prefix = uuid.uuid4().hex[:8]
        with start(s3.uri(prefix)) as repo:
            repo.save("m", tensors(1), durability="disk")
            s3.refuses = lambda asked: asked["REQUEST_METHOD"] == "PUT"
            try:
                with pytest.raises(
                    StorageError, match=rf"s3://{s3.bucket}/{prefix}/segments/\w+\.\d+\.arrow"
                ) as caught:
                    repo.save("m", tensors(2), durability="disk")
                waiting = repo.save("m", tensors(3)).ref
                eventually(lambda: is_refused(repo), "it refuses this one, too")
                with pytest.raises(StorageError):
                    repo.flush(timeout=1)
            finally:
                s3.refuses = lambda _: False
            repo.flush()
            assert repo.models() == [ModelRef("m", 1), waiting]
            assert repo.verify() == []
            with pytest.raises(ValueError, match="is already running with path") as joined:
                Repository.start(repo.name, path=s3.uri("elsewhere"))
        for text in (str(caught.value), str(joined.value)):
            assert SECRET not in text
        with start(s3.uri(prefix), shards=2) as repo:
            assert same(repo.load("m"), tensors(3))
