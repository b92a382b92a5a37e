"""What may be used: until it is closed, and not in a forked child."""

from __future__ import annotations

import re

import pytest
from tensorvine.actors.engine.opened import Opened
from tensorvine.store.errors import ClosedError, TensorVineError

from tests.support.forked import in_child, outcomes


def test_what_is_closed_is_refused_and_is_closed_once() -> None:
    opened = Opened("client")
    opened.check()
    assert opened.close()
    assert not opened.close()
    assert opened.closed
    assert not opened.inherited
    with pytest.raises(ClosedError, match="client: expected it to be open; it was closed"):
        opened.check()
    opened.check_process()


def test_a_closed_error_is_one_of_the_tree_and_a_runtime_error() -> None:
    assert issubclass(ClosedError, TensorVineError)
    assert issubclass(ClosedError, RuntimeError)


def test_a_forked_child_is_refused_and_closes_nothing() -> None:
    opened = Opened("client")

    def child() -> object:
        made_here = Opened("the child's own")
        made_here.check()
        return [outcomes({"check": opened.check, "process": opened.check_process}), opened.close(), opened.closed]

    assert in_child(child) == [{"check": "ClosedError", "process": "ClosedError"}, False, True]
    opened.check()


def test_the_error_in_a_child_names_both_processes_and_says_what_to_do() -> None:
    opened = Opened("client")

    def child() -> str:
        try:
            opened.check()
        except ClosedError as exc:
            return str(exc)
        return "nothing was raised"

    assert re.fullmatch(r"client: expected process \d+, .*forked child \d+: connect in .*'spawn'.*", in_child(child))


def test_what_was_closed_before_the_fork_is_refused_in_the_child_too() -> None:
    opened = Opened("client")
    opened.close()
    assert in_child(lambda: outcomes({"check": opened.check})) == {"check": "ClosedError"}
