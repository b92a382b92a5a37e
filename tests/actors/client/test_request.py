"""What is wrong with a save is said before a shard is asked, by an error of the tree."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tensorvine.actors.client.launch import disk_options, launch
from tensorvine.actors.client.save.request import requested
from tensorvine.store.errors import OptionError, TensorMismatchError
from tensorvine.store.sizes import check_bytes


@pytest.mark.parametrize("quality", [10**400, -(10**400), "good", [1.0], {}, 1j, np.zeros(2), object()])
def test_a_quality_that_is_no_number_is_refused(quality: Any) -> None:
    with pytest.raises(TensorMismatchError, match=r"save of 'm': quality: expected a number"):
        requested("m", {}, None, quality=quality)


@pytest.mark.parametrize("quality", [0, 0.5, True, np.float32(0.5), np.int64(3), math.inf, -math.inf, None])
def test_a_quality_is_kept(quality: Any) -> None:
    assert requested("m", {}, None, quality=quality).quality == quality


def test_a_quality_of_nan_is_kept_and_ranks_last() -> None:
    assert math.isnan(requested("m", {}, None, quality=math.nan).quality or 0)


@pytest.mark.parametrize(
    "metadata",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"losses": [{"of": -math.inf}]},
        {"loss": np.float32(math.nan)},
        {"loss": np.complex64(1)},
        {"n": 10**5000},
        {1: "a", "1": "b"},
        {"deep": {True: 1, "true": 2}},
        {(1, 2): 3},
        {"at": object()},
        3,
        "text",
        [1],
    ],
)
def test_metadata_that_json_has_not_is_refused(metadata: Any) -> None:
    with pytest.raises(TensorMismatchError, match=r"save of 'm': metadata(\[.*\])?: expected a .*JSON values?; "):
        requested("m", {}, None, metadata=metadata)


@pytest.mark.parametrize(
    ("metadata", "where", "found"),
    [
        ({"at": object()}, "['at']", "found object"),
        ({"a": {"b": [1, np.zeros(2)]}}, "['a']['b'][1]", "found ndarray"),
        ({"losses": [{"of": -math.inf}]}, "['losses'][0]['of']", "Out of range float"),
        ({"fine": 1, "deep": {(1, 2): 3}}, "['deep'][(1, 2)]", "keys must be str"),
    ],
)
def test_a_value_that_json_has_not_is_named_by_its_keys(metadata: Any, where: str, found: str) -> None:
    with pytest.raises(TensorMismatchError, match=re.escape(f"metadata{where}: expected a JSON value; {found}")):
        requested("m", {}, None, metadata=metadata)


def test_metadata_that_holds_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    with pytest.raises(TensorMismatchError, match=r"metadata.*Circular"):
        requested("m", {}, None, metadata=metadata)


def test_scalars_of_numpy_are_numbers_of_json() -> None:
    given = {"a": np.float32(1.5), "b": [np.int64(3), {"c": np.bool_(True)}], "d": ml_dtypes.bfloat16(2)}
    assert requested("m", {}, None, metadata=given).metadata == '{"a": 1.5, "b": [3, {"c": true}], "d": 2.0}'


@pytest.mark.parametrize("option", ["store_bytes", "preallocate_bytes", "lag_bytes"])
@pytest.mark.parametrize("value", ["4G", "", -1, "-1", 2e9, True])
def test_a_size_that_is_none_is_refused(option: str, value: Any) -> None:
    sizes: dict[str, Any] = {"store_bytes": None, "preallocate_bytes": None} | {option: value}
    start = partial(launch, "name", None, **sizes)
    if option == "lag_bytes":
        start = partial(disk_options, "path", None, None, value)
    with pytest.raises(OptionError, match=rf"{option}: expected .*; found {re.escape(repr(value))}"):
        start()


def test_sizes_are_integers_or_text() -> None:
    assert [check_bytes("size", value) for value in (5, np.int64(7), "200MB", "1 KiB")] == [5, 7, 200_000_000, 1024]
    disk = disk_options("path", None, None, "1MB")
    assert disk is not None
    assert disk.bytes_unwritten == 1_000_000


@pytest.mark.parametrize(
    "option", [{"timeout": math.nan}, {"timeout": "1"}, {"durability": "paper"}, {"durability": []}]
)
def test_an_option_out_of_its_range_is_an_error_of_the_tree(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"{next(iter(option))}: expected") as raised:
        requested("m", {}, None, **option)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("path", [3, b"path", object(), []])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(OptionError, match=r"path: expected a directory or a URI"):
        disk_options(path, None, None, None)


@pytest.mark.parametrize("tensors", [None, 3, [np.zeros(1)], {3: np.zeros(1)}, {"": np.zeros(1)}, {"a\ud800": 1.0}])
def test_tensors_that_are_no_mapping_of_names_are_refused(tensors: Any) -> None:
    with pytest.raises(TensorMismatchError, match=r"save of 'm': tensors: expected"):
        requested("m", tensors, None)
