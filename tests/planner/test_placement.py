"""Homes of names: a function of name and shards alone, even, and moved as little as possible."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.planner.placement import home_of

shards = st.lists(st.integers(0, 1000), min_size=1, max_size=8, unique=True)
names = st.text("ab/-.0", min_size=1, max_size=12)


@given(names, shards, st.randoms(use_true_random=False))
def test_a_home_is_one_of_the_shards_whatever_their_order(name: str, among: list[int], chance: random.Random) -> None:
    home = home_of(name, among)
    assert home in among
    chance.shuffle(among)
    assert home_of(name, among) == home


@given(names, shards, st.integers(0, 1000))
def test_a_joining_shard_only_takes_names_for_itself(name: str, among: list[int], joins: int) -> None:
    before = home_of(name, among)
    assert home_of(name, [*among, joins]) in {before, joins}


@given(names, st.lists(st.integers(0, 1000), min_size=2, max_size=8, unique=True))
def test_a_leaving_shard_moves_its_own_names_only(name: str, among: list[int]) -> None:
    home = home_of(name, among)
    for leaves in among:
        if leaves != home:
            assert home_of(name, [shard for shard in among if shard != leaves]) == home


def test_homes_are_even() -> None:
    counts = Counter(home_of(f"model-{i}", range(8)) for i in range(8000))
    assert set(counts) == set(range(8))
    assert all(850 < count < 1150 for count in counts.values())  # 5 standard deviations of 30


def test_a_home_is_the_same_in_every_process() -> None:
    program = "from tensorvine.planner.placement import home_of; print([home_of(f'm{i}', range(5)) for i in range(40)])"
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == str([home_of(f"m{i}", range(5)) for i in range(40)])


def test_no_shard_is_an_error_that_names_the_model() -> None:
    with pytest.raises(ValueError, match="home of 'digits': expected at least one shard"):
        home_of("digits", [])
