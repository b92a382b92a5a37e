"""A repository that an earlier source wrote (`tests/data`) is read, gone on with, and loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store import ModelRef
from tensorvine.store.errors import ModelNotFoundError

DATA = Path(__file__).parents[2] / "data"
RNG = np.random.default_rng(0)
BODY = RNG.standard_normal((8, 16)).astype(np.float32)
HEAD = RNG.integers(-5, 5, (16, 3)).astype(np.int16) + np.int16(1)
VERSIONS = {
    "digits@2": {"body/w": BODY, "head/w": HEAD, "head/b": np.zeros(3)},
    "digits@3": {"body/w": BODY, "head/w": HEAD, "head/b": np.ones(3)},
    "all/digits@1": {"body/w": BODY, "head/w": np.ones((16, 5), np.int16), "head/b": np.full(5, 2.5)},
}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_repository_of_81237f6(cluster: object, tmp_path: Path, shards: int) -> None:
    path = shutil.copytree(DATA / "repository-81237f6", tmp_path / "repository")
    with Repository.start(f"earlier-{shards}", path=path, shards=shards, preallocate_bytes=0) as repo:
        assert [str(ref) for ref in repo.models()] == ["all/digits@1", "digits@2", "digits@3"]
        for name, expected in VERSIONS.items():
            found = repo.load(name)
            assert found.keys() == expected.keys()
            for tensor, array in expected.items():
                assert found[tensor].dtype == array.dtype
                assert np.array_equal(found[tensor], array)
        info = repo.info("digits@2")
        assert (info.quality, info.metadata, info.parent) == (0.75, {"epoch": 2}, ModelRef("digits", 1))
        assert [str(ref) for ref in repo.lineage("all/digits")] == ["all/digits@1", "digits@2", "digits@1"]
        assert repo.graph("all/digits").common_prefix(repo.graph("digits")) == {"in": "in", "body": "body"}
        assert repo.verify() == []
        with pytest.raises(ModelNotFoundError, match="retired"):
            repo.load("gone@1")
        assert str(repo.save("digits", VERSIONS["digits@3"], durability="disk").ref) == "digits@4"
        repo.retire("digits@2")
        assert np.array_equal(repo.load("all/digits")["body/w"], BODY)
