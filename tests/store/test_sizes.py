"""Sizes that people write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.sizes import bytes_of, size


@given(st.integers(0, 10**18))
def test_what_size_writes_is_read_again(count: int) -> None:
    assert abs(bytes_of(size(count)) - count) <= count * 0.05
    assert bytes_of(str(count)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("12 B", 12),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("1.5 kB", 1500),
        (" 512MiB ", 512 << 20),
        ("0.5GiB", 1 << 29),
        ("1TiB", 1 << 40),
        ("1.1MB", 1_100_000),
        ("2PB", 2 * 10**15),
        ("3KB", 3000),
    ],
)
def test_units_are_of_1000_or_1024(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "4G", "4 XB", "1.5", "1.5B", "4GB3", "0x10", "٣", "1,000", "inf"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expected bytes, such as 1000, 4GB") as refused:
        bytes_of(text)
    assert repr(text) in str(refused.value)
