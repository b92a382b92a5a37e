"""A shard answers all that it can be asked, each call by one of its parts."""

from __future__ import annotations

import inspect

from tensorvine.actors.engine.sockets.hosting import methods_of
from tensorvine.actors.rpc.calls import Declaration
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.shard import Shard

DECLARED = {name: call for name, call in inspect.getmembers(ShardCalls) if isinstance(call, Declaration)}


def test_what_is_declared_is_answered_and_nothing_else() -> None:
    answering = {name: method.answers for name, method in inspect.getmembers(Shard) if hasattr(method, "answers")}
    assert answering == DECLARED


def test_a_shard_runs_each_call_in_the_declared_group_and_no_other_method() -> None:
    assert methods_of(Shard) == {name: call.group for name, call in DECLARED.items()}


def test_calls_take_what_they_are_declared_to_take() -> None:
    taken = {name: parameters(getattr(Shard, name)) for name in DECLARED}
    assert taken == {name: list(call._signature.parameters) for name, call in DECLARED.items()}


def parameters(method: object) -> list[str]:
    """Those of a method's own: Ray adds one once it has made an actor of the class in this process."""
    return [name for name in inspect.signature(method).parameters if name != "_ray_trace_ctx"]
