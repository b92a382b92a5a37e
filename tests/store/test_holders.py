"""Requests, pins and fillings: told apart whatever they are made of, and the same in another process."""

from __future__ import annotations

import pickle
from itertools import combinations

import pytest
from tensorvine.store.holders import Filling, Lease, Owner, Request
from tensorvine.store.refs import ModelRef

ALIKE: list[ModelRef | Owner | Lease] = [
    ModelRef("a", 1),
    Request("0123456789abcdef", 1),
    Request("0123456789abcdef", 2),
    Filling("a", 1),
    Filling("a"),
    Lease(Request("0123456789abcdef", 1)),
    Lease(Request("0123456789abcdef", 1), 1),
    Lease(Request("0123456789abcdef", 2), 1),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(ALIKE, 2)), ids=str)
def test_no_two_are_equal(one: object, other: object) -> None:
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize("one", ALIKE, ids=str)
def test_a_message_brings_the_same(one: object) -> None:
    found = pickle.loads(pickle.dumps(one, 5))  # noqa: S301  of this test
    assert (found, type(found), hash(found)) == (one, type(one), hash(one))
