"""Aliases in the catalog's state: what they name, what they protect, and that a replay keeps them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorvine.store.catalog.journal import replay, snapshot_of
from tensorvine.store.catalog.state import ALIAS_BYTES, CatalogState
from tensorvine.store.errors import InvalidNameError, ModelNotFoundError, OptionError, StoreFullError
from tensorvine.store.holders import Request
from tensorvine.store.refs import ModelRef, Which, check_alias, check_followed, split_ref

from .test_state import draft_of

MOVES = st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from([1, 2, 3, None, "p", "q"]), st.booleans()))


def filled(versions: int = 3) -> CatalogState:
    state = CatalogState("start")
    for number in range(1, versions + 1):
        draft = draft_of("m", Request("client", number), {})
        state.apply_all(state.decide_commit(draft, {}, now_ns=number))
    return state


def move(state: CatalogState, alias: str, which: Which, ends: bool = False, number: int = 99) -> None:
    state.apply_all(state.decide_alias(Request("client", number), "m", alias, which, ends))


@given(MOVES)
def test_aliases_are_a_mapping_that_a_replay_keeps(moves: list[tuple[str, Which, bool]]) -> None:
    state, model = filled(), dict[str, int]()
    for number, (alias, which, ends) in enumerate(moves, 100):
        version = model.get(which, 0) if isinstance(which, str) else which or 3
        if ends:
            model.pop(alias, None)
        elif version:
            model[alias] = version
        else:
            with pytest.raises(ModelNotFoundError):
                move(state, alias, which)
            continue
        move(state, alias, which, ends, number)
    copy = CatalogState("start")
    replay(copy, b"".join(snapshot_of(state.snapshot(b""))))
    for one in (state, copy):
        assert one.aliases() == ({"m": model} if model else {})
        assert {alias: one.resolve("m", alias).version for alias in model} == model
        assert one.bytes_metadata == filled().bytes_metadata + ALIAS_BYTES * len(model)


def test_a_version_that_an_alias_names_cannot_be_retired() -> None:
    state = filled()
    move(state, "prod", 2)
    for which in (2, "prod"):
        with pytest.raises(OptionError, match="retire of m@2: expected a version that no alias names; found 'prod'"):
            state.decide_retire(Request("client", 9), "m", which)
    move(state, "prod", 3)
    state.apply_all(state.decide_retire(Request("client", 9), "m", 2))
    assert state.models() == [ModelRef("m", 1), ModelRef("m", 3)]


def test_clients_hear_of_a_move_by_the_name_of_the_alias() -> None:
    state = filled()
    move(state, "prod", 2)
    assert state.effects.changed[-1] == "m@prod"
    assert state.answer(Request("client", 99)) == (ModelRef("m", 2), 0)


def test_messages() -> None:
    state = filled(1)
    with pytest.raises(ModelNotFoundError, match="expected an alias 'prod' of 'm'; it has no alias"):
        state.resolve("m", "prod")
    move(state, "best", None)
    with pytest.raises(ModelNotFoundError, match="expected an alias 'prod' of 'm'; its aliases are 'best'"):
        state.resolve("m", "prod")
    state.capacity = state.bytes_metadata
    with pytest.raises(StoreFullError, match="alias m@prod"):
        move(state, "prod", 1)
    move(state, "best", 1)


@pytest.mark.parametrize("alias", ["", "7", "-a", "a b", "a@b", "a/b", "x" * 65, 7, None])
def test_an_alias_begins_with_a_letter(alias: object) -> None:
    with pytest.raises(InvalidNameError, match="alias: expected 1 to 64 characters"):
        check_alias(alias)


def test_references_by_alias() -> None:
    assert split_ref("a/b@v1.0-rc_2") == ("a/b", "v1.0-rc_2")
    with pytest.raises(InvalidNameError, match="expected 'name@version'"):
        ModelRef.parse("m@prod")
    assert [check_followed(name) for name in ("m", "m@prod")] == ["m", "m@prod"]
    with pytest.raises(InvalidNameError, match="found 'm@3', which is one version"):
        check_followed("m@3")
