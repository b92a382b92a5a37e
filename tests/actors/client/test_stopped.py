"""A client that knows the shards of a repository which is stopped: nothing answers it any more."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.store.errors import RepositoryNotFoundError, ShardUnavailableError

TENSORS = {"dense/kernel": np.ones((4, 4), np.float32)}

QUESTIONS: dict[str, Callable[[Repository], object]] = {
    "models": lambda known: known.models(),
    "load": lambda known: known.load("m"),
    "stats": lambda known: known.stats(),
    "save": lambda known: known.save("n", TENSORS, timeout=30.0),
}


def test_a_catalog_that_is_found_again_is_no_stopped_repository(
    cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"stopped-{uuid.uuid4().hex[:6]}"
    with Repository.start(name, shards=1, preallocate_bytes=0), closing(Repository.connect(name)) as known:
        known.save("m", TENSORS)
        session, died = known._session, ShardUnavailableError("it died")

        def missing(*_: object) -> object:
            raise RepositoryNotFoundError("there is none")

        with monkeypatch.context() as patch:
            patch.setattr(session.catalog, "call", missing)
            with pytest.raises(RepositoryNotFoundError, match="it was stopped"):
                session.lost(0, died)
        session.lost(0, died)
        assert (known.load("m")["dense/kernel"] == 1).all()


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stopped_repository_answers_nobody(cluster: object, question: str) -> None:
    name = f"stopped-{uuid.uuid4().hex[:6]}"
    owner = Repository.start(name, shards=2, preallocate_bytes=0)
    with closing(owner), closing(Repository.connect(name)) as known:
        known.save("m", TENSORS)
        for ask in QUESTIONS.values():
            ask(known)
        owner.close()
        with pytest.raises((ShardUnavailableError, RepositoryNotFoundError)):
            QUESTIONS[question](known)
