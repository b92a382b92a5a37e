"""Files of other tools on this machine, in an object store and in what fsspec knows; and what is no place for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from pyarrow import fs
from tensorvine.store.archive.interchange import read, shown, write
from tensorvine.store.archive.opening import Place
from tensorvine.store.arrays import Array
from tensorvine.store.errors import StorageError

from tests.support.s3 import KEY, SECRET, S3Server

TENSORS: Mapping[str, Array] = {
    "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scale": np.array(1.5, ml_dtypes.bfloat16),
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


def holds(path: str | Path) -> bool:
    found, expected = read(path)[0], TENSORS
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)


def same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tolist() == b.tolist()


class TestObjectStore:
    @pytest.mark.parametrize("name", ["m.safetensors", "m.arrow"])
    def test_what_is_written_is_read_and_replaced(self, server: S3Server, name: str) -> None:
        uri = server.uri(f"new%20folder%2B/%C3%A9%20{name}")
        write(uri, {"other": np.zeros(3)})
        write(uri, TENSORS)
        assert holds(uri)
        listed = server.system().get_file_info(fs.FileSelector(server.bucket, recursive=True))
        assert [info.path for info in listed if name in info.path] == [f"{server.bucket}/new folder+/é {name}"]

    def test_hdf5_is_read(self, server: S3Server, tmp_path: Path) -> None:
        with h5py.File(tmp_path / "m.weights.h5", "w") as file:
            file["w"] = TENSORS["kernel"]
        place = Place(server.uri("m.weights.h5"))
        place.replace(lambda sink: sink.write((tmp_path / "m.weights.h5").read_bytes()))
        assert read(server.uri("m.weights.h5"))[0]["w"].tolist() == TENSORS["kernel"].tolist()

    @pytest.mark.parametrize("name", ["none.arrow", "none/none.weights.h5"])
    def test_what_is_not_there_is_named_without_the_secret(self, server: S3Server, name: str) -> None:
        for uri in (server.uri(name), server.uri(name) + "&no_such_option=1"):
            with pytest.raises(StorageError, match=rf"^s3://{server.bucket}/{name}: expected") as raised:
                read(uri)
            assert SECRET not in str(raised.value)
        assert shown(server.uri(name)) == f"s3://{server.bucket}/{name}"

    def test_a_bucket_that_is_missing_and_a_bucket_alone_are_refused(self, server: S3Server) -> None:
        missing = server.uri("m.arrow").replace(server.bucket, "no-such-bucket")
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/m\.arrow: expected to write it"):
            write(missing, TENSORS)
        with pytest.raises(StorageError, match=r"expected a folder or bucket, and the name of a file in it"):
            write(f"s3://{KEY}:{SECRET}@m.arrow?region=us-east-1", TENSORS)


class TestThisMachine:
    @pytest.mark.parametrize("scheme", ["file", "fsspec+file", "fsspec+local"])
    def test_a_uri_means_the_path(self, tmp_path: Path, scheme: str) -> None:
        uri = f"{scheme}://{tmp_path}/m.arrow"
        write(uri, TENSORS)
        assert holds(tmp_path / "m.arrow")
        assert holds(uri)
        with pytest.raises(StorageError, match="expected an existing folder"):
            write(f"{scheme}://{tmp_path}/missing/m.arrow", TENSORS)

    def test_a_path_that_looks_like_a_uri_is_a_path(self, tmp_path: Path) -> None:
        (tmp_path / "a:").mkdir()
        write(f"{tmp_path}/a://m?.arrow", TENSORS)
        assert holds(tmp_path / "a:" / "m?.arrow")


class TestFsspec:
    def test_the_memory_of_this_process_is_the_callers(self) -> None:
        memory = pytest.importorskip("fsspec").filesystem("memory")
        uri = "fsspec+memory:///some folder/m.arrow"
        write(uri, {"other": np.zeros(3)})
        write(uri, TENSORS)
        assert memory.ls("/some folder", detail=False) == ["/some folder/m.arrow"]
        assert holds(uri)
        with pytest.raises(StorageError, match=r"none\.arrow: expected to read it"):
            read("fsspec+memory:///some folder/none.arrow")


@pytest.mark.parametrize(
    "path",
    [
        "memory://m.arrow",
        "mock:///m.arrow",
        "unknown://host/m.arrow",
        "fsspec+unknown://host/m.arrow",
        "fsspec+dir://host/m.arrow",
        "a\0.arrow",
        "file:///a%00.arrow",
        b"/tmp/m.arrow",
        None,
        3,
    ],
)
def test_what_is_no_place_of_a_file_is_refused(path: Any) -> None:
    for call in (lambda: write(path, TENSORS), lambda: read(path)):
        with pytest.raises(StorageError, match="expected"):
            call()
