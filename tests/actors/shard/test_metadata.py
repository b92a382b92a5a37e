"""The users' metadata: counted, limited, and freed with its version."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tensorvine.actors.rpc.messages import METADATA_BYTES
from tensorvine.store.errors import OptionError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Lease, Query, Save
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import check_metadata
from tensorvine.store.versions.version import Draft

from tests.support.home import CLIENT, Home

LARGE = '{"note": "' + "a" * 100_000 + '"}'


def draft(metadata: str) -> Draft:
    return Draft(
        name="m",
        save=Save("client", 1),
        parent=None,
        quality=0.5,
        metadata=metadata,
        graph_key=b"key",
        architecture=(ModelGraph(()).to_json(), None),
        body=b"",
        holds={},
        bytes_owned=0,
        bytes_total=0,
    )


def test_metadata_is_counted_and_goes_with_its_version() -> None:
    state = ShardState(0, lambda name: 0)
    without = draft("{}")
    state.publish(state.begin_commit(without), without, 1)
    empty = state.stats().bytes_metadata
    for number in (1, 2):
        large = draft(LARGE)
        ref = state.publish(state.begin_commit(large), large, 2)
        assert state.stats().bytes_metadata == empty + len(LARGE)
        if number == 2:
            state.pin("m", None, lease := Lease(Query("client", 1), 0), 0.0)
        header = state.record("m", None, "client").header
        state.retire(ref)
        assert state.stats().bytes_metadata == empty
    state.unpin([lease])
    del large
    gc.collect()
    assert [one for one in gc.get_referrers(header) if one is not globals() and not _is_frame(one)] == []


def _is_frame(one: object) -> bool:
    return type(one).__name__ == "frame"


@pytest.mark.parametrize(("text", "nbytes"), [('{"k": "abc"}', 12), ('{"k": "\N{SNOWMAN}"}', 12)])
def test_metadata_beyond_the_limit_is_refused_by_its_bytes(text: str, nbytes: int) -> None:
    check_metadata("m", text, nbytes)
    with pytest.raises(OptionError, match=rf"save of 'm': metadata: expected at most {nbytes - 1} bytes .* {nbytes}\."):
        check_metadata("m", text, nbytes - 1)


def test_a_shard_refuses_a_commit_with_too_much_metadata() -> None:
    """Also of a client that did not check it before."""
    home = Home(roomy=True)
    large = draft('{"x": "' + "a" * METADATA_BYTES + '"}')
    with pytest.raises(OptionError, match=f"expected at most {METADATA_BYTES} bytes as JSON"):
        asyncio.run(home.writes.commit(large, CLIENT, 0, [], [], False, 60.0))
    assert home.state.stats().bytes_metadata == 0
