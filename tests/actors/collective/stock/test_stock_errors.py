"""Errors of our groups as users of `ray.util.collective` expect them."""

from __future__ import annotations

import pickle

import pytest
from tensorvine.actors.collective.stock.errors import raised_as_rays
from tensorvine.store.errors import (
    CollectiveError,
    EngineStoppedError,
    OperationTimeoutError,
    PeerLostError,
    TensorMismatchError,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (TensorMismatchError, ValueError),
        (PeerLostError, ConnectionError),
        (OperationTimeoutError, TimeoutError),
        (ValueError, ValueError),
    ],
)
def test_an_error_is_what_it_was_and_a_runtime_error(kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(RuntimeError, match=r"^where: found that$") as caught, raised_as_rays():
        raise kind("where: found that")
    error = caught.value
    for wanted in (kind, builtin, CollectiveError):
        assert isinstance(error, wanted)
    assert isinstance(error.__cause__, kind)
    travelled = pickle.loads(pickle.dumps(error))  # noqa: S301 - written here
    assert (type(travelled), str(travelled)) == (type(error), str(error))


@pytest.mark.parametrize("error", [CollectiveError("a"), EngineStoppedError("b"), KeyError("c")])
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, raised_as_rays():
        raise error
    assert caught.value is error
